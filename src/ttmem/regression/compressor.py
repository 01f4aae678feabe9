"""`TTRCompressor`: the operator with its learned parameters, 2d of them and the convolution's taps."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ttmem.checks import is_count, is_number
from ttmem.errors import BlockError
from ttmem.regression.convolution import Neighbours, convolved_targets, grid_neighbours, line_neighbours
from ttmem.regression.operator import Engine, Form, check_choice, check_inputs, ttr_compress
from ttmem.regression.reference import EPS, FLOOR, penalty

Conv = Literal["1d", "2d"]


class TTRCompressor(nn.Module):
    """Blocks of tokens [.., T, d] -> one vector each [.., d], by a ridge regression per block (`ttr_compress`).

    dim: d. conv: context in the targets, over the tokens ("1d") or over a grid of patches ("2d"); see `forward`.
    kernel_size: taps of the convolution, per direction, odd. It starts as the identity.
    strength: "diagonal", a learned penalty per channel (the paper's best); "scalar", one learned penalty; or a number,
    a fixed penalty. initial_strength: where a learned penalty starts, above `floor`.
    floor: added to the learned penalty, to keep it away from zero.
    normalize_keys, normalize_targets, form, engine: as in `ttr_compress`.

    Parameters: a [d], rho [d] or [1], and kernel [taps, d]. rho and kernel must not decay: a decayed rho pulls the
    penalty to log 2, a decayed kernel the targets to 0. `no_weight_decay` names them.

    Raises BlockError for settings out of range.
    """

    def __init__(
        self,
        dim: int,
        conv: Conv | None = None,
        *,
        kernel_size: int = 3,
        strength: Literal["diagonal", "scalar"] | float = "diagonal",
        initial_strength: float = 1e-2,
        floor: float = FLOOR,
        normalize_keys: bool = True,
        normalize_targets: bool = False,
        form: Form = "auto",
        engine: Engine = "auto",
    ) -> None:
        super().__init__()
        if not (is_count(dim) and conv in (None, "1d", "2d") and is_count(kernel_size) and kernel_size % 2):
            raise BlockError(
                f"dim {dim!r}, conv {conv!r}, kernel_size {kernel_size!r}: dim must be a positive integer, conv None, "
                "'1d' or '2d', and kernel_size odd."
            )
        fixed = is_number(strength)
        learned = strength in ("diagonal", "scalar") and is_number(initial_strength)
        wanted = float(strength) - floor if fixed and is_number(floor) else initial_strength
        if not (is_number(floor) and FLOOR <= floor < math.inf and (fixed or learned) and 0 < wanted < math.inf):
            raise BlockError(
                f"strength {strength!r}, initial_strength {initial_strength!r}, floor {floor!r}: strength must be "
                f"'diagonal', 'scalar' or a number above the floor, initial_strength positive, floor at least {FLOOR}."
            )
        check_choice(form, engine)
        self.dim, self.conv, self.kernel_size, self.floor = dim, conv, kernel_size, floor
        self.strength: str | float = strength
        self.normalize_keys, self.normalize_targets = normalize_keys, normalize_targets
        self.form, self.engine = form, engine
        self._initial_rho = inverse_softplus(wanted)
        self.a = nn.Parameter(torch.empty(dim))
        rho = torch.full((dim if strength == "diagonal" else 1,), self._initial_rho)
        self.rho: Tensor
        if fixed:
            self.register_buffer("rho", rho)  # in state dicts: `from_pretrained` leaves others without values
        else:
            self.rho = nn.Parameter(rho)
        taps = {None: 0, "1d": kernel_size, "2d": kernel_size**2}[conv]
        self.kernel = nn.Parameter(torch.empty(taps, dim)) if conv else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a is normal with deviation 1: a token's weight in the answer is then of order 1. The convolution copies."""
        nn.init.normal_(self.a)
        with torch.no_grad():
            self.rho.fill_(self._initial_rho)
            if self.kernel is not None:
                self.kernel.zero_()
                self.kernel[self.kernel.shape[0] // 2] = 1.0

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer must not decay."""
        return {name for name, _ in self.named_parameters() if name != "a"}

    def penalty(self) -> Tensor:
        """lambda [d], or [1] where all channels share it."""
        return penalty(self.rho, self.floor)

    def forward(self, x: Tensor, mask: Tensor | None = None, neighbours: Neighbours | None = None) -> Tensor:
        """x [.., T, d], mask [.., T] (True where there is a token) -> [.., d] in the dtype of x.

        neighbours: which tokens the convolution joins, from `line_neighbours` or `grid_neighbours`, within a block
        ([taps, T]) or through all the tokens of x in their order ([taps, N]). By default within each block, as a line,
        or for "2d" as a square grid in row-major order.
        Raises what `ttr_compress` raises.
        """
        if x.dim() and x.shape[-1] != self.dim:
            raise BlockError(f"this compressor is for tokens of width {self.dim}, not for {list(x.shape)}.")
        return ttr_compress(
            x,
            self.a,
            self.rho,
            targets=self._targets(x, mask, neighbours),
            mask=mask,
            floor=self.floor,
            normalize_keys=self.normalize_keys,
            normalize_targets=self.normalize_targets,
            form=self.form,
            engine=self.engine,
        )

    def _targets(self, x: Tensor, mask: Tensor | None, neighbours: Neighbours | None) -> Tensor | None:
        if self.kernel is None:
            if neighbours is not None:
                raise BlockError("neighbours are for a compressor with conv='1d' or '2d'; this one has none.")
            return None
        check_inputs(x, self.a, self.rho, None, mask, self.floor)
        if x.numel() == 0:
            return None
        if neighbours is None:
            neighbours = self._within_block(x)
        if self.normalize_targets:
            x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
            x = nn.functional.normalize(x.double() if x.dtype == torch.float64 else x.float(), dim=-1, eps=EPS)
        return convolved_targets(x, self.a, self.kernel, neighbours, mask)

    def _within_block(self, x: Tensor) -> Neighbours:
        T = x.shape[-2]
        if self.conv == "1d":
            return line_neighbours(T, self.kernel_size, x.device)
        side = math.isqrt(T)
        if side * side != T:
            raise BlockError(
                f"{T} tokens are no square grid; hand in neighbours=grid_neighbours(height, width, kernel_size)."
            )
        return grid_neighbours(side, side, self.kernel_size, device=x.device)

    def extra_repr(self) -> str:
        conv = f", conv={self.conv!r}, kernel_size={self.kernel_size}" if self.conv else ""
        return f"{self.dim}{conv}, strength={self.strength!r}, floor={self.floor}"


def inverse_softplus(value: float) -> float:
    """rho with softplus(rho) = value."""
    return value + math.log(-math.expm1(-value))
