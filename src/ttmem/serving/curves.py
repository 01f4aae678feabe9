"""Losses of one job's training as curves of a bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field

POINTS = 80
"""Most points of a curve; where more come, those that lie closest together go."""

CURVES = 16
"""Most curves of a job; a method has one for each stage that trains."""


@dataclass
class Curve:
    """Points (update, loss) in the order of the updates. The first and the last one stay."""

    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, loss: float) -> None:
        """One more point. A stage that runs once more, or goes on from an earlier update, replaces what it repeats."""
        if self.points and step <= self.points[-1][0]:
            self.points = [point for point in self.points if point[0] < step]
        self.points.append((step, loss))
        if len(self.points) > POINTS:
            gaps = [self.points[i + 1][0] - self.points[i - 1][0] for i in range(1, POINTS)]
            del self.points[1 + gaps.index(min(gaps))]


@dataclass
class Curves:
    """Curves by the name of their stage."""

    by_stage: dict[str, Curve] = field(default_factory=dict)

    def add(self, stage: str, step: int, loss: float) -> None:
        if stage in self.by_stage or len(self.by_stage) < CURVES:
            self.by_stage.setdefault(stage, Curve()).add(step, loss)

    def body(self) -> dict[str, list[tuple[int, float]]]:
        """As JSON: a list of [update, loss] for each stage."""
        return {stage: list(curve.points) for stage, curve in self.by_stage.items()}
