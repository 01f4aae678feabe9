"""Large-Chunk TTT as a decoder layer: attention within a window, beside a small network trained chunk by chunk."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, sigmoid, silu, softplus
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.state import LayerState
from ttmem.fast_weights.window import WindowLayer
from ttmem.fast_weights.windows import window_attention
from ttmem.training.optimizers import orthogonalize

Weights = tuple[Tensor, Tensor, Tensor]
"""W1, W3 [B, H, m, d] and W2 [B, H, d, m] of f(x) = W2 (silu(W1 x) * W3 x), one network per row and head."""


def apply(W: Weights, x: Tensor) -> Tensor:
    """f(x): x [B, H, C, d] -> [B, H, C, d]."""
    W1, W2, W3 = W
    return (silu(x @ W1.mT) * (x @ W3.mT)) @ W2.mT


def ascend(W: Weights, k: Tensor, v: Tensor, rates: Tensor, muon: bool) -> Weights:
    """dW of the loss -sum_t f(k_t) . v_t, each token and matrix at its own rate: k, v [B, H, C, d], rates [B, H, C, 3].

    muon: the directions of each dW made equally large.
    """
    W1, W2, W3 = W
    r1, r2, r3 = rates.unsqueeze(-2).unbind(-1)
    a, b, back = k @ W1.mT, k @ W3.mT, v @ W2
    s = sigmoid(a)
    slope = s * (1 + a * (1 - s))
    dW1, dW2, dW3 = (r1 * back * b * slope).mT @ k, (r2 * v).mT @ (silu(a) * b), (r3 * back * silu(a)).mT @ k
    if muon:
        dW1, dW2, dW3 = (orthogonalize(x.flatten(0, 1)).view_as(x) for x in (dW1, dW2, dW3))
    return dW1, dW2, dW3


class FastNetwork(nn.Module):
    """The initial weights [H, ..] and what else LaCT adds to a layer."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        width = config.num_attention_heads * (config.head_dim or config.hidden_size // config.num_attention_heads)
        self.heads, d = config.lact_heads, config.hidden_size
        size = width // self.heads
        self.rate = math.log(math.expm1(config.lact_lr))
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(self.heads, size, size)) for _ in range(3))
        self.scale, self.offset = nn.Parameter(torch.empty(2, width)), nn.Parameter(torch.empty(2, width))
        self.rate_proj = nn.Linear(d, 3 * self.heads, bias=False)
        self.gate_proj = nn.Linear(d, self.heads, bias=False)
        self.norm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.w1, self.w2, self.w3):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.ones_(self.scale)
        nn.init.zeros_(self.offset)

    def weights(self, batch: int) -> Weights:
        w1, w2, w3 = (w.expand(batch, *w.shape) for w in (self.w1, self.w2, self.w3))
        return w1, w2, w3

    def inputs(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k of unit length, v [B, T, H, d] and rates [B, T, H, 3], of x and the attention's q, k, v [B, T, ..]."""
        q = silu(q * self.scale[0] + self.offset[0]).unflatten(-1, (self.heads, -1))
        k = silu(k * self.scale[1] + self.offset[1]).unflatten(-1, (self.heads, -1))
        rates = softplus(self.rate_proj(x) + self.rate).unflatten(-1, (self.heads, 3))
        return normalize(q, dim=-1), normalize(k, dim=-1), silu(v).unflatten(-1, (self.heads, -1)), rates

    def restored(self, W: Weights, dW: Weights) -> Weights:
        """W + dW, each row as long as it was at first."""
        starts = (self.w1, self.w2, self.w3)
        w1, w2, w3 = (
            normalize(old + step, dim=-1) * start.norm(dim=-1, keepdim=True)
            for start, old, step in zip(starts, W, dW, strict=True)
        )
        return w1, w2, w3


class LaCTLayer(WindowLayer):
    """Each chunk reads f_W, then its tokens train W: "apply then update". Both share q, k and v with the attention.

    Chunks follow one another, since each step starts from the last one's W. A document per row.
    """

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.fast = FastNetwork(config)

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d]."""
        x, attention = self.input_layernorm(hidden), self.self_attn
        q, k, v = attention.project(x)
        rotated_q, keys, values, segments = attention.attended(q, k, v, context, state)
        window = window_attention(rotated_q, keys, values, attention.window, segments=segments)
        k, v = (y.repeat_interleave(attention.heads // attention.kv_heads, dim=1) for y in (k, v))
        q, k, v = (y.transpose(1, 2).flatten(2) for y in (q, k, v))
        read = self.fast.norm(self._learned(*self.fast.inputs(x, q, k, v), context.layout, state).to(x.dtype))
        read = read * silu(self.fast.gate_proj(x)).unsqueeze(-1)
        hidden = hidden + attention.merge(window + read.flatten(2).unflatten(2, (attention.heads, -1)).transpose(1, 2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _learned(
        self, q: Tensor, k: Tensor, v: Tensor, rates: Tensor, layout: Layout, state: LayerState | None
    ) -> Tensor:
        """f_W(q) with each chunk's W: q, k, v [B, T, H, d], rates [B, T, H, 3] -> [B, T, H, d]."""
        C, T, B = self.config.chunk_size, layout.tokens, q.shape[0]
        w1, w2, w3 = self.fast.weights(B)
        if state is not None:
            w1, w2, w3 = state.get("w1", w1), state.get("w2", w2), state.get("w3", w3)
            k, v = state.behind("pending_k", k), state.behind("pending_v", v)
            rates = state.behind("pending_rates", rates)
        streams = {"pending_k": k, "pending_v": v, "pending_rates": rates}
        held = k.shape[1] - T
        pending = (layout.row_counts() % C).unsqueeze(1).expand(B, 1)
        place = torch.arange(held + T, device=q.device).unsqueeze(0)
        shift = (held - pending + place).clamp_max(held + T - 1)  # the unfinished chunk begins at 0
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, held, 0))
        q, k, v, rates = (_pick(y, shift).transpose(1, 2) for y in (q, k, v, rates))
        total = pending + (T if layout.lengths is None else layout.lengths.unsqueeze(1))
        out = []
        for begin in range(0, held + T, C):
            part = slice(begin, begin + C)
            W = w1, w2, w3
            out.append(apply(W, q[:, :, part]))
            if begin + C <= held + T:
                dW = ascend(W, k[:, :, part], v[:, :, part], rates[:, :, part], self.config.lact_muon)
                complete = (begin + C <= total).view(-1, 1, 1, 1)
                w1, w2, w3 = (torch.where(complete, n, o) for n, o in zip(self.fast.restored(W, dW), W, strict=True))
        if state is not None:
            after = layout.next_counts()
            many = after % C if isinstance(after, int) else C - 1
            state.set(w1=w1, w2=w2, w3=w3, **{name: layout.keep_last(y, many) for name, y in streams.items()})
        joined = (torch.cat(out, dim=2) if out else q).transpose(1, 2)  # none where there is no token at all
        return _pick(joined, pending + torch.arange(T, device=q.device))


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, ..] at index [B, T]."""
    index = index.view(*index.shape, *(1,) * (x.dim() - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))
