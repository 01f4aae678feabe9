"""Learning-rate schedules by name: a factor between 0 and 1 for the part of a run that is done."""

from __future__ import annotations

import math
from collections.abc import Callable

from ttmem.errors import BudgetError

STABLE = 0.4
"""The part of a run, warmup included, after which "wsd" begins to fall."""

SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": lambda done, stable: 1.0,
    "linear": lambda done, stable: 1.0 - done,
    "cosine": lambda done, stable: 0.5 * (1.0 + math.cos(math.pi * done)),
    "wsd": lambda done, stable: min(1.0, (1.0 - done) / (1.0 - stable)),
}


def learning_rate_factor(
    name: str, done: float, step: int, warmup: int, floor: float = 0.0, stable: float = STABLE
) -> float:
    """The factor at `step` (from 0) of a run of which the part `done` in [0, 1] is over.

    It rises for `warmup` steps, and falls to `floor` rather than to 0. "wsd" is warmup, stable, decay: the full rate
    until the part `stable` of the run is over, then a straight line.

    Raises BudgetError for an unknown name.
    """
    if name not in SCHEDULES:
        raise BudgetError(f"the schedule {name!r} is not one of {', '.join(SCHEDULES)}")
    factor = SCHEDULES[name](min(max(done, 0.0), 1.0), stable)
    return (floor + (1.0 - floor) * factor) * min(1.0, (step + 1) / max(1, warmup))
