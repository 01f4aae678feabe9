"""The SwiGLU network of a layer, cut open before its down-projection."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ttmem.fast_weights.config import TTCDConfig


class MLP(nn.Module):
    """down(act(gate x) * up x), with the parameters' names of Llama."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=config.mlp_bias)
        self.up_proj = nn.Linear(d, f, bias=config.mlp_bias)
        self.down_proj = nn.Linear(f, d, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def features(self, x: Tensor) -> Tensor:
        """Z = act(W_gate x) * W_up x: [.., d] -> [.., f]."""
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.features(x))
