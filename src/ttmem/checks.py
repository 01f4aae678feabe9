"""Whether a setting that comes from outside, from JSON or a command line, is a number. True and False are none."""

from __future__ import annotations

from typing import TypeGuard


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """A whole number from `least` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whole or not, NaN and infinity among them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
