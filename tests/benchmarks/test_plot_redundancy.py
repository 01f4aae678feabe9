"""The picture of redundancy: what it measures is what the formulas say."""

from __future__ import annotations

import argparse

import pytest


def figures(noise: float) -> dict[str, list[dict[str, float]]]:
    import plot_redundancy

    arguments = argparse.Namespace(copies=[1, 4, 16], noise=[noise], blocks=8, dim=32, seed=0)
    return plot_redundancy.measure(arguments)[f"{noise:g}"]


def test_exact_copies_weigh_as_the_formulas_say() -> None:
    rows = figures(0.0)
    for point in rows["mean"]:
        assert point["distinct_to_repeated"] == pytest.approx(1 / point["copies"])
    for name, strength in (("ttr .01", 0.01), ("ttr 1", 1.0)):
        for point in rows[name]:
            k = point["copies"]
            assert point["repeated"] == pytest.approx(k / (k + strength), rel=1e-4)
            assert point["distinct"] == pytest.approx(1 / (1 + strength), rel=1e-4)


def test_near_copies_weigh_little_more() -> None:
    rows = figures(0.3)
    assert rows["mean"][-1]["distinct_to_repeated"] < 0.1
    assert rows["ttr .01"][-1]["distinct_to_repeated"] > 0.7
