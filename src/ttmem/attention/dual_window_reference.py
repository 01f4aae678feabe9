"""Attention twice on the same queries, keys and values, through two causal windows: the definition, as two passes.

The teacher sees the last w_T keys and the student the last w_S of them, the token itself included (TTCD, section 3).
With position p of a query and j of a key, age p - j, and the token's own key of age 0:

    A^r_p = softmax_j(scale * q_p . k_j) v_j   over   0 <= p - j < w_r,   r in {T, S}

The faster forms in `bands.py` and `dual_window_triton.py` must equal this.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dual_window_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    teacher_window: int,
    student_window: int,
    scale: float,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as in `dual_window.dual_window_attention`. Differentiable by autograd."""
    teacher = window_attention(q, k, v, teacher_window, scale, segments)
    student = window_attention(q, k, v, student_window, scale, segments)
    return teacher, student


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, segments: Tensor | None = None
) -> Tensor:
    """Causal attention through one window. In fp32, or double for double; a query that sees no key answers zeros."""
    heads, tokens = q.shape[1:3]
    kv_heads, keys = k.shape[1:3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    visible = visible_keys(tokens, keys, 0, window, segments, q.device)
    grouped = q.to(dtype).unflatten(1, (kv_heads, heads // kv_heads))
    scores = scale * (grouped @ k.to(dtype).unsqueeze(2).mT)
    weights = scores.masked_fill(~visible, torch.finfo(dtype).min).softmax(-1) * visible
    return (weights @ v.to(dtype).unsqueeze(2)).flatten(1, 2).to(q.dtype)


def visible_keys(
    tokens: int, keys: int, nearest: int, window: int, segments: Tensor | None, device: torch.device
) -> Tensor:
    """True where nearest <= age < window: [tokens, keys]; with segments [batch, 1, 1, tokens, keys].

    The last `tokens` keys belong to the queries. A query sees only its own segment's keys; below 0 is padding.
    """
    position = torch.arange(keys, device=device)
    age = position[keys - tokens :, None] - position
    visible = (age >= nearest) & (age < window)
    if segments is None:
        return visible
    own = segments[:, keys - tokens :, None]
    same = (own == segments[:, None, :]) & (own >= 0)
    return (visible & same)[:, None, None]
