"""What a client may ask of a compaction."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ttmem.compaction.settings import PRESETS, LatentSettings, preset_settings
from ttmem.errors import BudgetError

LEAST_PASSAGE = 16


def job_settings(preset: str, changes: dict[str, Any]) -> LatentSettings:
    """A preset's settings with some changed. Raises BudgetError for unknown ones, values out of range, and more work
    than the largest preset asks for."""
    settings = preset_settings(preset)
    known = asdict(settings)
    for name, value in changes.items():
        if name not in known:
            raise BudgetError(f"there is no setting {name!r}")
        if name == "merging":
            raise BudgetError("the setting merging is an ablation that breaks a memory; it cannot be served")
        kind = float if isinstance(known[name], float) else type(known[name])
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (isinstance(value, kind) or (kind is float and whole)) or (kind is int and not whole):
            raise BudgetError(f"the setting {name} must be of type {kind.__name__}")
        if isinstance(value, int | float) and not abs(value) <= most(name):
            raise BudgetError(f"the setting {name} is {value}; this server takes up to {most(name)}")
    if changes.get("passage_tokens", LEAST_PASSAGE) < LEAST_PASSAGE:
        raise BudgetError(f"the setting passage_tokens is below {LEAST_PASSAGE}, which makes too many passages")
    return replace(settings, **changes)


def most(name: str) -> float:
    """The largest value of a setting among the presets, 1 for those that are shares."""
    return max(1, *(getattr(settings, name) for settings in PRESETS.values()))
