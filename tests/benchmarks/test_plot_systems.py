"""The pictures of learned layers: what is drawn is what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_seeds_of_a_length_are_kept_together() -> None:
    import plot_systems

    runs = [
        {"system": system, "seed": seed, "accuracy": {"single": {"128": 0.5 + seed / 10, "256": 0.25}}}
        for seed in (0, 1)
        for system in ("mean", "ttr")
    ]
    lines = plot_systems.retrieval_lines({"runs": runs}, "single")
    assert list(lines) == ["mean", "ttr"]
    assert lines["ttr"] == {128: pytest.approx([50.0, 60.0]), 256: [25.0, 25.0]}


def test_every_picture_is_drawn(tmp_path: Path) -> None:
    import plot_systems

    rows = {"mean": 50.0, "by_seed": [40.0, 60.0]}
    settings = {"length": 128}
    accuracy = {kind: {"128": 0.5, "256": 0.2} for kind in ("single", "multi")}
    figures = {
        "block_sparse_retrieval": {"settings": settings, "runs": [{"system": "ttr", "seed": 0, "accuracy": accuracy}]},
        "mad": {"scores": {system: {"fuzzy": rows, "all": rows} for system in ("window", "ttcd")}},
        "fast_weights_language": {"settings": settings, "perplexity": {"ttcd": {"128": rows, "256": rows}}},
        "continual_pretraining": {"settings": settings, "perplexity": {"plain": {"512": 9.0, "1024": 8.0}}},
    }
    assert figures.keys() == plot_systems.DRAWN.keys()
    for name, draw in plot_systems.DRAWN.items():
        output = tmp_path / f"{name}.svg"
        draw(figures[name], output)
        assert output.stat().st_size > 1000
