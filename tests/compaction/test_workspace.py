"""The folder of finished steps."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem import MemoryFileError, ResumeError
from ttmem.compaction.workspace import Workspace

IDENTITY = {"document": "a", "seed": 0}


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = Workspace.open(None, IDENTITY, resume=True)
    workspace.save("replay", {"a": torch.zeros(2)}, {})
    assert workspace.load("replay") is None
    workspace.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_read_as_it_was_saved(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "work", IDENTITY, resume=False)
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4, dtype=torch.uint8), "c": torch.randn(2).bfloat16()}
    data = {"update": 3, "lists": [[1], []], "x": 0.1}
    workspace.save("replay", tensors, data)
    again = Workspace.open(tmp_path / "work", IDENTITY, resume=True)
    found, kept = again.load("replay") or ({}, {})
    assert kept == data
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert again.load("another") is None


def test_starting_over_forgets_the_steps(tmp_path: Path) -> None:
    Workspace.open(tmp_path / "work", IDENTITY, resume=False).save("replay", {"a": torch.zeros(1)}, {})
    assert Workspace.open(tmp_path / "work", IDENTITY, resume=False).load("replay") is None


def test_starting_over_for_something_else_is_allowed(tmp_path: Path) -> None:
    Workspace.open(tmp_path / "work", IDENTITY, resume=False).save("replay", {"a": torch.zeros(1)}, {})
    assert Workspace.open(tmp_path / "work", {"document": "b"}, resume=False).load("replay") is None


@pytest.mark.parametrize("other", [{"document": "b", "seed": 0}, {"document": "a", "seed": 1}, {"document": "a"}])
def test_another_runs_steps_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    Workspace.open(tmp_path / "work", IDENTITY, resume=False).save("replay", {"a": torch.zeros(1)}, {})
    with pytest.raises(ResumeError, match="another document, model, budget, seed or other settings"):
        Workspace.open(tmp_path / "work", other, resume=True)
    assert Workspace.open(tmp_path / "work", IDENTITY, resume=True).load("replay") is not None


def test_the_order_of_the_identity_does_not_count(tmp_path: Path) -> None:
    Workspace.open(tmp_path / "work", {"a": 1, "b": 2}, resume=False)
    Workspace.open(tmp_path / "work", {"b": 2, "a": 1}, resume=True)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "no data", "data that is no JSON", "a flipped bit"])
def test_a_damaged_step_is_refused_with_the_remedy(tmp_path: Path, damage: str) -> None:
    workspace = Workspace.open(tmp_path / "work", IDENTITY, resume=False)
    workspace.save("replay", {"a": torch.randn(50)}, {"n": 1})
    path = tmp_path / "work" / "replay.safetensors"
    raw = path.read_bytes()
    flipped = raw[:-1] + bytes([raw[-1] ^ 1])
    wrong = {"cut": raw[:-20], "empty": b"", "garbage": b"?" * 200, "a flipped bit": flipped}
    if damage in ("no data", "data that is no JSON"):
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header["__metadata__"] = {} if damage == "no data" else {"data": "{"}
        new = json.dumps(header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])
    else:
        path.write_bytes(wrong[damage])
    with pytest.raises(ResumeError, match=r"replay\.safetensors is damaged.*start over"):
        workspace.load("replay")


def test_discarding_removes_the_folder(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "work", IDENTITY, resume=False)
    workspace.save("replay", {"a": torch.zeros(1)}, {})
    workspace.discard()
    assert not (tmp_path / "work").exists()
    workspace.discard()


def test_a_folder_with_other_files_is_never_deleted(tmp_path: Path) -> None:
    """Whoever names a folder of their own as workdir must not lose it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with suppress(ResumeError, MemoryFileError):
        Workspace.open(tmp_path / "mine", IDENTITY, resume=False)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file")
    with pytest.raises(MemoryFileError, match="cannot write"):
        Workspace.open(tmp_path / "work", IDENTITY, resume=True)
    assert (tmp_path / "work").read_text() == "a file"
