"""Settings of mergers: their ranges, and their block in a config."""

from __future__ import annotations

import json
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
        {"hidden": 0},
        {"kernel_size": 2},
        {"kernel_size": -1},
        {"strength": "vector"},
        {"initial_strength": 0.0},
        {"initial_strength": float("nan")},
        {"floor": 0.0},
        {"kind": "mlp", "norm": "after"},
        {"kind": "mlp", "hidden": 64},
    ],
)
def test_values_out_of_range(wrong: dict[str, Any]) -> None:
    name = list(wrong)[-1]
    with pytest.raises(VisionError, match=f"setting {name} is"):
        MergerSettings(**wrong)


def test_the_block_is_json_and_comes_back() -> None:
    settings = MergerSettings("ttr", 3, norm="before", hidden=7)
    block = json.loads(json.dumps(settings.block()))
    assert settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=3)) == settings
    assert settings_of(SimpleNamespace(spatial_merge_size=3)) is None


@pytest.mark.parametrize("block", [{"kind": "ttr", "layers": 3}, "ttr", [1]])
def test_a_block_of_another_version_is_refused(block: Any) -> None:
    with pytest.raises(VisionError, match="does not understand"):
        settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=2))


def test_a_config_that_contradicts_itself_is_refused() -> None:
    block = MergerSettings("ttr", 3).block()
    with pytest.raises(VisionError, match="3 x 3 patches, but its spatial_merge_size is 2"):
        settings_of(SimpleNamespace(**{BLOCK: block}, spatial_merge_size=2))
