"""A document read into fast weights, and asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem import Model, ask, stream
from ttmem.errors import DocumentError, MemoryMismatchError, ModelError
from ttmem.fast_weights import Reader, Reading, TTCDForCausalLM, reading
from ttmem.generation import QUESTION_FORMAT

QUESTIONS = ["Who keeps the store?", "When?", "What may nobody carry below deck in winter?"]


@pytest.fixture(scope="module")
def reader(make_fast: Any, tokenizer: Any) -> Reader:
    network = make_fast(vocab_size=300, dtype=torch.float32, max_position_embeddings=2048, eos_token_id=257)
    return Reader(network, tokenizer, name="tiny ttcd")


def by_the_whole_text(reader: Reader, text: str, question: str, many: int) -> str:
    """Greedy, running document, question and answer again for each token."""
    ids = reader.encode(text) + reader.encode(QUESTION_FORMAT.format(question=question))
    begin = len(ids)
    for _ in range(many):
        with torch.no_grad():
            ids.append(int(reader.network(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return reader.decode(ids[begin:]).strip().partition("\n")[0].strip()


def test_answers_are_those_of_the_whole_text(
    reader: Reader, document_text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reading, "PIECE", 37)
    read = reader.read(document_text, "ferry.txt")
    expected = [by_the_whole_text(reader, document_text, question, 8) for question in QUESTIONS]
    assert len(set(expected)) > 1
    assert ask(reader, read, QUESTIONS, max_new_tokens=8) == expected
    assert ask(reader, read, QUESTIONS[0], max_new_tokens=8) == expected[:1]  # asking changes nothing
    assert "".join(stream(reader, read, QUESTIONS[1], max_new_tokens=8)).strip() == expected[1]
    read.save(tmp_path / "ferry.state")
    loaded = Reading.load(tmp_path / "ferry.state")
    assert ask(reader, loaded, QUESTIONS, max_new_tokens=8) == expected
    assert loaded.info.document["name"] == "ferry.txt"
    assert loaded.info.model["name"] == "tiny ttcd"


def test_it_belongs_to_its_reader(reader: Reader, make_fast: Any, make_tokenizer: Any, model: Model) -> None:
    read = reader.read("A short text.")
    other: TTCDForCausalLM = make_fast(vocab_size=300, dtype=torch.float32, seed=3)
    with pytest.raises(MemoryMismatchError, match="tiny ttcd"):
        ask(Reader(other, reader.tokenizer), read, "Who?")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["a new one"])
    with pytest.raises(MemoryMismatchError, match="another tokenizer"):
        ask(Reader(reader.network, tokenizer), read, "Who?")
    with pytest.raises(MemoryMismatchError):
        ask(model, read, "Who?")


def test_what_cannot_be_read(reader: Reader, make_network: Any, tokenizer: Any) -> None:
    with pytest.raises(DocumentError, match="empty"):
        reader.read("  \n")
    with pytest.raises(DocumentError, match="reaches 2,048 positions"):
        reader.read("x y " * 2000)
    with pytest.raises(ModelError, match="has no fast weights"):
        Reader(make_network("llama"), tokenizer)
