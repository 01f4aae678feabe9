"""How far a compaction is, and how long it still takes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

UNKNOWN_SHARES = {
    "converting": 1.0,
    "loading the model": 3.0,
    "reading the document": 10.0,
    "teacher rollouts": 26.0,
    "reconstruction scores": 16.0,
    "passages of the document": 17.0,
    "stage 1": 15.0,
    "stage 2": 60.0,
    "fidelity on held-out prompts": 8.0,
}
"""Relative times of the stages before any job of this kind has been measured here (the demo document's, rounded)."""

ENOUGH = 0.02
"""The part of a job that must be done before a time left is told."""


@dataclass
class Estimate:
    """Progress of one job. `expected`: seconds per stage, of an earlier job of its kind or relative ones.

    A stage counts with its expected share; what is done, against the time it took, scales what is left.
    """

    expected: dict[str, float]
    started: float = field(default_factory=time.monotonic)
    stage: str = "starting"
    stage_fraction: float = 0.0
    fraction: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    """Each stage that has begun, in this order, and how far it is."""
    _done: dict[str, float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, timings: dict[str, float]) -> Estimate:
        """From the store's timings of this kind of job, else from the usual shares."""
        return cls(dict(timings or UNKNOWN_SHARES))

    def update(self, stage: str, fraction: float) -> None:
        """A stage has come this far (0 to 1)."""
        name = stage if stage in self.expected else stage.partition(":")[0]
        if name in self.expected:
            for earlier in self.expected:  # stages run in order; those that a resumed job skips are done
                if earlier == name:
                    break
                self._done[earlier] = 1.0
            self._done[name] = max(fraction, self._done.get(name, 0.0))
        self.stage, self.stage_fraction = stage, fraction
        self.stages[stage] = fraction
        total = sum(self.expected.values())
        done = sum(self.expected[name] * part for name, part in self._done.items())
        self.fraction = max(self.fraction, min(done / total, 0.99) if total else 0.0)

    @property
    def seconds_left(self) -> float | None:
        """None while too little is done to tell."""
        if self.fraction < ENOUGH:
            return None
        return (time.monotonic() - self.started) * (1 - self.fraction) / self.fraction
