"""Published datasets from where the user keeps them: JSON files, saved `datasets` folders, or a hub."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from ttmem.errors import TaskError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SAVED_DATASET = ("dataset_dict.json", "dataset_info.json", "state.json")
DATASETS_INSTALL = "pip install datasets"

Record = dict[str, Any]


def read_records(
    data: str | PathLike[str] | None, files: Sequence[str], hub: tuple[str, str], fields: Sequence[str], task: str
) -> list[Record]:
    """The records of one dataset, each with all of `fields`.

    data: a JSON or JSONL file; a folder with one of `files` (tried in this order) or made by `datasets`'
    `save_to_disk`; or a hub id, of which configuration and split are `hub`.
    Raises TaskError when there is no data, when it cannot be read, or when a record lacks a field.
    """
    if data is None:
        raise TaskError(f"{task} needs its data: give a folder with {files[0]}, a file, or a hub id")
    path = Path(data)
    if path.is_file():
        records, source = read_json_records(path), str(path)
    elif path.is_dir():
        records, source = _read_folder(path, files, hub, task)
    elif HUB_ID.fullmatch(str(data)) and path.suffix not in (".json", ".jsonl"):
        records, source = _load_from_hub(str(data), hub), f"{data} ({hub[0]}, {hub[1]})"
    else:
        raise TaskError(f"{task}: there is no file or folder {str(data)!r}")
    if not records:
        raise TaskError(f"{task}: {source} holds no examples")
    for number, record in enumerate(records, start=1):
        missing = [field for field in fields if not isinstance(record, dict) or field not in record]
        if missing:
            raise TaskError(f"{task}: {source}: example {number} lacks {missing[0]!r}: is it this dataset?")
    return records


def pick_record(records: Sequence[Record], index: int, task: str) -> Record:
    """Record `index`. Raises TaskError when there are fewer."""
    if index >= len(records):
        raise TaskError(f"{task} has {len(records):,} examples, counted from 0: there is no example {index}")
    return records[index]


def text_of(record: Record, name: str, task: str, index: int) -> str:
    """A record's field that must be text. Raises TaskError for anything else, and for lone surrogates."""
    return _checked(record[name], name, task, index)


def texts_of(record: Record, name: str, task: str, index: int) -> tuple[str, ...]:
    """A record's field that must be a list of texts."""
    found = record[name]
    if not isinstance(found, list | tuple):
        raise TaskError(f"{task}: example {index}: {name!r} must be a list of texts, not {type(found).__name__}")
    return tuple(_checked(each, name, task, index) for each in found)


def _checked(value: Any, name: str, task: str, index: int) -> str:
    if not isinstance(value, str):
        raise TaskError(f"{task}: example {index}: {name!r} must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"{task}: example {index}: {name!r} is not valid text ({error.reason})") from error
    return value


def read_json_records(path: Path) -> list[Record]:
    """A file with a JSON list, or with a JSON object on each line."""
    text = _read_text(path)
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: neither a JSON list nor a JSON object on each line: {error}") from error


def read_json(path: str | PathLike[str]) -> Any:
    """A JSON file. Raises TaskError when it is missing or not JSON."""
    try:
        return json.loads(_read_text(Path(path)))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: not a JSON file: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 (byte {error.start})") from error


def _read_folder(path: Path, files: Sequence[str], hub: tuple[str, str], task: str) -> tuple[list[Record], str]:
    for file in files:
        if (path / file).is_file():
            return read_json_records(path / file), str(path / file)
    for saved in (path / hub[0], path):
        if any((saved / name).is_file() for name in SAVED_DATASET):
            return _load_from_disk(saved, hub[1]), str(saved)
    raise TaskError(f"{task}: {path} holds none of {', '.join(files)}")


def _load_from_disk(path: Path, split: str) -> list[Record]:
    loaded = _datasets().load_from_disk(str(path))
    if isinstance(loaded, dict):
        if split not in loaded:
            raise TaskError(f"{path} has no split {split!r}, only {', '.join(loaded)}")
        loaded = loaded[split]
    return [dict(record) for record in loaded]


def _load_from_hub(name: str, hub: tuple[str, str]) -> list[Record]:
    try:
        loaded = _datasets().load_dataset(name, hub[0], split=hub[1])
    except TaskError:
        raise
    except Exception as error:  # the package raises errors of many libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TaskError(f"cannot load {hub[0]!r}, {hub[1]!r} of {name!r} from the hub: {reason}") from error
    return [dict(record) for record in loaded]


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise TaskError(f"reading this data needs the package 'datasets': {DATASETS_INSTALL}") from error
