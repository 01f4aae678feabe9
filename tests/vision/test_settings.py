"""Settings of mergers: their ranges, and their block in a config."""

from __future__ import annotations

import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from ttmem import VisionError
from ttmem.vision import MergerSettings
from ttmem.vision.settings import BLOCK, settings_of


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sum"},
        {"merge_size": 0},
        {"merge_size": 2.0},
        {"merge_size": True},
        {"norm": "within"},
        {"norm": ["before"]},
        {"hidden": 0},
        {"hidden": "wide"},
        {"hidden": 2.5},
        {"hidden": True},
        {"kind": None},
        {"kind": ["ttr"]},
        {"kernel_size": 2},
        {"kernel_size": -1},
        {"kernel_size": "3"},
        {"strength": "vector"},
        {"strength": None},
        {"strength": ["scalar"]},
        {"strength": True},
        {"strength": 0.0},
        {"strength": -0.1},
        {"strength": float("nan")},
        {"strength": float("inf")},
        {"strength": 1e39},
        {"floor": 0.25, "strength": 0.25},
        {"initial_strength": 0.0},
        {"initial_strength": float("nan")},
        {"initial_strength": float("inf")},
        {"initial_strength": 10**400},
        {"initial_strength": None},
        {"initial_strength": True},
        {"initial_strength": "0.1"},
        {"floor": 0.0},
        {"floor": float("nan")},
        {"floor": float("inf")},
        {"floor": None},
        {"floor": True},
        {"floor": "small"},
        {"normalize_keys": None},
        {"normalize_keys": 0},
        {"kind": "mlp", "norm": "after"},
        {"kind": "mlp", "hidden": 64},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    name = list(wrong)[-1]
    with pytest.raises(VisionError, match=f"setting {name} is"):
        MergerSettings(**wrong)
    block = {**MergerSettings().block(), **wrong}
    with pytest.raises(VisionError, match=f"setting {name} is"):  # the same from a config
        settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=2))


@pytest.mark.parametrize("strength", ["diagonal", "scalar", 0.01, 1, 3e38])
def test_the_block_is_json_and_comes_back(strength: Any) -> None:
    settings = MergerSettings("ttr", 3, norm="before", hidden=7, strength=strength, normalize_keys=False)
    block = json.loads(json.dumps(settings.block()))
    assert settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=3)) == settings
    assert settings_of(SimpleNamespace(spatial_merge_size=3)) is None


@pytest.mark.parametrize("missing", [field.name for field in fields(MergerSettings) if field.name != "merge_size"])
def test_a_block_from_before_a_setting_has_its_default(missing: str) -> None:
    block = MergerSettings("ttr-conv", 3).block()
    del block[missing]
    found = settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=3))
    assert found == MergerSettings("ttr-conv", 3)


@pytest.mark.parametrize("block", [{"kind": "ttr", "layers": 3}, "ttr", [1]])
def test_a_block_of_another_version_is_refused(block: Any) -> None:
    with pytest.raises(VisionError, match="does not understand"):
        settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=2))


def test_a_config_that_contradicts_itself_is_refused() -> None:
    block = MergerSettings("ttr", 3).block()
    with pytest.raises(VisionError, match="3 x 3 patches, but its spatial_merge_size is 2"):
        settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=2))
