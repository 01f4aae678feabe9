"""Fused forms of `branches.branch_attention`, used where no gradient is needed. Tests hold them equal to it.

On the CPU, torch's own flash kernel returns the log-normalizer beside the output, takes a mask and grouped heads.
Elsewhere, and for the shapes it does not take, the plain form runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttmem.attention.branches import Branch, branch_attention


def fast_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Branch:
    """`branch_attention` for [B, H*G, Q, d] queries and [B, H, n, d] keys, by the fastest form there is.

    `bias` broadcasts to [B, 1, Q, n]; `mask` is boolean and broadcasts likewise; `is_causal` needs Q == n and no mask.
    """
    wants_grad = any(t is not None and t.requires_grad for t in (query, keys, values, bias))
    flash = (
        query.device.type == "cpu"
        and keys.shape[-1] == values.shape[-1]
        and keys.dtype == query.dtype == values.dtype
        and not (torch.is_grad_enabled() and wants_grad)
    )
    if flash:
        return _flash_cpu(query, keys, values, scale, _additive(query, keys, bias, mask), is_causal)
    return plain_attention(query, keys, values, scale, bias, mask, is_causal)


def plain_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> Branch:
    """`branch_attention` with grouped heads: the reference of `fast_attention`, and its differentiable form."""
    batch, num_heads, length, dim = query.shape
    num_kv_heads = keys.shape[1]
    if is_causal:
        mask = torch.ones(length, keys.shape[-2], dtype=torch.bool, device=query.device).tril()
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, length, dim)
    if mask is not None and mask.dim() == 4:
        mask = _group(mask, num_kv_heads)
    if bias is not None and bias.dim() == 4:
        bias = _group(bias, num_kv_heads)
    output, log_z = branch_attention(grouped, keys.unsqueeze(2), values.unsqueeze(2), scale, bias, mask)
    return Branch(output.flatten(1, 2), log_z.flatten(1, 2))


def _group(mask: Tensor, num_kv_heads: int) -> Tensor:
    """[B, 1 or H*G, Q, n] -> [B, 1 or H, 1 or G, Q, n]."""
    return mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (num_kv_heads, -1))


def _additive(query: Tensor, keys: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Bias and mask as the one additive mask the flash kernel takes, expanded without a copy."""
    if bias is None and mask is None:
        return None
    if bias is None:
        assert mask is not None
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
    additive = bias if bias.dtype == query.dtype else bias.to(query.dtype)
    if mask is not None:
        additive = torch.where(mask, additive, torch.finfo(query.dtype).min)
    if additive.dim() < 4:
        additive = additive.view((1,) * (4 - additive.dim()) + additive.shape)
    return additive.expand(query.shape[0], -1, query.shape[2], keys.shape[2])


def _flash_cpu(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, additive: Tensor | None, is_causal: bool
) -> Branch:
    output, log_z = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, attn_mask=additive, scale=scale
    )
    return Branch(output.float(), log_z)
