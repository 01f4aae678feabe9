"""A plain decoder layer: attention within a window, then a SwiGLU network. The baseline, what lies between the layers
with a rule, and what these are built on."""

from __future__ import annotations

from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ttmem.fast_weights.attention import Attention, Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.mlp import MLP
from ttmem.fast_weights.state import LayerState


class WindowLayer(GradientCheckpointingLayer):
    """The layer of Llama."""

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, state)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
