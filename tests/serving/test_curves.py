"""Curves keep their ends and their order in a bounded number of points; the worker tells them now and then."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.serving import worker
from ttmem.serving.curves import CURVES, POINTS, Curve, Curves
from ttmem.serving.worker import PipeProgress


@given(steps=st.sets(st.integers(1, 10_000), min_size=1, max_size=400))
def test_a_curve_is_bounded_and_keeps_its_ends(steps: set[int]) -> None:
    curve, ordered = Curve(), sorted(steps)
    for step in ordered:
        curve.add(step, float(step))
    found = [step for step, _ in curve.points]
    assert found == sorted(set(found) & steps)
    assert len(found) == min(len(steps), POINTS)
    assert (found[0], found[-1]) == (ordered[0], ordered[-1])
    assert all(loss == step for step, loss in curve.points)


def test_a_long_curve_is_even() -> None:
    curve = Curve()
    for step in range(1, 2001):
        curve.add(step, 0.0)
    steps = [step for step, _ in curve.points]
    assert max(b - a for a, b in pairwise(steps)) <= 4 * 2000 / POINTS


def test_what_is_repeated_is_replaced() -> None:
    curve = Curve()
    for step in (1, 2, 3, 4, 3, 4):
        curve.add(step, 10.0 * len(curve.points) + step)
    assert [step for step, _ in curve.points] == [1, 2, 3, 4]
    curve.add(1, 0.5)  # the stage has begun anew
    assert curve.points == [(1, 0.5)]


def test_curves_are_bounded_too() -> None:
    curves = Curves()
    for index in range(CURVES + 5):
        curves.add(f"stage {index}", 1, 0.0)
    curves.add("stage 0", 2, 0.25)
    assert len(curves.body()) == CURVES
    assert curves.body()["stage 0"] == [(1, 0.0), (2, 0.25)]


@dataclass
class Scalar:
    """A number that counts how often it is read, as a GPU would have to be waited for."""

    value: float
    reads: list[float]

    def __float__(self) -> float:
        self.reads.append(self.value)
        return self.value


def told(pipe: io.StringIO) -> list[tuple[int, float]]:
    reports = [json.loads(line) for line in pipe.getvalue().splitlines()]
    return [(report["step"], report["loss"]) for report in reports if report.get("curve") == "stage 1"]


def test_losses_are_read_now_and_then_and_the_last_one_always(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, reads = io.StringIO(), list[float]()
    now = 0.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    progress = PipeProgress(pipe)
    with progress.stage("stage 1", 100) as advance:
        for step in range(1, 101):
            now += worker.EVERY / 10
            progress.figure("stage 1", step, Scalar(1 / step, reads))
            advance(1)
    found = told(pipe)
    assert (found[0], found[-1]) == ((1, 1.0), (100, 0.01))
    assert 9 <= len(found) <= 12
    assert len(reads) == len(found)


def test_what_is_no_number_is_not_told() -> None:
    pipe = io.StringIO()
    progress = PipeProgress(pipe)
    with progress.stage("stage 1", 2):
        progress.figure("stage 1", 1, math.nan)
        progress.figure("stage 1", 2, math.inf)
    assert told(pipe) == []
