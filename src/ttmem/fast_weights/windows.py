"""Causal attention with a window, once or twice, by torch's own attention: to the bit what a pretrained model does.

Queries are the last T of the S keys. A window of w keys counts the token itself: the query at key index j sees the keys
above j - w up to j, of those of its own segment. Signatures are those of `attention/dual_window.py`, which takes no
None.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 1024
"""Queries that share a mask, so that masks are as wide as window and block, not as long as the text."""


def dual_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    teacher_window: int | None,
    student_window: int | None,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with two windows over the same q [B, H, T, d], k and v [B, H_kv, S, d]: two outputs [B, H, T, d].

    A window of None is full attention. segments, integers [B, S]: a query sees only keys with its own segment's id;
    negative ids are seen by nobody. scale: of the scores, by default d**-0.5.
    """
    teacher = window_attention(q, k, v, teacher_window, scale=scale, segments=segments)
    if student_window == teacher_window:
        return teacher, teacher
    return teacher, window_attention(q, k, v, student_window, scale=scale, segments=segments)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, *, scale: float | None = None, segments: Tensor | None = None
) -> Tensor:
    """Attention with one window; see `dual_window_attention`."""
    T, S = q.shape[2], k.shape[2]
    if window is None or window >= S:
        window = S
    if segments is None and T == S and window == S:
        return _attention(q, k, v, None, scale, is_causal=T > 1)
    if segments is None and T == 1:
        return _attention(q, k[:, :, S - window :], v[:, :, S - window :], None, scale)
    parts = []
    for a in range(0, T, BLOCK):
        b = min(a + BLOCK, T)
        low, high = max(0, S - T + a - window + 1), S - T + b
        at = torch.arange(S - T + a, high, device=q.device).unsqueeze(1)
        key = torch.arange(low, high, device=q.device)
        mask = (key <= at) & (key > at - window)
        if segments is not None:
            mask = mask & (segments[:, None, low:high] == segments[:, S - T + a : high, None])
        mask = mask[None, None] if mask.dim() == 2 else mask[:, None]
        parts.append(_attention(q[:, :, a:b], k[:, :, low:high], v[:, :, low:high], mask, scale))
    if not parts:  # no new token
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool = False
) -> Tensor:
    """torch's attention; behind a mask keys are repeated for grouped queries, since its fast kernels want them so."""
    groups = q.shape[1] // k.shape[1]
    if mask is not None and groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, is_causal=is_causal, enable_gqa=groups > 1
    )
