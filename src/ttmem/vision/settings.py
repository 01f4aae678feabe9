"""What is merged how: `MergerSettings`, and their JSON block in a model's vision config."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

from ttmem.checks import is_count, is_number
from ttmem.errors import VisionError
from ttmem.regression.reference import FLOOR

Kind = Literal["mlp", "mean", "attention", "concat", "ttr", "ttr-conv"]
KINDS: tuple[Kind, ...] = ("mlp", "mean", "attention", "concat", "ttr", "ttr-conv")

LARGEST = torch.finfo(torch.float32).max
"""What a penalty can be: beyond it, weights in fp32 are infinite."""

BLOCK = "ttmem_merger"
"""Key of the block in the vision config. A checkpoint without it has its model's own mergers."""


@dataclass(frozen=True)
class MergerSettings:
    """How each group of merge_size x merge_size patches becomes one visual token.

    kind: "mlp", the model's own merger, two layers over the concatenated patches; or one vector per group by "mean",
    "attention" pooling, "concat" and projection, "ttr" (a regression, `TTRCompressor`) or "ttr-conv" (the same with a
    2D convolution over the image's grid in its targets), and two layers from that vector to the language width.
    """

    kind: Kind = "ttr-conv"
    merge_size: int = 2
    norm: Literal["before", "after"] | None = None
    """The LayerNorm's place, before or after the operator. None: after. "mlp" has its model's own, and takes None."""
    hidden: int | None = None
    """Width between the two layers. None: 4 d, whatever the merge size. "mlp" has T d, and takes None."""
    kernel_size: int = 3
    """Taps of "ttr-conv" per direction, odd."""
    strength: Literal["diagonal", "scalar"] | float = "diagonal"
    """A learned penalty per channel, one for all, or a number: a fixed one; see `TTRCompressor`."""
    initial_strength: float = 1e-2
    floor: float = FLOOR
    normalize_keys: bool = True
    """Off: the ablation, which collapses."""

    def __post_init__(self) -> None:
        """Raise VisionError for a value outside its range or of another type: what a JSON block may hold as well."""
        self._require("kind", _is_among(self.kind, KINDS), f"one of {', '.join(KINDS)}")
        for name in ("merge_size", "kernel_size"):
            self._require(name, is_count(getattr(self, name)), "a whole number of at least 1")
        self._require("kernel_size", self.kernel_size % 2 == 1, "odd")
        norm_fits = self.norm is None or _is_among(self.norm, ("before", "after"))
        self._require("norm", norm_fits, "'before', 'after' or None")
        self._require("hidden", self.hidden is None or is_count(self.hidden), "a whole number of at least 1, or None")
        self._check_penalty()
        self._require("normalize_keys", isinstance(self.normalize_keys, bool), "True or False")
        if self.kind == "mlp":
            self._require("norm", self.norm is None, "None with kind 'mlp', which is the model's own merger")
            self._require("hidden", self.hidden is None, "None with kind 'mlp', which is the model's own merger")

    def _check_penalty(self) -> None:
        floor_fits = is_number(self.floor) and FLOOR <= self.floor <= LARGEST
        self._require("floor", floor_fits, f"a number from {FLOOR} to {LARGEST:.2g}")
        start_fits = is_number(self.initial_strength) and 0 < self.initial_strength <= LARGEST
        self._require("initial_strength", start_fits, f"a number above 0, up to {LARGEST:.2g}")
        fixed = is_number(self.strength) and self.floor < self.strength <= LARGEST
        self._require(
            "strength",
            fixed or _is_among(self.strength, ("diagonal", "scalar")),
            f"'diagonal', 'scalar', or a number above the floor of {self.floor}, up to {LARGEST:.2g}",
        )

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise VisionError(f"the merger's setting {name} is {getattr(self, name)!r}; it must be {wanted}")

    @property
    def group(self) -> int:
        """T, the patches of a group."""
        return self.merge_size**2

    def block(self) -> dict[str, Any]:
        """The settings as JSON."""
        return asdict(self)


def _is_among(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in names


def require_settings(settings: Any) -> None:
    """Raise VisionError for what is no `MergerSettings`, such as the name of a kind, or a config's block."""
    if not isinstance(settings, MergerSettings):
        raise VisionError(
            f"the merger's settings are {settings!r}; they must be a MergerSettings, such as "
            "ttmem.vision.MergerSettings('ttr-conv', merge_size=3)."
        )


def settings_of(vision_config: Any) -> MergerSettings | None:
    """The settings that a vision config holds, or None for a model's own mergers.

    Raises VisionError for a block that this ttmem does not understand, or one that its config contradicts.
    """
    block = getattr(vision_config, BLOCK, None)
    if block is None:
        return None
    known = {field.name for field in fields(MergerSettings)}
    if not isinstance(block, dict) or not set(block) <= known:
        raise VisionError(
            f"the config's block {BLOCK!r} is {block!r}, which this ttmem does not understand: it knows "
            f"{', '.join(sorted(known))}. Upgrade ttmem, or mend the block."
        )
    settings = MergerSettings(**block)
    if settings.merge_size != vision_config.spatial_merge_size:
        raise VisionError(
            f"the config's mergers take groups of {settings.merge_size} x {settings.merge_size} patches, but its "
            f"spatial_merge_size is {vision_config.spatial_merge_size}. Set both to what the weights were trained with."
        )
    return settings
