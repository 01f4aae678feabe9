"""DeltaNet and Gated DeltaNet as decoder layers: baselines that keep a matrix per head instead of a window."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, pad, sigmoid, silu, softplus
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.convolution import chunk_convolution
from ttmem.fast_weights.delta_rule import ENGINES
from ttmem.fast_weights.mlp import MLP
from ttmem.fast_weights.state import LayerState


class DeltaMixer(nn.Module):
    """q, k, v through short convolutions and silu; q and k of unit length; the delta rule; an RMS norm per head.

    Gated: a decay per head and token, exp(-exp(A) softplus(a + d)), and an output gate.
    """

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        d, self.heads = config.hidden_size, config.num_attention_heads
        self.size = config.head_dim or d // self.heads
        width = self.heads * self.size
        self.gated, self.engine = config.rule == "gated_deltanet", config.delta_engine
        self.qkv_proj = nn.Linear(d, 3 * width, bias=False)
        self.beta_proj = nn.Linear(d, self.heads, bias=False)
        self.o_proj = nn.Linear(width, d, bias=False)
        self.norm = LlamaRMSNorm(self.size, eps=config.rms_norm_eps)
        self.conv = nn.Parameter(torch.empty(config.delta_kernel, 3 * width))
        self.decay_proj = nn.Linear(d, self.heads, bias=False) if self.gated else None
        self.gate_proj = nn.Linear(d, width, bias=False) if self.gated else None
        self.log_decay = nn.Parameter(torch.empty(self.heads)) if self.gated else None
        self.decay_bias = nn.Parameter(torch.empty(self.heads)) if self.gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Convolutions of unit size; decays between about 0.999 and 0.2 per token, as Gated DeltaNet spreads them."""
        nn.init.normal_(self.conv, std=self.conv.shape[0] ** -0.5)
        if self.log_decay is not None and self.decay_bias is not None:
            nn.init.uniform_(self.log_decay, 0.0, 2.7)
            nn.init.uniform_(self.decay_bias, -6.9, -2.25)

    def forward(self, x: Tensor, context: Context, state: LayerState | None) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        layout = context.layout
        q, k, v = self._convolved(self.qkv_proj(x), context, state).unflatten(-1, (3, self.heads, self.size)).unbind(2)
        q, k = normalize(q, dim=-1) * self.size**-0.5, normalize(k, dim=-1)
        beta, g = sigmoid(self.beta_proj(x)), None
        if self.decay_proj is not None and self.log_decay is not None and self.decay_bias is not None:
            g = -self.log_decay.exp() * softplus(self.decay_proj(x) + self.decay_bias)
        if layout.lengths is not None:  # padding neither writes nor decays
            real = (layout.coordinates() < layout.lengths.unsqueeze(1)).unsqueeze(-1)
            beta, g = beta * real, None if g is None else g * real
        out, last = ENGINES[self.engine](
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            beta.transpose(1, 2),
            None if g is None else g.transpose(1, 2),
            None if state is None else state.get("recurrent"),
        )
        if state is not None:
            state.set(recurrent=last)
        out = self.norm(out.transpose(1, 2).to(x.dtype))
        if self.gate_proj is not None:
            out = out * silu(self.gate_proj(x)).view_as(out)
        return self.o_proj(out.flatten(2))

    def _convolved(self, qkv: Tensor, context: Context, state: LayerState | None) -> Tensor:
        place = context.layout.places()
        stream = qkv if state is None else state.behind("tail", qkv)
        if state is not None:
            state.set(tail=context.layout.keep_last(stream, self.conv.shape[0] - 1))
        place = pad(place, (stream.shape[1] - qkv.shape[1], 0))
        return silu(chunk_convolution(stream, self.conv.to(qkv.dtype), place)[:, stream.shape[1] - qkv.shape[1] :])


class DeltaLayer(GradientCheckpointingLayer):
    """The delta rule, then a SwiGLU network."""

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__()
        self.mixer = DeltaMixer(config)
        self.mlp = MLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d]."""
        hidden = hidden + self.mixer(self.input_layernorm(hidden), context, state)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
