"""Projections, rotation and window of an attention layer, with the keys and values it keeps in the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from ttmem.attention import dual_window
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.state import LayerState
from ttmem.fast_weights.windows import dual_window_attention, window_attention

FUSED_FROM = 64
"""Tokens from which sharing work between the windows pays; below, as in decoding, two plain passes do."""


@dataclass
class Context:
    """What all layers of one forward share.

    cos, sin [B, T, head_dim]: the rotation. embeddings [B, T, d]: the token embeddings. completes: whether any row
    reaches the end of a chunk, known behind a state. shared: what the first layer of a kind computes for the others.
    """

    layout: Layout
    cos: Tensor
    sin: Tensor
    embeddings: Tensor
    completes: bool = True
    shared: dict[str, Any] = field(default_factory=dict)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, in the parameters' names and the operations of Llama and Qwen."""

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__()
        d, size = config.hidden_size, config.head_dim or config.hidden_size // config.num_attention_heads
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_dim, self.window, self.fused = size, config.window_of(layer), config.dual_engine == "fused"
        self.q_proj = nn.Linear(d, self.heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, self.kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, self.kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * size, d, bias=config.output_bias)
        self.q_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(size, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, head_dim], k and v [B, H_kv, T, head_dim] of x [B, T, d], not yet rotated."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return q, k, v

    def forward(self, x: Tensor, context: Context, state: LayerState | None) -> Tensor:
        """Attention within the layer's window: x [B, T, d] -> [B, T, d]."""
        q, k, v, segments = self.attended(*self.project(x), context, state)
        return self.merge(window_attention(q, k, v, self.window, segments=segments))

    def dual(
        self, x: Tensor, student_window: int, context: Context, state: LayerState | None
    ) -> tuple[Tensor, Tensor]:
        """The same with the layer's window and with the student's, both [B, T, d]."""
        q, k, v, segments = self.attended(*self.project(x), context, state)
        if self.fused and q.shape[2] >= FUSED_FROM:
            window = k.shape[2] if self.window is None else self.window
            teacher, student = dual_window.dual_window_attention(
                q, k, v, window, min(student_window, window), segments=segments
            )
        else:
            teacher, student = dual_window_attention(q, k, v, self.window, student_window, segments=segments)
        return self.merge(teacher), self.merge(student)

    def merge(self, heads: Tensor) -> Tensor:
        """The output projection of heads [B, H, T, head_dim]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2).contiguous())

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: LayerState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated q, keys and values behind those of the state, and the keys' segments (None: all rows are one)."""
        layout = context.layout
        q, k = apply_rotary_pos_emb(q, k, context.cos, context.sin)
        held = 0
        if state is not None:
            k, v, held = self._behind(k, v, layout, state)
        name = f"segments {held}"
        if name not in context.shared:
            context.shared[name] = layout.segments(held)
        return q, k, v, context.shared[name]

    def _behind(self, k: Tensor, v: Tensor, layout: Layout, state: LayerState) -> tuple[Tensor, Tensor, int]:
        """Put keys and values behind those of the state, and keep what the window still reaches."""
        new = k.shape[2]
        k, v = state.behind("keys", k, dim=2), state.behind("values", v, dim=2)
        many = k.shape[2] if self.window is None else self.window - 1
        state.set(
            keys=layout.keep_last(k.transpose(1, 2), many).transpose(1, 2),
            values=layout.keep_last(v.transpose(1, 2), many).transpose(1, 2),
        )
        return k, v, k.shape[2] - new
