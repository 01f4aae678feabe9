"""The scripts that train and compare block-sparse models, at toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from ttmem.errors import ResumeError

TOY = ["hidden_size=16", "intermediate_size=16", "head_dim=4", "num_hidden_layers=1", "query_rank=2"]
QUICK = ["--length", "64", "--batch", "2", "--steps", "3", "--sequences", "2"]


def call(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    module.main()


def test_train_on_needles_and_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_block_sparse as script
    import training_run

    toy = ["--set", *TOY, "compressor=ttr-conv", "window=8", "--checkpoint-every", "1", *QUICK]
    call(script, monkeypatch, "--out", tmp_path / "whole", *toy)
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] == 3
    assert set(figures["accuracy"]["multi"]) == {"64", "128", "256"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert loaded.config.compressor == "ttr-conv"
    assert loaded.config.window == 8

    save = training_run.save_state

    def save_and_stop(state: Any, *rest: Any) -> None:
        save(state, *rest)
        if state.step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "save_state", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            call(script, patch, "--out", tmp_path / "again", *toy)
    call(script, monkeypatch, "--out", tmp_path / "again", *toy, "--resume")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for (name, one), other in zip(loaded.named_parameters(), again.parameters(), strict=True):
        assert one.equal(other), name


def test_train_on_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_block_sparse as script

    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 99, 300).astype(np.uint16))
    toy = ["--set", *TOY, "vocab_size=99", "num_attention_heads=2", "attention=full"]
    call(
        script, monkeypatch, "--recipe", "345m", "--out", tmp_path / "lm", "--tokens", tmp_path / "tokens.npy",
        "--micro", 2, "--length", 32, "--batch", 4, "--steps", 2, "--warmup", 1, "--gradient-checkpointing", *toy,
    )  # fmt: skip
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config.vocab_size == 99


def test_refused_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import train_block_sparse as script

    with pytest.raises(SystemExit):
        call(script, monkeypatch, "--out", tmp_path / "lm", "--set", "compresor=mean")


def test_compare_and_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import block_sparse_retrieval as script
    import common

    written: dict[str, Any] = {}
    monkeypatch.setattr(script, "record", lambda name, figures: written.update({name: figures}))
    toy: list[object] = ["--set", *TOY, "--seeds", "0", "1", "--work", tmp_path, *QUICK]
    systems = ["attention", "ttr", "sliding"]
    call(script, monkeypatch, "--systems", *systems, *toy, "--name", "toy")
    figures = written["toy"]
    assert [(run["system"], run["seed"]) for run in figures["runs"]] == [(s, n) for n in (0, 1) for s in systems]
    ttr = figures["over_seeds"]["ttr"]["single"]["128"]
    accuracies = [run["accuracy"]["single"]["128"] for run in figures["runs"] if run["system"] == "ttr"]
    assert ttr["mean"] == pytest.approx(sum(accuracies) / 2)
    assert "above_attention" in ttr
    json.dumps(figures)

    # What is done is not done again; a system more is.
    trained = []
    train = script.train
    monkeypatch.setattr(script, "train", lambda *args: trained.append(args) or train(*args))
    call(script, monkeypatch, "--systems", *systems, "mean", *toy, "--name", "more")
    assert len(trained) == 2
    assert written["more"]["over_seeds"]["ttr"] == figures["over_seeds"]["ttr"]

    # A record of what is finished, and a record taken over where the folder is lost.
    call(script, monkeypatch, "--systems", *systems, "full", *toy, "--name", "early", "--finished")
    assert written["early"]["runs"] == figures["runs"]
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    common.RESULTS.mkdir()
    (common.RESULTS / "toy.json").write_text(json.dumps({"figures": figures}))
    toy[toy.index(tmp_path)] = tmp_path / "lost"
    call(script, monkeypatch, "--systems", *systems, *toy, "--name", "toy", "--finished", "--take-over")
    assert written["toy"]["runs"] == figures["runs"]
    older = {"runs": [{key: value for key, value in run.items() if key != "kept_as"} for run in figures["runs"]]}
    (common.RESULTS / "toy.json").write_text(json.dumps({"figures": older}))
    with pytest.raises(ResumeError, match="does not say what its runs were kept as"):
        call(script, monkeypatch, "--systems", *systems, *toy, "--name", "toy", "--take-over")


def test_a_table_of_what_is_finished_compares_seeds_that_both_have() -> None:
    from block_sparse_retrieval import over_seeds

    scores = {("attention", 1): 0.6, ("ttr", 0): 0.3, ("ttr", 1): 0.8, ("mean", 0): 0.5}
    runs = [{"system": s, "seed": n, "accuracy": {"single": {"64": score}}} for (s, n), score in scores.items()]
    table = over_seeds(runs)
    assert table["ttr"]["single"]["64"]["above_attention"]["mean"] == pytest.approx(0.2)
    assert table["mean"]["single"]["64"] == {"mean": 0.5, "deviation": 0.0}


def test_differences_are_taken_seed_by_seed() -> None:
    from block_sparse_retrieval import over_seeds

    scores = {("attention", 0): 0.2, ("attention", 1): 0.6, ("ttr", 0): 0.3, ("ttr", 1): 0.8}
    runs = [{"system": s, "seed": n, "accuracy": {"single": {"64": score}}} for (s, n), score in scores.items()]
    found = over_seeds(runs)["ttr"]["single"]["64"]
    assert found["mean"] == pytest.approx(0.55)
    assert found["above_attention"]["mean"] == pytest.approx(0.15)
    assert found["above_attention"]["deviation"] == pytest.approx(0.05 * 2**0.5)
