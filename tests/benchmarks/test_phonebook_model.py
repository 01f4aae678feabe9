"""The committed phonebook model: it loads like any model and looks numbers up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ttmem import Model, load_model
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.generation import greedy_answers
from ttmem.tasks.phonebook import Phonebook

FOLDER = Path(__file__).parents[2] / "benchmarks" / "phonebook_model"


@pytest.fixture(scope="module")
def phonebook_model() -> Model:
    if not FOLDER.is_dir():
        pytest.skip("the phonebook model is not here")
    return load_model(FOLDER, dtype="float32", device="cpu")


def accuracy(model: Model, length: int, docs: int) -> float:
    task, scores = Phonebook(), []
    for index in range(docs):
        example = task.example(model.encode, length, index, seed=99)
        full = Prepared(model, Document.of(model, example.document)).full
        answers = greedy_answers(model, full, [model.encode(q.prompt) for q in example.questions], 16)
        scores += [task.score(model.decode(a), q) for a, q in zip(answers, example.questions, strict=True)]
    return sum(scores) / len(scores)


def test_it_is_small_and_grouped_and_reaches_far(phonebook_model: Model) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4 * 2**20
    layers = phonebook_model.layers
    assert all(layer.window is None and layer.num_heads == 2 * layer.num_kv_heads for layer in layers)
    assert phonebook_model.dtype == torch.float32
    assert (phonebook_model.max_positions or 0) >= 8192
    assert len(phonebook_model.eos_token_ids) == 1


def test_the_committed_tokenizer_is_the_scripts(phonebook_model: Model) -> None:
    from phonebook_text import build_tokenizer

    fresh = build_tokenizer()
    text = "The phone number of QWERTYUIOP is 0918273645.\n\nDescribe the <|end|> of it.\nAnswer:"
    assert fresh.get_vocab() == phonebook_model.tokenizer.get_vocab()
    ids = fresh(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert phonebook_model.encode(text) == ids
    assert phonebook_model.decode(ids) == text


def test_it_looks_up_numbers_in_a_short_book(phonebook_model: Model) -> None:
    assert accuracy(phonebook_model, 256, docs=2) >= 0.9


@pytest.mark.slow
def test_it_looks_up_numbers_in_1k_tokens(phonebook_model: Model) -> None:
    assert accuracy(phonebook_model, 1024, docs=6) >= 0.98
