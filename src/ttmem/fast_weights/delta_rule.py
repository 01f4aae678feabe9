"""The (gated) delta rule: its recurrence, and a form that computes a block of tokens at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ttmem.errors import ModelError

BLOCK = 64
FLA_INSTALL = "pip install flash-linear-attention"


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token, the reference:

        u_t = beta_t (v_t - a_t S_(t-1)' k_t)      S_t = a_t S_(t-1) + k_t u_t'      o_t = S_t' q_t      a_t = exp(g_t)

    q, k [B, H, T, K], v [B, H, T, V], beta, g [B, H, T] (g <= 0; None: no decay), state [B, H, K, V]. The outputs
    [B, H, T, V] and the last state. q is to be scaled by the caller.
    """
    S = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state
    out = []
    for t in range(k.shape[2]):
        if g is not None:
            S = S * g[:, :, t, None, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, :, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], u)
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, :, t]))
    return torch.stack(out, dim=2) if out else v[:, :, :0], S


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """The same, a block at a time, with matrix products, in fp32 at least.

    Within a block that begins with S, and with c_t the product of the decays up to t, the u of all tokens solve one
    unit lower triangular system:  u_t + sum_(s<t) beta_t (c_t / c_s) (k_t . k_s) u_s = beta_t (v_t - c_t S' k_t).
    It is solved for all blocks at once, for v and for c k; then the blocks are joined one after the other.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    B, H, T, K = k.shape
    padded = -T % block
    q, k, v = (torch.nn.functional.pad(x.to(wide), (0, 0, 0, padded)).unflatten(2, (-1, block)) for x in (q, k, v))
    beta = torch.nn.functional.pad(beta.to(wide), (0, padded)).unflatten(2, (-1, block)).unsqueeze(-1)
    logs = torch.zeros_like(beta) if g is None else torch.nn.functional.pad(g.to(wide), (0, padded)).unflatten(
        2, (-1, block)
    ).unsqueeze(-1)
    G = logs.cumsum(-2)
    causal = torch.ones(block, block, dtype=torch.bool, device=k.device).tril()
    ratio = (G - G.mT).masked_fill(~causal, -torch.inf).exp()  # c_t / c_s for s <= t
    system = (beta * (k @ k.mT) * ratio).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * G.exp() * k], dim=-1), upper=False, unitriangular=True
    )
    of_v, of_k = solved.split([v.shape[-1], K], dim=-1)
    scores = (q @ k.mT) * ratio
    S = k.new_zeros(B, H, K, v.shape[-1]) if state is None else state.to(wide)
    out = []
    for i in range(k.shape[2]):
        U = of_v[:, :, i] - of_k[:, :, i] @ S
        c, end = G[:, :, i].exp(), G[:, :, i, -1:]
        out.append((c * q[:, :, i]) @ S + scores[:, :, i] @ U)
        S = end.exp() * S + (k[:, :, i] * (end - G[:, :, i]).exp()).mT @ U
    return torch.cat(out, dim=2)[:, :, :T] if out else v.flatten(2, 3)[:, :, :0], S


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The same by flash-linear-attention's kernels, on GPUs. Raises ModelError where the package is missing."""
    try:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise ModelError(f"delta_engine='fla' needs flash-linear-attention: {FLA_INSTALL}") from error
    dtype = torch.bfloat16 if v.dtype == torch.float32 else v.dtype  # its kernels take no fp32
    q, k, v = (x.transpose(1, 2).to(dtype).contiguous() for x in (q, k, v))
    beta = beta.transpose(1, 2).to(dtype).contiguous()
    options = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    if g is None:
        out, last = chunk_delta_rule(q, k, v, beta, **options)
    else:
        out, last = chunk_gated_delta_rule(q, k, v, g.transpose(1, 2).float().contiguous(), beta, **options)
    return out.transpose(1, 2), last


ENGINES = {"plain": chunked_delta_rule, "fla": fla_delta_rule}
