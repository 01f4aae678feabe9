"""The reading experiment: its pictures, what its runs share, and that it goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TINY = ["--steps", "3", "--batch", "4", "--digits", "2", "--held-out", "6", "--seeds", "0", "1"]


def test_glyphs_are_all_different_and_5_by_7() -> None:
    from rendered_text import _BITMAPS, CHARACTERS

    assert _BITMAPS.shape == (len(CHARACTERS), 7, 5)
    assert len({bitmap.tobytes() for bitmap in _BITMAPS}) == len(CHARACTERS) == 10


def test_lines_lie_in_the_middle_or_anywhere() -> None:
    from rendered_text import GLYPH_HEIGHT, PITCH, render

    rng = np.random.default_rng(0)
    for spread, most in ((0.0, 1), (1.0, 10_000)):
        tops, lefts = set(), set()
        for _ in range(2000):
            picture = render(rng, np.array([8, 8]), 24, 48, 0.0, spread)
            rows, columns = picture.any(1).nonzero()[0], picture.any(0).nonzero()[0]
            assert (len(rows), np.ptp(columns) + 1) == (GLYPH_HEIGHT, 2 * PITCH - 1)
            tops.add(int(rows[0]))
            lefts.add(int(columns[0]))
        assert min(most, 18) == len(tops)
        assert min(most, 37) == len(lefts)


def test_patches_are_in_the_processors_order() -> None:
    pytest.importorskip("PIL")
    from rendered_text import patchify
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = np.random.default_rng(0).integers(0, 256, (24, 48)).astype(np.uint8)
    for merge in (2, 3):
        processor = Qwen2VLImageProcessorPil(
            patch_size=4,
            temporal_patch_size=1,
            merge_size=merge,
            size={"shortest_edge": 16, "longest_edge": 10_000},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        )
        real = processor(images=[np.stack([picture] * 3, axis=-1)], return_tensors="pt")["pixel_values"]
        own = patchify(torch.from_numpy(picture / 127.5 - 1.0).float()[None], 4, merge)[0]
        torch.testing.assert_close(own, real.view(72, 3, 16)[:, 0], rtol=1e-5, atol=1e-5)


def test_kinds_share_everything_but_their_mergers() -> None:
    from vision_merging import Experiment, Run, build

    states = [
        build(Experiment(), Run(kind, merge_size, None, 3)).state_dict()
        for kind, merge_size in (("mlp", 2), ("ttr-conv", 3))
    ]
    shared = [name for name in states[0] if "merger" not in name]
    assert len(shared) > 20
    assert all(torch.equal(states[0][name], states[1][name]) for name in shared)


def test_a_perfect_reader_scores_all_and_a_blind_one_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    from vision_merging import Experiment, Run, build, pictures_of, read

    experiment, run = replace(Experiment(), held_out=300), Run("mean", 3, None, 0)
    network = build(experiment, run)
    blind = read(network, experiment, run)
    assert 0.05 < blind["digits"] < 0.15
    assert blind["strings"] == 0.0
    answers = iter(pictures_of(experiment, (0, 1), 300)[1].split(100))
    monkeypatch.setattr(
        type(network), "generate", lambda self, input_ids, **_: torch.cat([input_ids, next(answers)], dim=1)
    )
    assert read(network, experiment, run) == {"digits": 1.0, "strings": 1.0}


def test_a_short_run_is_recorded_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import common
    import vision_merging

    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")

    def run(folder: str, *more: str) -> Any:
        arguments = [*TINY, "--kinds", "mlp", "ttr-conv", "--merge-sizes", "3", "--work", str(tmp_path / folder)]
        monkeypatch.setattr(sys, "argv", ["vision_merging.py", *arguments, *more])
        vision_merging.main()
        return json.loads((tmp_path / "results" / "vision_merging.json").read_text())["figures"]

    whole = run("whole")
    assert [(r["kind"], r["seed"]) for r in whole["runs"]] == [(k, s) for s in (0, 1) for k in ("mlp", "ttr-conv")]
    rows = [(row["kind"], row["tokens"], row["seeds"]) for row in whole["summary"]]
    assert rows == [("mlp", 8, 2), ("ttr-conv", 8, 2)]
    for row in whole["summary"]:
        mine = [r["digits"] for r in whole["runs"] if r["kind"] == row["kind"]]
        assert row["digits"]["mean"] == pytest.approx(sum(mine) / 2)

    loss, calls = vision_merging.Reading.loss, []

    def stopping(objective: Any, step: int) -> torch.Tensor:
        calls.append(step)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return loss(objective, step)

    monkeypatch.setattr(vision_merging.Reading, "loss", stopping)
    monkeypatch.setattr(vision_merging, "CHECKPOINT_EVERY", 1)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    stopped = run("stopped")
    assert calls == [0, 1, 2, 0, 1, 2, 2, *[0, 1, 2] * 2]
    own = ("seconds", "processor_seconds")
    for mine, other in zip(stopped["runs"], whole["runs"], strict=True):
        assert {**mine, **dict.fromkeys(own)} == {**other, **dict.fromkeys(own)}
    assert not list((tmp_path / "stopped").glob("*.safetensors"))

    # Other settings are other runs; what is finished can be recorded without them, and taken over from the record.
    assert run("whole", "--steps", "4", "--finished")["runs"] == []
    assert run("whole", "--norms", "after", "before", "--finished")["runs"] == whole["runs"]
    assert run("lost", "--norms", "after", "before", "--finished", "--take-over")["runs"] == whole["runs"]
