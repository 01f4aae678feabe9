"""The formulas of IP-TTCD, token by token, for one document. What the fast forms are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(Z: Tensor, kernel: Tensor, C: int) -> Tensor:
    """Eq. 10: Zbar_t = sum_j kernel_j Z_(t-j), zeros before the chunk's first token. Z [T, f], kernel [taps, f]."""
    out = torch.zeros_like(Z)
    for t in range(Z.shape[0]):
        for j in range(kernel.shape[0]):
            if t % C >= j:
                out[t] += kernel[j] * Z[t - j]
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal softmax attention over the last `window` keys, the token itself among them: [H, T, d] -> [H, T, d]."""
    out = torch.zeros_like(q)
    for t in range(q.shape[1]):
        begin = 0 if window is None else max(0, t - window + 1)
        scores = torch.einsum("hd,hsd->hs", q[:, t], k[:, begin : t + 1]) * q.shape[-1] ** -0.5
        out[:, t] = torch.einsum("hs,hsd->hd", scores.softmax(-1), v[:, begin : t + 1])
    return out


def distilled_updates(
    W: Tensor, P: Tensor, Zbar_T: Tensor, Zbar_S: Tensor, beta: Tensor, eta: float, C: int, normalize: bool = True
) -> list[Tensor]:
    """Eq. 11 and 12: dW_i [d, f] of every complete chunk. W [d, f], P [d, d], Zbar [T, f], beta [T]."""
    updates = []
    for i in range(Zbar_S.shape[0] // C):
        dW = torch.zeros_like(W)
        for t in range(i * C, (i + 1) * C):
            R = P @ W @ (Zbar_T[t] - Zbar_S[t])
            K = Zbar_S[t] / Zbar_S[t].norm().clamp_min(1e-6) if normalize else Zbar_S[t]
            dW += eta * beta[t] * torch.outer(R, K)
        updates.append(dW)
    return updates


def read(W: Tensor, updates: list[Tensor], Z: Tensor, C: int) -> Tensor:
    """Eq. 13, exclusive: y_t = (W + sum_(j < i) dW_j) Z_t for t in chunk i. Z [T, f] -> [T, d]."""
    out = []
    for t in range(Z.shape[0]):
        W_i = W.clone()
        for j in range(t // C):
            W_i += updates[j]
        out.append(W_i @ Z[t])
    return torch.stack(out)
