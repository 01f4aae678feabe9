"""The configuration: every field is held to its type and its range, and a wrong one is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ttmem.errors import BudgetError
from ttmem.fast_weights import TTCDConfig, TTCDForCausalLM
from ttmem.fast_weights.config import CHOICES, LEAST, SWITCHES

SHAPE = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHER_TYPES = ("4", 2.5, True, [1], (1,), {})
NO_NUMBERS = ("0.1", None, True, [0.1], math.nan, math.inf, -math.inf)
WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHES, ("False", 0, 1, None)),
    **dict.fromkeys(CHOICES, ("other", None, 3, True)),
    **{name: (*OTHER_TYPES, None, least - 1) for name, least in LEAST.items()},
    "fast_layers": ("0", 0, (0,), [0, 0], [2], [-1], [0.0], [True], ["0"], []),
    "windows": ("8", 8.0, True, (8, 8), [8], [8, "8"], [8, 0], 0, -1),
    "teacher_window": ("full", 8.0, True, [8], 0, -1),
    "fast_lr": NO_NUMBERS,
    "lact_lr": (*NO_NUMBERS, 0, -1, 1e4),
    "attention_bias": (True,),
}
EVERY = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), EVERY, ids=[f"{name}={value!r}" for name, value in EVERY])
def test_what_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BudgetError, match=f"the setting {name} is .*; it must be"):
        TTCDForCausalLM(TTCDConfig(**SHAPE, **{name: value}))


def test_every_field_is_held_to_something() -> None:
    assert set(WRONG) - {"attention_bias"} == set(TTCDConfig.__annotations__)


@pytest.mark.parametrize(
    "fine",
    [
        {}, {"windows": None}, {"windows": [8, None]}, {"windows": 1}, {"teacher_window": None}, {"fast_lr": 0},
        {"fast_lr": 1}, {"lact_lr": 1}, {"lact_lr": 100}, {"conv_kernel": 0}, {"fast_layers": [1]},
        {"rule": "window", "fast_layers": []}, {"rule": "window"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_taken(fine: dict[str, Any]) -> None:
    TTCDForCausalLM(TTCDConfig(**SHAPE, **fine))
