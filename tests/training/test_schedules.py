"""Schedules by name."""

from __future__ import annotations

import pytest

from ttmem.errors import BudgetError
from ttmem.training.schedules import SCHEDULES, learning_rate_factor


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", (1.0, 1.0, 1.0, 1.0)),
        ("linear", (1.0, 0.75, 0.5, 0.0)),
        ("cosine", (1.0, 0.853553, 0.5, 0.0)),
        ("wsd", (1.0, 1.0, 0.833333, 0.0)),
    ],
)
def test_factors(name: str, factors: tuple[float, ...]) -> None:
    found = [learning_rate_factor(name, done, step=100, warmup=10) for done in (0.0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx(factors, abs=1e-6)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_warmup_rises_to_the_schedule_and_the_end_is_not_passed(name: str) -> None:
    assert learning_rate_factor(name, 0.0, step=0, warmup=4) == pytest.approx(0.25)
    assert learning_rate_factor(name, 0.0, step=3, warmup=4) == 1.0
    assert learning_rate_factor(name, 0.0, step=0, warmup=0) == 1.0
    assert learning_rate_factor(name, 7.0, step=9, warmup=0) == pytest.approx(SCHEDULES[name](1.0, 0.4))


def test_unknown_schedule() -> None:
    with pytest.raises(BudgetError, match="'step' is not one of"):
        learning_rate_factor("step", 0.0, 0, 0)


def test_a_floor_is_where_it_ends() -> None:
    assert learning_rate_factor("cosine", 1.0, 100, 0, floor=0.1) == pytest.approx(0.1)
    assert learning_rate_factor("cosine", 0.5, 50, 0, floor=0.1) == pytest.approx(0.55)
    assert learning_rate_factor("constant", 0.5, 50, 0, floor=0.1) == 1.0
    assert learning_rate_factor("wsd", 0.2, 0, 4, floor=0.5) == 0.25


def test_warmup_stable_decay() -> None:
    """The whole of it: up over the warmup, level, and down a straight line from where `stable` says."""
    steps, warmup = 100, 10
    factors = [learning_rate_factor("wsd", step / steps, step, warmup, stable=0.8) for step in range(steps)]
    assert factors[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert set(factors[warmup:81]) == {1.0}
    assert factors[80:] == pytest.approx([1.0 - step / 20 for step in range(20)])
