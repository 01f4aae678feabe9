"""What the two training stages train: the mergers alone, then the mergers and the language model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ttmem.errors import VisionError

MERGERS = ("visual.merger.", "visual.deepstack_merger_list.")
LANGUAGE = ("language_model.", "lm_head.")


@dataclass(frozen=True)
class Stage:
    """A training stage: the learning rate, and in what the names of its parameters lie."""

    name: str
    lr: float
    parts: tuple[str, ...]


STAGES = (Stage("mergers", 1e-3, MERGERS), Stage("mergers and language model", 2e-5, (*MERGERS, *LANGUAGE)))
"""The paper's, for one epoch each."""


def stage_parameters(model: nn.Module, stage: Stage) -> dict[str, nn.Parameter]:
    """The stage's parameters by name. Freezes all others, so that no gradient is computed for them."""
    chosen = {}
    for name, parameter in model.named_parameters():
        local = "." + name
        trained = any("." + part in local for part in stage.parts)
        parameter.requires_grad_(trained)
        if trained:
            chosen[name] = parameter
    if not chosen:
        raise VisionError(f"{type(model).__name__} has no parameters of the stage {stage.name!r}: it is no Qwen3-VL")
    return chosen
