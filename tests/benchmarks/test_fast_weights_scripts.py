"""The scripts of the fast weights, at toy size: they run to their end, go on, and say what the runs say."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttmem.errors import TaskError
from ttmem.models import loading


def call(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__ + ".py", *map(str, arguments)])
    module.main()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    import common

    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_mad_runs_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: Path) -> None:
    import mad

    from ttmem.tasks.mad import settings

    def toy(tasks: Any, every: bool) -> list[Any]:
        return [
            settings.MadSetting("recall", 16, 32, train_examples=32, test_examples=16),
            settings.MadSetting("compression", 16, 16, train_examples=32, test_examples=16),
        ]

    monkeypatch.setattr(mad, "reduced", toy)
    work = tmp_path / "work"
    options = ("--width", 16, "--epochs", 1, "--rates", 1e-3, 2e-3, "--seeds", 1, 2, "--work", work)
    call(mad, monkeypatch, "--systems", "window", "ttcd", *options)
    found = json.loads((recorded / "mad.json").read_text())["figures"]
    assert len(found["runs"]) == 2 * 2 * 2 * 2
    for system in ("window", "ttcd"):
        rows = found["scores"][system]
        assert set(rows) == {"recall", "compression", "all"}
        best = [
            max(
                100 * run["accuracy"]
                for run in found["runs"]
                if (run["system"], run["setting"]["task"], run["sweep"]["seed"]) == (system, "recall", seed)
            )
            for seed in (1, 2)
        ]
        assert rows["recall"]["by_seed"] == best
        assert rows["all"]["mean"] == pytest.approx((rows["recall"]["mean"] + rows["compression"]["mean"]) / 2)
    monkeypatch.setattr(mad, "run_setting", None)  # nothing is left to run
    call(mad, monkeypatch, "--systems", "window", "ttcd", *options)
    assert json.loads((recorded / "mad.json").read_text())["figures"]["scores"] == found["scores"]
    # what is recorded early is what is finished, and can be gone on with where the folder of runs is lost
    first = next(work.glob("ttcd-compression-*.json"))
    seed = json.loads(first.read_text())["sweep"]["seed"]
    first.unlink()
    call(mad, monkeypatch, "--systems", "window", "ttcd", *options, "--finished")
    early = json.loads((recorded / "mad.json").read_text())
    assert len(early["figures"]["runs"]) == len(found["runs"]) - 1
    assert early["command"].endswith("--seeds 1 2 --finished")
    for other in work.glob("*-compression-*.json"):
        if json.loads(other.read_text())["sweep"]["seed"] == seed and other.name.startswith("ttcd"):
            other.unlink()
    call(mad, monkeypatch, "--systems", "window", "ttcd", *options, "--finished")
    rows = json.loads((recorded / "mad.json").read_text())["figures"]["scores"]["ttcd"]
    assert rows["compression"]["seeds"] == rows["all"]["seeds"] == [3 - seed]
    assert rows["recall"] == found["scores"]["ttcd"]["recall"]
    shutil.rmtree(work)
    call(mad, monkeypatch, "--systems", "window", "ttcd", *options, "--finished", "--take-over")
    assert json.loads((recorded / "mad.json").read_text())["figures"]["scores"]["ttcd"] == rows
    with pytest.raises(TypeError):  # the missing runs are what it would run now
        call(mad, monkeypatch, "--systems", "window", "ttcd", *options)


def test_language_models_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: Path) -> None:
    import fast_weights_language as script

    text = "the quick brown fox jumps over the lazy dog. " * 200
    monkeypatch.setattr(script, "king_james", lambda: text)
    shape = {**script.SHAPE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
    windows = {"windows": 16, "teacher_window": 16, "student_window": 8, "chunk_size": 8, "fast_layers": [0]}
    monkeypatch.setattr(script, "SHAPE", {**shape, **windows})
    options = ("--steps", 2, "--length", 32, "--batch", 2, "--block", 8, "--blocks", 2, "--contexts", 16, 32)
    call(script, monkeypatch, "--systems", "window", "ttcd", *options, "--work", tmp_path / "work", "--seeds", 0)
    found = json.loads((recorded / "fast_weights_language.json").read_text())["figures"]
    assert found["settings"]["bytes"] == len(text)
    losses = {run["system"]: run["losses"] for run in found["runs"]}
    for context in ("16", "32"):
        below = np.mean(losses["window"][context]) - np.mean(losses["ttcd"][context])
        assert found["perplexity"]["ttcd"][context]["nats_below_window"] == [pytest.approx(below)]
    options = (*options, "--work", tmp_path / "work", "--seeds", 0)
    call(script, monkeypatch, "--systems", "window", "full", *options, "--yarn", 2)
    stretched = json.loads((recorded / "fast_weights_language.json").read_text())["figures"]["perplexity"]
    assert set(stretched) == {"window", "full", "full_yarn"}
    assert stretched["full"]["32"]["by_seed"] != stretched["full_yarn"]["32"]["by_seed"]
    monkeypatch.setattr(script, "train", None)
    call(script, monkeypatch, "--systems", "window", "ttcd", *options)
    assert json.loads((recorded / "fast_weights_language.json").read_text())["figures"]["runs"] == found["runs"]
    shutil.rmtree(tmp_path / "work")
    call(script, monkeypatch, "--systems", "window", "ttcd", "in_place", *options, "--finished", "--take-over")
    again = json.loads((recorded / "fast_weights_language.json").read_text())["figures"]
    assert (again["runs"], again["perplexity"]) == (found["runs"], found["perplexity"])


def test_a_model_is_trained_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recorded: Path,
    make_network: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
) -> None:
    import continual_pretraining as script

    folder = tmp_path / "model"
    make_network("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(script, "king_james", lambda: "and the evening and the morning were the first day. " * 300)
    options = (
        "--model", folder, "--steps", 2, "--length", 24, "--window", 8, "--block", 8, "--blocks", 2,
        "--contexts", 8, 16, "--work", tmp_path / "work",
    )  # fmt: skip
    call(script, monkeypatch, *options)
    monkeypatch.setattr(loading, "_cpu_is_faster_in_bf16", lambda: True)  # it trains in fp32 all the same
    assert script.build("plain", argparse.Namespace(model=folder)).dtype == torch.float32
    found = json.loads((recorded / "continual_pretraining.json").read_text())["figures"]
    assert set(found["perplexity"]) == {"before", "plain", "in_place", "ttcd"}
    assert found["perplexity"]["before"] != found["perplexity"]["plain"]
    shutil.rmtree(tmp_path / "work")
    call(script, monkeypatch, *options, "--finished", "--take-over")
    assert json.loads((recorded / "continual_pretraining.json").read_text())["figures"]["runs"] == found["runs"]
    assert found["runs"][0]["training_losses"] == []
    assert len(found["runs"][3]["training_losses"]) == 2
    # ttcd starts as the model itself, so its first loss is plain's
    assert found["runs"][3]["training_losses"][0] == found["runs"][1]["training_losses"][0]
    call(script, monkeypatch, *options, "--systems", "before", "before_yarn", "plain_yarn", "--yarn", 4)
    stretched = json.loads((recorded / "continual_pretraining.json").read_text())["figures"]
    assert stretched["perplexity"]["before"] == found["perplexity"]["before"]
    assert stretched["perplexity"]["before_yarn"] != stretched["perplexity"]["before"]
    assert len(stretched["runs"][2]["training_losses"]) == 2


@pytest.mark.parametrize("wrong", [("--contexts", 16, 100_000), ("--contexts", 0), ("--block", 0), ("--blocks", 0)])
def test_what_cannot_be_tested_is_not_trained(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_network: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    wrong: tuple[object, ...],
) -> None:
    import continual_pretraining
    import fast_weights_ablations
    import fast_weights_language

    make_network("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(fast_weights_language, "train", None)
    monkeypatch.setattr(continual_pretraining, "train", None)
    for script, own in (
        (continual_pretraining, ("--model", tmp_path / "model")), (fast_weights_language, ()),
        (fast_weights_ablations, ()),
    ):  # fmt: skip
        monkeypatch.setattr(script, "king_james", lambda: "and the evening and the morning. " * 100)
        with pytest.raises(TaskError, match=r"context|at least 1"):
            call(script, monkeypatch, *own, *wrong, "--work", tmp_path / "work")


TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4, "windows": 16,
    "teacher_window": 16, "student_window": 8, "chunk_size": 8, "fast_layers": [0],
}  # fmt: skip


def test_ablations_of_language_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: Path) -> None:
    import fast_weights_ablations as script
    import fast_weights_language as language

    monkeypatch.setattr(script, "king_james", lambda: "the quick brown fox jumps over the lazy dog. " * 200)
    monkeypatch.setattr(language, "SHAPE", {**language.SHAPE, **TINY})
    options = (
        "--steps", 2, "--length", 32, "--batch", 2, "--block", 8, "--blocks", 2, "--contexts", 32, "--seeds", 0, 1,
        "--work", tmp_path / "work", "--ablations", "no_convolutions", "chunk_double", "inclusive_scan",
    )  # fmt: skip
    call(script, monkeypatch, *options)
    found = json.loads((recorded / "fast_weights_ablations_book.json").read_text())["figures"]
    assert list(found["perplexity"]) == ["as_is", "no_convolutions", "chunk_double", "inclusive_scan"]
    losses = {(run["system"], run["seed"]): np.mean(run["losses"]["32"]) for run in found["runs"]}
    assert len(set(losses.values())) == len(losses) == 8
    below = [losses["as_is", seed] - losses["no_convolutions", seed] for seed in (0, 1)]
    assert found["perplexity"]["no_convolutions"]["32"]["nats_below_as_is"] == pytest.approx(below)
    monkeypatch.setattr(language, "train", None)
    call(script, monkeypatch, *options)
    assert json.loads((recorded / "fast_weights_ablations_book.json").read_text())["figures"]["runs"] == found["runs"]
    shutil.rmtree(tmp_path / "work")
    call(script, monkeypatch, *options, "--finished", "--take-over")
    assert json.loads((recorded / "fast_weights_ablations_book.json").read_text())["figures"]["runs"] == found["runs"]


def test_ablations_on_mad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: Path) -> None:
    import fast_weights_ablations as script

    from ttmem.tasks.mad import settings

    toy = settings.MadSetting("recall", 16, 64, train_examples=32, test_examples=16)
    monkeypatch.setattr(script, "reduced", lambda tasks: [toy])
    options = ("--on", "mad", "--width", 16, "--epochs", 1, "--seeds", 1, "--work", tmp_path / "work")
    call(script, monkeypatch, *options, "--ablations", "one_layer", "no_projection")
    found = json.loads((recorded / "fast_weights_ablations_mad.json").read_text())["figures"]
    assert [run["set"] for run in found["runs"]] == [{}, {"fast_layers": [0]}, {"projection": False}]
    scores = found["scores"]
    for name in ("one_layer", "no_projection"):
        above = scores[name]["recall"]["mean"] - scores["as_is"]["recall"]["mean"]
        assert scores[name]["recall"]["above_as_is"] == [pytest.approx(above)]


def test_every_ablation_is_a_setting() -> None:
    import fast_weights_ablations as script
    import fast_weights_language as language

    from ttmem.fast_weights.recipes import make_config

    configs = {name: make_config(language.SHAPE, "ttcd", changes) for name, changes in script.ablations(4, 64).items()}
    for config in configs.values():
        config.check()
    assert len({json.dumps(config.fast_settings(), default=str) + str(config.stop_gradient)
                for config in configs.values()}) == len(configs)  # fmt: skip


def test_costs(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    import fast_weights_cost as script

    options = ("--contexts", 64, 128, "--hidden", 16, "--layers", 2, "--heads", 2, "--window", 32, "--steps", 10,
               "--rounds", 2, "--clock", "process")  # fmt: skip
    call(script, monkeypatch, *options)
    costs = json.loads((recorded / "fast_weights_cost.json").read_text())["figures"]["costs"]
    assert set(costs) == set(script.VARIANTS)
    for name, rows in costs.items():
        for row in rows.values():
            assert row["state_bytes"] <= row["state_bytes_bound"]
            assert ("prefill_time_relative_to_window" in row) == (name != "window")
        grows = rows["128"]["state_bytes"] > rows["64"]["state_bytes"]
        assert grows == (name == "full")
    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--rounds", 1)
