"""`GroupMerger`: one vector per group of patches by any compressor, then two layers to the language width."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ttmem.errors import VisionError
from ttmem.regression import AttentionPooling, ConcatProjection, MeanPooling, TTRCompressor
from ttmem.vision.grids import MergeGrids
from ttmem.vision.settings import MergerSettings

EPS = 1e-6
"""Of the LayerNorm, as in Qwen3-VL."""
EXPANSION = 4
"""Width between the two layers by default, over d: what Qwen3-VL's own mergers have at 2 x 2."""


class GroupMerger(nn.Module):
    """Patches [N, d], group after group -> visual tokens [N / T, out].

    h = compress(group), one vector of width d per group of T patches; token = W_2 gelu(W_1 LayerNorm(h) + b_1) + b_2.
    With norm="before", the LayerNorm is on each patch instead. It then gives all patches nearly the same norm, which
    the regression's targets are made of; hence "after".

    The layers are named as in Qwen3-VL's own mergers. Their shapes differ, so that loading such weights into a model
    with other mergers is an error and not a silent loss. Only with groups of one patch and hidden=d are they the same.
    """

    def __init__(self, settings: MergerSettings, dim: int, out: int, grids: MergeGrids) -> None:
        super().__init__()
        self.group, self.dim = settings.group, dim
        self.norm_first = settings.norm == "before"
        self.grids = grids if settings.kind == "ttr-conv" else None
        hidden = settings.hidden or EXPANSION * dim
        self.compress: nn.Module = COMPRESSORS[settings.kind](settings, dim)
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.linear_fc1 = nn.Linear(dim, hidden)
        self.act_fn = nn.GELU()
        self.linear_fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """Raises VisionError for patches that are no whole groups, BlockError where the regression does."""
        if x.dim() != 2 or x.shape[1] != self.dim or x.shape[0] % self.group:
            raise VisionError(
                f"a merger takes patches [N, {self.dim}] in whole groups of {self.group}, not {list(x.shape)}."
            )
        if self.norm_first:
            x = self.norm(x)
        groups = x.view(-1, self.group, self.dim)
        if self.grids is None:
            h = self.compress(groups)
        else:
            h = self.compress(groups, neighbours=self.grids.neighbours(x.device))
        if not self.norm_first:
            h = self.norm(h)
        return self.linear_fc2(self.act_fn(self.linear_fc1(h)))


def _regression(settings: MergerSettings, dim: int) -> TTRCompressor:
    return TTRCompressor(
        dim,
        conv="2d" if settings.kind == "ttr-conv" else None,
        kernel_size=settings.kernel_size,
        strength=settings.strength,
        initial_strength=settings.initial_strength,
        floor=settings.floor,
        normalize_keys=settings.normalize_keys,
    )


COMPRESSORS: dict[str, Callable[[MergerSettings, int], nn.Module]] = {
    "mean": lambda settings, dim: MeanPooling(),
    "attention": lambda settings, dim: AttentionPooling(dim),
    "concat": lambda settings, dim: ConcatProjection(dim, settings.group),
    "ttr": _regression,
    "ttr-conv": _regression,
}
