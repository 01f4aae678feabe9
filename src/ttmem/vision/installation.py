"""`install`: other mergers in a vision-language model, and one merge size everywhere that it is read.

transformers reads the merge size in five places: the vision config (positions in the language model, position
embeddings of patches), the vision model's own attributes (rotary positions, how many tokens an image has), the mergers,
and the image and the video processor (the order of patches, how many placeholders a prompt gets). Where they differ and
a grid divides by both, patches are grouped wrongly without any error. So all are set at once, and `check` refuses the
rest.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ttmem.errors import VisionError
from ttmem.vision.grids import MergeGrids
from ttmem.vision.mergers import GroupMerger
from ttmem.vision.settings import BLOCK, MergerSettings, require_settings, settings_of

PROCESSORS = ("image_processor", "video_processor")


@dataclass
class Installation:
    """Mergers in place. Keeps what they replaced, for `uninstall`."""

    model: nn.Module
    settings: MergerSettings
    parameters: int
    """Of the new mergers together."""
    final: bool = False
    """True where the model came with these mergers: its checkpoint has none of its own to go back to."""
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)
    _hooks: list[Any] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        m = self.settings.merge_size
        count = len(_visual(self.model).deepstack_merger_list)
        return (
            f"{self.settings.kind} mergers of {m} x {m} patches, one main and {count} deepstack, with "
            f"{self.parameters:,} new, untrained parameters"
        )

    def uninstall(self) -> None:
        """Put back everything as it was: mergers, merge sizes, config and processor, and no hooks.

        The old mergers were out of the model meanwhile; they get its device, dtype and mode of now. Raises VisionError
        for a model that was loaded with these mergers, and leaves it as it is.
        """
        if self.final:
            raise VisionError(
                f"this model was loaded from a checkpoint with mergers of ttmem, so that its {self.settings.kind} "
                "mergers have replaced none to go back to. Keep them, load a checkpoint with the model's own mergers, "
                "or load this one with new mergers: ttmem.vision.load(path, settings, reinitialise=True)."
            )
        if self._undo:
            self.put_back()
            _follow(_visual(self.model))

    def put_back(self) -> None:
        """What `uninstall` does, whatever state the old mergers are in: for who replaces them at once."""
        for hook in self._hooks:
            hook.remove()
        for owner, name, value in reversed(self._undo):
            if value is None and name == BLOCK:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._undo, self._hooks = [], []

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name, None)))
        setattr(owner, name, value)


def install(model: nn.Module, settings: MergerSettings, processor: Any = None, *, seed: int = 0) -> Installation:
    """Replace the main merger and all deepstack mergers of a Qwen3-VL, and set the merge size everywhere.

    model: a Qwen3-VL of transformers. processor: its processor, or its image or video processor alone; its merge size
    is set as well. Without one, `check` yours before you use it. seed: of the new weights.

    The new mergers are untrained, also where a checkpoint's weights would fit. What they replaced is kept in the
    installation until that is dropped. A model saved with `save_pretrained` comes back with `ttmem.vision.load`.

    Raises VisionError for a model without such mergers, one that has mergers installed, settings that are none, and a
    processor that does not fit its patches.
    """
    visual = _visual(model)
    require_settings(settings)
    if getattr(visual.config, BLOCK, None) is not None:
        raise VisionError(
            "this model has mergers of ttmem. Call uninstall() of their installation first, or load the model with "
            "other settings: ttmem.vision.load(path, settings, reinitialise=True)."
        )
    parts = list(_processors(processor))
    _check_patch_size(visual, parts)
    grids = MergeGrids(settings.merge_size, settings.kernel_size)
    configs = {id(config): config for config in _configs(model)}.values()
    merger, *deepstack = (part.train(visual.training) for part in _build(visual, settings, grids, seed))
    installation = Installation(model, settings, sum(p.numel() for m in (merger, *deepstack) for p in m.parameters()))
    installation._set(visual, "merger", merger)
    installation._set(visual, "deepstack_merger_list", nn.ModuleList(deepstack))
    installation._set(visual, "spatial_merge_size", settings.merge_size)
    installation._set(visual, "spatial_merge_unit", settings.group)
    for config in configs:
        installation._set(config, "spatial_merge_size", settings.merge_size)
        installation._set(config, BLOCK, settings.block())
    for _, part in parts:
        installation._set(part, "merge_size", settings.merge_size)
    installation._hooks = grids.attach(visual)
    check(model, processor)
    return installation


def check(model: nn.Module, processor: Any = None) -> int:
    """The merge size that model and processor agree on. Raises VisionError where they do not."""
    visual = _visual(model)
    parts = list(_processors(processor))
    _check_patch_size(visual, parts)
    sizes = {"the vision model": visual.spatial_merge_size}
    sizes |= {f"config {i}": config.spatial_merge_size for i, config in enumerate(_configs(model), 1)}
    sizes |= {f"the {name}": part.merge_size for name, part in parts}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise VisionError(
            f"model and processor disagree about the merge size ({found}). Patches would be grouped wrongly, without "
            "an error where a grid divides by both. Hand the processor to ttmem.vision.install, or load the one that "
            "was saved with this model."
        )
    settings_of(visual.config)
    return visual.spatial_merge_size


def _build(visual: Any, settings: MergerSettings, grids: MergeGrids, seed: int) -> list[nn.Module]:
    """The main merger and the deepstack ones, where the vision model is, in its dtype."""
    config, weight = visual.config, visual.patch_embed.proj.weight
    places = range(1 + len(visual.deepstack_merger_list))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if settings.kind == "mlp":
            resized = copy.copy(config)
            resized.spatial_merge_size = settings.merge_size
            mergers = [type(visual.merger)(config=resized, use_postshuffle_norm=place > 0) for place in places]
        else:
            mergers = [GroupMerger(settings, config.hidden_size, config.out_hidden_size, grids) for _ in places]
    return [merger.to(weight.device, weight.dtype) for merger in mergers]


def _follow(visual: Any) -> None:
    """Mergers that come back to a vision model, to where it was moved and what it was cast to."""
    weight = visual.patch_embed.proj.weight
    for part in (visual.merger, visual.deepstack_merger_list):
        part.to(weight.device, weight.dtype).train(visual.training)


def _visual(model: Any) -> Any:
    """The vision model. Raises VisionError for a model that has none with patch mergers."""
    visual = getattr(getattr(model, "model", model), "visual", None)
    wanted = ("merger", "deepstack_merger_list", "spatial_merge_size", "spatial_merge_unit", "patch_embed", "config")
    missing = [name for name in wanted if not hasattr(visual, name)]
    if missing:
        raise VisionError(
            f"{type(model).__name__} is no Qwen3-VL: its part model.visual has no {', '.join(missing)}. Mergers can be "
            "installed in Qwen3VLForConditionalGeneration and models built like it."
        )
    return visual


def _configs(model: Any) -> list[Any]:
    """Every vision config that the model and its parts hold; usually one object."""
    owners = [model, getattr(model, "model", None)]
    configs = [getattr(getattr(owner, "config", None), "vision_config", None) for owner in owners]
    return [config for config in (*configs, _visual(model).config) if config is not None]


def _processors(processor: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a processor that have a merge size. Raises VisionError for something that has none."""
    if processor is None:
        return
    found = [(name, getattr(processor, name, None)) for name in PROCESSORS]
    found.append(("processor", processor))
    parts = [(name, part) for name, part in found if hasattr(part, "merge_size")]
    if not parts:
        raise VisionError(f"{type(processor).__name__} has no merge size; hand in the model's processor.")
    yield from parts


def _check_patch_size(visual: Any, parts: list[tuple[str, Any]]) -> None:
    for name, part in parts:
        for size in ("patch_size", "temporal_patch_size"):
            found, wanted = getattr(part, size, None), getattr(visual.config, size)
            if found != wanted:
                raise VisionError(
                    f"the {name} has {'no ' + size if found is None else f'{size} {found}'}, the model {wanted}: this "
                    "is another model's processor. Hand in the one of this model."
                )
