"""Datasets from files, folders and hubs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttmem.errors import TaskError
from ttmem.tasks.local_data import read_json, read_json_records, read_records, text_of, texts_of

RECORDS = [{"a": 1}, {"a": 2}]


def read(data: Any) -> list[dict[str, Any]]:
    return read_records(data, ["x.jsonl"], ("config", "test"), ["a"], "task")


@pytest.mark.parametrize("text", ['{"a": 1}\n\n{"a": 2}\n', '[{"a": 1}, {"a": 2}]', '\ufeff [{"a": 1},\n {"a": 2}]'])
def test_json_lists_and_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text, encoding="utf-8")
    assert read(tmp_path) == read(tmp_path / "x.jsonl") == read(str(tmp_path)) == RECORDS


def test_line_separators_inside_a_text_end_no_record(tmp_path: Path) -> None:
    record = {"a": "one\u2028two\x85"}
    (tmp_path / "x.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(tmp_path) == [record]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1', "neither a JSON list"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "holds no examples"),
        (b"[1]", "example 1 lacks 'a'"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        read(tmp_path)


def test_json_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="No such file"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(TaskError, match="not a JSON file"):
        read_json(tmp_path / "x.json")


def test_a_hub_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TaskError, match="pip install datasets"):
        read("owner/name")


def test_the_hub_is_asked_for_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        asked.append((args, kwargs))
        return RECORDS

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(load_dataset=load_dataset))
    assert read("owner/name") == RECORDS
    assert asked == [(("owner/name", "config"), {"split": "test"})]


def test_a_hub_that_fails_is_quoted_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(TaskError, match=r"cannot load 'config', 'test' of 'owner/name' from the hub: no route$"):
        read("owner/name")


def test_saved_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(RECORDS)
    rows.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "split")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "configs" / "config")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "other")
    for folder in ("plain", "split", "configs"):
        assert read(tmp_path / folder) == RECORDS
    with pytest.raises(TaskError, match="no split 'test', only train"):
        read(tmp_path / "other")


@pytest.mark.parametrize("answers", [None, 3, "blue", [None], ["\ud800"]])
def test_answers_are_a_list_of_texts(answers: Any) -> None:
    with pytest.raises(TaskError, match="answers"):
        texts_of({"answers": answers}, "answers", "task", 0)
    assert texts_of({"answers": ["a"]}, "answers", "task", 0) == ("a",)
    with pytest.raises(TaskError, match="input"):
        text_of({"input": None}, "input", "task", 0)


def test_a_missing_file_is_not_a_hub_id() -> None:
    with pytest.raises(TaskError, match="no file or folder"):
        read_records(Path("data/none.jsonl"), ["a.jsonl"], ("a", "test"), ["x"], "task")


def test_a_file_that_nests_without_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    with pytest.raises(TaskError, match="JSON"):
        read_json_records(tmp_path / "a.jsonl")
