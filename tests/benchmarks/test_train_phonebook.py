"""Training the phonebook model: where it starts, how its documents grow, what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem import load_model


@pytest.fixture(scope="module")
def start() -> tuple[Any, Any]:
    """(fresh network, text)"""
    from phonebook_network import build_network
    from phonebook_text import PhonebookText, build_tokenizer

    tokenizer = build_tokenizer()
    return build_network(tokenizer, seed=1), PhonebookText(tokenizer)


def test_the_first_layer_starts_out_looking_back(start: tuple[Any, Any]) -> None:
    from phonebook_network import OFFSETS

    network, text = start
    ids = torch.tensor([text.encode("The phone number of QWERTYUIOP is 0918273645.\n" * 12)])
    network.set_attn_implementation("eager")
    try:
        weights = network(ids, output_attentions=True).attentions[0][0]
    finally:
        network.set_attn_implementation("sdpa")
    for head, offset in zip(weights, OFFSETS, strict=True):
        looked = head.diagonal(-offset)[20:]
        assert looked.mean() > 0.7, offset
        assert (head.argmax(-1)[20:] == torch.arange(20, len(head)) - offset).float().mean() > 0.8


def test_logits_start_small(start: tuple[Any, Any]) -> None:
    network, text = start
    logits = network(torch.tensor([text.encode("The phone number of QWERTYUIOP is 0918273645.")])).logits
    assert 0.3 < logits.std().item() < 3.0


def test_a_step_is_the_same_whenever_it_comes(start: tuple[Any, Any]) -> None:
    from train_phonebook import PhonebookObjective

    objective = PhonebookObjective(*start, seed=3)
    first, other = objective.loss(5).item(), objective.loss(6).item()
    fresh = PhonebookObjective(*start, seed=3)
    assert fresh.loss(5).item() == first != other
    fresh.restore(json.loads(json.dumps(objective.state())))
    assert fresh.state() == objective.state()


def test_documents_grow_when_the_model_has_mastered_them(start: tuple[Any, Any]) -> None:
    from train_phonebook import FIRST_ENTRIES, LEAST_BATCHES, MOST_ENTRIES, PhonebookObjective

    objective = PhonebookObjective(*start, seed=0)
    wrong, right = torch.zeros(50, dtype=torch.bool), torch.ones(50, dtype=torch.bool)
    for _ in range(100):
        objective._grow(wrong)
    assert objective.longest == FIRST_ENTRIES
    for _ in range(80):
        objective._grow(right)
    assert objective.longest > FIRST_ENTRIES
    grown = objective.longest
    for _ in range(LEAST_BATCHES):
        objective._grow(right)
    assert objective.longest > grown
    objective._grow(torch.zeros(0, dtype=torch.bool))
    for _ in range(100 * LEAST_BATCHES):
        objective._grow(right)
    assert objective.longest == MOST_ENTRIES


@pytest.mark.parametrize("longest", [3.0, 4.0, 11.9, 12.0, 30.0, 72.0])
def test_kinds_of_batches(longest: float) -> None:
    from train_phonebook import MOST_ENTRIES, kinds

    choices = kinds(longest)
    assert sum(share for share, _ in choices) == pytest.approx(1.0)
    for _, kind in choices:
        assert sum(kind.mix.shares) == pytest.approx(1.0)
        assert 2 <= kind.least <= kind.most <= (longest if longest < MOST_ENTRIES else 2 * longest)


@pytest.mark.slow
def test_a_short_run_writes_a_model_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import common
    import train_phonebook

    out = tmp_path / "model"
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(train_phonebook, "LENGTHS", (128,))
    monkeypatch.setattr(train_phonebook, "generic_answers", lambda model, length, seed: {})
    monkeypatch.setattr(sys, "argv", ["train_phonebook.py", "--steps", "3", "--docs", "1", "--out", str(out)])
    train_phonebook.main()
    figures = json.loads((tmp_path / "results" / "phonebook_model.json").read_text())["figures"]
    assert figures["steps"] == 3
    assert figures["lookup_accuracy"].keys() == {"128"}
    model = load_model(out, dtype="float32", device="cpu")
    assert figures["parameters"] == sum(p.numel() for p in model.network.parameters())
    assert not [path for path in tmp_path.iterdir() if path.name not in ("model", "results")]

    monkeypatch.setattr(sys, "argv", ["train_phonebook.py", "--evaluate", "--docs", "1", "--out", str(out)])
    capsys.readouterr()
    train_phonebook.main()
    assert json.loads(capsys.readouterr().out)["lookup_accuracy"] == figures["lookup_accuracy"]


def test_weights_are_stored_in_fp16(start: tuple[Any, Any], tmp_path: Path) -> None:
    from train_phonebook import save_checkpoint

    network, text = start
    save_checkpoint(network, text.tokenizer, tmp_path / "model")
    model = load_model(tmp_path / "model", dtype="float32", device="cpu")
    for (name, found), (_, own) in zip(model.network.named_parameters(), network.named_parameters(), strict=True):
        assert torch.equal(found, own.half().float()), name
    assert network.dtype == torch.float32
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 2**21
