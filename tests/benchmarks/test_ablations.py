"""Every preset can be ablated: the settings of all tables and figures are valid, and those of the tables differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ttmem.compaction.settings import PRESETS, preset_settings


@pytest.mark.parametrize("preset", PRESETS)
def test_every_variant_of_every_preset_is_a_setting(preset: str) -> None:
    from ablations import difference, variants

    base = replace(preset_settings(preset), choose_split=False)
    groups = variants(base)
    assert sum(name.startswith("table") for name in groups) == 4
    assert sum(name.startswith("figure") for name in groups) == 3
    first = groups["table 2: stage 1"]["no stage 1"]
    assert first.fit_updates == 0
    assert not first.closed_form
    assert not first.mass_start
    for label, settings in groups["table 1: initialisation"].items():
        assert (difference(base, settings) == "default") == label.startswith("25 %")
