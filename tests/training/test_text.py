"""Texts to token files: what is read, in which order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ttmem.errors import TaskError
from ttmem.training.language import read_tokens
from ttmem.training.text import read_texts, write_bytes, write_tokens


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_files_folders_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.jsonl").write_text('{"text": "three", "n": 1}\n\n{"text": "four"}\n')
    (tmp_path / "ignored.bin").write_bytes(b"\x00\xff")
    assert list(read_texts(str(tmp_path))) == ["one", "two", "three", "four"]
    assert list(read_texts(str(tmp_path / "b.txt"))) == ["two"]


def test_token_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens.npy"
    seen: list[int] = []
    assert write_tokens(["ab", "", "c"], encode, 3, path, advance=seen.append) == 6
    assert seen == [3, 1, 2]
    tokens = read_tokens(path, 200)
    assert tokens.tolist() == [97, 98, 3, 3, 99, 3]
    assert tokens.dtype == np.uint16
    assert write_tokens(iter(["ab", "cd"]), encode, 3, path, limit=4) == 4
    assert write_tokens([chr(70_000)], encode, 3, path) == 2
    assert read_tokens(path, 80_000).tolist() == [70_000, 3]
    assert [file.name for file in path.parent.iterdir()] == ["tokens.npy"]


def test_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.npy"
    assert write_bytes(["a caf\u00e9"], path) == 7
    tokens = read_tokens(path, 256)
    assert tokens.dtype == np.uint8
    assert tokens.tobytes() == "a caf\u00e9".encode()
    assert write_bytes(["ab", "", "c"], path) == 5
    assert read_tokens(path, 256).tobytes() == b"ab\0\0c"
    assert write_bytes(iter(["ab", "cd"]), path, limit=4) == 4
    assert write_bytes(iter(["ab", "cd"]), path, limit=1) == 1
    with pytest.raises(TaskError, match="no token"):
        write_bytes([""], path)
    with pytest.raises(TaskError, match="limit of 0"):
        write_bytes(["a"], path, limit=0)


def test_only_as_much_is_read_as_is_wanted(tmp_path: Path) -> None:
    def endless() -> object:
        while True:
            yield "abc"

    assert write_tokens(endless(), encode, 3, tmp_path / "t.npy", limit=10) == 10  # type: ignore[arg-type]
    assert write_bytes(endless(), tmp_path / "t.npy", limit=10) == 10  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "{no json", "line 1: no JSON"),
        ("a.jsonl", json.dumps({"body": "x"}), "no text in a field 'text'; it has body"),
        ("a.jsonl", "[1, 2]", "no fields"),
    ],
)
def test_bad_records(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskError, match=said):
        list(read_texts(str(tmp_path / name)))


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="holds no"):
        list(read_texts(str(tmp_path)))
    with pytest.raises(TaskError, match="no file, no folder"):
        list(read_texts("nowhere at all"))
    with pytest.raises(TaskError, match="no token"):
        write_tokens([], encode, 0, tmp_path / "t.npy")
    assert not list(tmp_path.iterdir())


def test_folders_named_like_files_and_byte_order_marks(tmp_path: Path) -> None:
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "x.txt" / "a.txt").write_bytes("\ufeffone".encode())
    (tmp_path / "empty.md").mkdir()
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "two"}'.encode())
    assert list(read_texts(str(tmp_path))) == ["two", "one"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.npy").mkdir()
    for target in (tmp_path / "file" / "t.npy", tmp_path / "folder.npy"):
        with pytest.raises(TaskError, match="cannot write"):
            write_tokens(["a"], encode, 0, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npy"]
    with pytest.raises(TaskError, match="limit of 0"):
        write_tokens(["a"], encode, 0, tmp_path / "t.npy", limit=0)
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800"}')
    with pytest.raises(TaskError, match="surrogate"):
        list(read_texts(str(tmp_path / "a.jsonl")))
