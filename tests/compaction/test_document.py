"""Documents: text to tokens, and what is refused before any computing."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ttmem import DocumentError, Model
from ttmem.compaction.document import Document, read_text
from ttmem.models import ANSWER_ROOM


def test_a_document_is_its_text_and_tokens(model: Model, document_text: str) -> None:
    document = Document.of(model, document_text, "ferry.txt")
    assert document.name == "ferry.txt"
    assert document.ids.tolist() == model.encode(document_text)
    assert document.length == len(document.ids)
    assert document.sha256 == hashlib.sha256(document_text.encode()).hexdigest()


@pytest.mark.parametrize("text", ["", " ", "\n\n\t ", "\u3000"])
def test_nothing_is_refused(model: Model, text: str) -> None:
    with pytest.raises(DocumentError, match=r"empty\.txt: the document is empty"):
        Document.of(model, text, "empty.txt")


def test_text_that_looks_like_a_special_token_stays_text(any_model: Model) -> None:
    document = Document.of(any_model, "Turn one.<|im_end|>\n<|im_start|>system")
    assert not {256, 257} & set(document.ids.tolist())
    assert any_model.decode(document.ids) == "Turn one.<|im_end|>\n<|im_start|>system"


def test_a_document_as_long_as_the_model_reaches_is_taken_and_one_more_refused(
    make_network: Any, tokenizer: Any
) -> None:
    model = Model(make_network("llama", max_position_embeddings=ANSWER_ROOM + 50), tokenizer, name="short")
    assert Document.of(model, "z" * 50).length == 50
    with pytest.raises(DocumentError, match=r"has 51 tokens, and short reaches 306 positions.*to 50 tokens"):
        Document.of(model, "z" * 51)


def test_a_model_that_names_no_limit_takes_any_length(make_network: Any, tokenizer: Any) -> None:
    model = Model(make_network("llama"), tokenizer)
    vars(model.network.config)["max_position_embeddings"] = None
    assert model.max_positions is None
    assert Document.of(model, "z" * 5000).length == 5000


def test_lone_surrogates_are_refused_and_not_a_traceback(model: Model) -> None:
    """Python makes such text of undecodable bytes; no tokenizer reads it."""
    with pytest.raises(DocumentError, match="text"):
        Document.of(model, "a\ud800b")


def test_reading_removes_a_byte_order_mark_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfna\xc3\xafve\r\n\n end ")
    assert read_text(tmp_path / "a.txt") == "naïve\r\n\n end "
    (tmp_path / "b.txt").write_bytes("no mark \ufeff inside".encode())
    assert read_text(tmp_path / "b.txt") == "no mark \ufeff inside"


@pytest.mark.parametrize(("content", "position"), [(b"abc\xff", 3), ("naïve".encode("latin1"), 2), (b"\x80", 0)])
def test_other_encodings_are_refused_with_the_place_and_a_remedy(tmp_path: Path, content: bytes, position: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DocumentError, match=rf"a\.txt: not UTF-8 \(byte {position}: 0x.*iconv"):
        read_text(tmp_path / "a.txt")


def test_utf16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Hello".encode("utf-16"))
    with pytest.raises(DocumentError, match="not UTF-8"):
        read_text(tmp_path / "a.txt")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"none\.txt: No such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(DocumentError, match="directory"):
        read_text(tmp_path)
