"""From texts to a token file: documents one behind the other, a separator behind each, ids as one numpy array."""

from __future__ import annotations

import importlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from ttmem.errors import MemoryFileError, TaskError
from ttmem.memory.file import atomic_write

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?::(?P<split>[\w\[\]%:]+))?")
SUFFIXES = (".txt", ".md")
DATASETS_INSTALL = "pip install datasets"
BYTE_SEPARATOR = 0
"""A byte that no text has."""


def read_texts(source: str, field: str = "text") -> Iterator[str]:
    """Documents of a text file, a JSON Lines file, a folder of such files, or a dataset of a hub (NAME, NAME:SPLIT).

    field: of a JSON line or a dataset's row, the text. Folders are read in the order of their names, hub datasets as a
    stream, with `datasets`. Raises TaskError where there is nothing to read, or a record has no such text.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (*SUFFIXES, ".jsonl") and file.is_file())
        if not files:
            raise TaskError(f"{path} holds no {', '.join(SUFFIXES)} or .jsonl files.")
        for file in files:
            yield from read_texts(str(file), field)
    elif path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(_record(line, f"{path}, line {number}"), field, f"{path}, line {number}")
    elif path.is_file():
        yield path.read_text(encoding="utf-8-sig", errors="replace")
    elif match := HUB_ID.fullmatch(source):
        yield from _from_hub(match["name"], match["split"] or "train", field)
    else:
        raise TaskError(f"{source} is no file, no folder and no dataset's name (OWNER/NAME or OWNER/NAME:SPLIT).")


def _record(line: str, place: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{place}: no JSON ({error}).") from error
    return record if isinstance(record, dict) else {}


def _text_of(record: dict[str, object], field: str, place: str) -> str:
    text = record.get(field)
    if not isinstance(text, str):
        raise TaskError(f"{place}: no text in a field {field!r}; it has {', '.join(map(str, record)) or 'no fields'}.")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise TaskError(f"{place}: the text holds a lone surrogate, which no encoding can write.")
    return text


def _from_hub(name: str, split: str, field: str) -> Iterator[str]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise TaskError(f"{name} is no file here; to read it from the hub: {DATASETS_INSTALL}") from error
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:  # the library raises what its network and its parsers raise
        raise TaskError(f"cannot load {name}:{split} ({error})") from error
    for number, row in enumerate(rows):
        yield _text_of(row, field, f"{name}:{split}, row {number}")


def write_tokens(
    texts: Iterable[str],
    encode: Callable[[str], list[int]],
    separator: int,
    path: Path,
    limit: int | None = None,
    advance: Callable[[int], None] | None = None,
) -> int:
    """Tokenize documents into a token file, at most `limit` tokens, written atomically. Returns how many there are.

    advance: called with the number of tokens that each document added. Raises TaskError where no token comes together.
    """
    _check_limit(limit)
    ids = array("I")
    for text in texts:
        before = len(ids)
        ids.extend([*encode(text), separator])
        if advance is not None:
            advance(len(ids) - before)
        if limit is not None and len(ids) >= limit:
            break
    tokens = np.frombuffer(ids, dtype=np.uint32)[:limit]
    return _save(tokens.astype(np.uint16) if tokens.max(initial=0) < 2**16 else tokens, path)


def write_bytes(texts: Iterable[str], path: Path, limit: int | None = None) -> int:
    """The same for models of bytes: documents in UTF-8, a token a byte, a `BYTE_SEPARATOR` between two."""
    _check_limit(limit)
    found = bytearray()
    for number, text in enumerate(texts):
        found.extend(bytes([BYTE_SEPARATOR]) if number else b"")
        found.extend(text.encode())
        if limit is not None and len(found) >= limit:
            break
    return _save(np.frombuffer(bytes(found), dtype=np.uint8)[:limit], path)


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise TaskError(f"a limit of {limit} tokens leaves none; take at least 1.")


def _save(tokens: np.ndarray, path: Path) -> int:
    if not len(tokens):
        raise TaskError("the texts are empty: there is no token to write.")

    def save(fresh: Path) -> None:
        with fresh.open("wb") as file:
            np.save(file, tokens)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, save)
    except (OSError, MemoryFileError) as error:
        raise TaskError(f"cannot write {path}: {error}") from error
    return len(tokens)
