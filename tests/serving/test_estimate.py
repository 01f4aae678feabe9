"""Progress only grows, ends below one, and a steady job's time left is right."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.serving.estimate import UNKNOWN_SHARES, Estimate
from ttmem.serving.jobs import by_stage

NAMES = [*UNKNOWN_SHARES, "stage 2: choosing", "stage 2: distillation", "writing the summary"]


@given(updates=st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 1)), max_size=40))
def test_progress_grows(updates: list[tuple[str, float]]) -> None:
    estimate, before = Estimate.of({}), 0.0
    for stage, fraction in updates:
        estimate.update(stage, fraction)
        assert before <= estimate.fraction <= 0.99
        assert estimate.stage == stage
        assert estimate.stages[stage] == fraction
        before = estimate.fraction


def test_a_steady_job() -> None:
    estimate = Estimate.of({"a": 30.0, "b": 10.0})
    assert estimate.seconds_left is None
    estimate.started = time.monotonic() - 45.0  # slower than last time: 1.5 to 1
    estimate.update("b", 0.0)
    assert estimate.fraction == pytest.approx(0.75)
    assert estimate.seconds_left == pytest.approx(15.0, abs=0.5)


def test_parts_of_a_stage_are_one() -> None:
    assert by_stage({"reading": 1.0, "stage 2: choosing": 2.0, "stage 2: distillation": 3.0}) == {
        "reading": 1.0,
        "stage 2": 5.0,
    }
