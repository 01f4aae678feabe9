"""The training script, at toy size: from scratch and from a base, stopped and resumed, and without training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ttmem.errors import ResumeError, TaskError
from ttmem.fast_weights import install, load_reader
from ttmem.models.loading import load_network

TOY = [
    "hidden_size=16", "intermediate_size=24", "num_hidden_layers=2", "num_attention_heads=2", "num_key_value_heads=2",
    "head_dim=8", "vocab_size=60", "windows=8",
]  # fmt: skip
FAST = ["teacher_window=8", "student_window=4", "chunk_size=4", "fast_layers=[0]"]
WRONG = [["--batch", 0], ["--length", 0], ["--micro", 0], ["--seed", -1], ["--set", "projection=no"]]
QUICK = ["--length", 24, "--batch", 2, "--steps", 3, "--warmup", 1, "--checkpoint-every", 1]


def call(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
    module.main()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(1, 60, 400).astype(np.uint16))
    return path


def same(one: Path, other: Path) -> None:
    pairs = [AutoModelForCausalLM.from_pretrained(folder).named_parameters() for folder in (one, other)]
    for (name, mine), (_, theirs) in zip(*pairs, strict=True):
        assert torch.equal(mine, theirs), name


def test_it_trains_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: Path, capsys: Any) -> None:
    import train_fast_weights as script
    import training_run

    options = ["--tokens", tokens, *QUICK, "--set", *TOY, *FAST]
    call(script, monkeypatch, *options, "--out", tmp_path / "whole", "--metrics", tmp_path / "metrics.jsonl")
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert (loaded.config.rule, loaded.config.fast_layers, loaded.config.chunk_size) == ("ttcd", [0], 4)
    save = training_run.save_state

    def save_and_stop(state: Any, *rest: Any) -> None:
        save(state, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "save_state", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            call(script, patch, *options, "--out", tmp_path / "again")
    np.save(tokens, np.load(tokens)[::-1])
    with pytest.raises(ResumeError, match="tokens"):
        call(script, monkeypatch, *options, "--out", tmp_path / "again", "--resume")
    np.save(tokens, np.load(tokens)[::-1])
    call(script, monkeypatch, *options, "--out", tmp_path / "again", "--resume")
    same(tmp_path / "whole", tmp_path / "again")


@pytest.mark.parametrize("system", ["in_place", "lact", "deltanet", "gated_deltanet", "window", "full"])
def test_every_baseline_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: Path, system: str, capsys: Any
) -> None:
    import train_fast_weights as script

    own = FAST if system == "in_place" else ["lact_heads=2", "windows=null"] if system == "full" else ["lact_heads=2"]
    options = ["--tokens", tokens, "--out", tmp_path / "lm", *QUICK, "--steps", 1, "--set", *TOY, *own]
    call(script, monkeypatch, "--system", system, *options)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config
    assert config.rule == ("window" if system == "full" else system)
    assert config.windows == (None if system == "full" else 8)


def test_from_a_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: Path, make_network: Any, make_tokenizer: Any, capsys: Any
) -> None:
    import train_fast_weights as script

    make_network("llama").save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    options = ["--recipe", "cpu-continual", "--base", tmp_path / "base", "--tokens", tokens, *QUICK]
    sizes = ["student_window=4", "chunk_size=4", "fast_layers=[1]"]
    call(script, monkeypatch, *options, "--out", tmp_path / "ttcd", "--separator", 7, "--set", *sizes)
    call(script, monkeypatch, *options, "--out", tmp_path / "yarn", "--system", "full", "--yarn", 8)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ttcd").config.fast_layers == [1]
    reader = load_reader(tmp_path / "ttcd", dtype="float32", device="cpu")  # as `ttmem read` does
    assert reader.read("A short text.").info.document["tokens"] > 0
    assert load_network(tmp_path / "yarn")[1].get_vocab() == make_tokenizer().get_vocab()
    stretched = AutoModelForCausalLM.from_pretrained(tmp_path / "yarn").config
    assert (stretched.model_type, stretched.rope_parameters["rope_type"]) == ("llama", "yarn")
    for wrong in (
        ["--recipe", "cpu", "--base", tmp_path / "base"],
        [*options, "--system", "full", "--separator", 7, "--out", tmp_path / "x"],
        ["--recipe", "cpu"],
        *([*options, "--out", tmp_path / "x", *wrong] for wrong in WRONG),
    ):
        with pytest.raises(SystemExit):
            call(script, monkeypatch, *wrong)


def test_texts_become_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_network: Any, make_tokenizer: Any, capsys: Any
) -> None:
    """Of a model's tokenizer, also where only a model with fast weights has it; and the bytes that a recipe takes."""
    import tokenize_text
    import train_fast_weights as script

    text, out = tmp_path / "a.txt", tmp_path / "a.npy"
    text.write_text("a ferry, every morning. " * 20)
    install(make_network("llama"), student_window=4, chunk_size=4).save_pretrained(tmp_path / "fast")
    make_tokenizer().save_pretrained(tmp_path / "fast")
    call(tokenize_text, monkeypatch, text, "--out", out, "--model", tmp_path / "fast")
    said = json.loads(capsys.readouterr().out)
    assert np.load(out)[-1] == said["separator"] == make_tokenizer().eos_token_id
    sizes = [pair for pair in [*TOY, *FAST] if not pair.startswith("vocab")]
    options = ["--recipe", "cpu", "--tokens", out, "--out", tmp_path / "lm", *QUICK, "--steps", 1, "--set", *sizes]
    with pytest.raises(TaskError, match=r"tokenize_text\.py --bytes"):
        call(script, monkeypatch, *options)
    call(tokenize_text, monkeypatch, text, "--out", out, "--bytes")
    assert json.loads(capsys.readouterr().out) == {"tokens": 480, "separator": 0, "vocabulary": 256}
    assert np.load(out).tobytes() == text.read_bytes()
    call(script, monkeypatch, *options)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "lm").config.vocab_size == 256


def test_a_dry_run_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import train_fast_weights as script

    call(script, monkeypatch, "--recipe", "cpu-continual", "--dry-run", "--system", "full")
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 134_515_008
    assert plan["tokens"] == 60 * 2048
    assert plan["forward_flops_per_token"] > 2 * plan["parameters"]
    assert plan["state_bytes_bf16"] == 30 * 2 * 3 * 64 * 2048 * 2
    call(script, monkeypatch, "--recipe", "cpu", "--dry-run", "--steps", 10)
    assert json.loads(capsys.readouterr().out)["tokens"] == 10 * 4 * 1024
