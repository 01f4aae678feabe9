"""`ttmem extend`: the new file, the old one, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttmem import Memory


@pytest.fixture
def more(tmp_path: Path) -> Path:
    text = "From June on, the ferry also leaves at seven. Tickets cost two coins more. "
    (tmp_path / "more.txt").write_text(3 * text)
    return tmp_path / "more.txt"


def test_a_grown_document(run: Any, memory: Path, made: Memory, more: Path, tmp_path: Path, model_folder: Path) -> None:
    before = memory.read_bytes()
    target = tmp_path / "grown.ttmem"
    outcome = run("extend", memory, more, "-o", target, "-m", model_folder, "--ratio", "8", "--dtype", "float32")
    assert outcome.code == 0
    assert "fidelity of the new part" in outcome.out
    grown = Memory.load(target)
    assert grown.document_length > made.document_length
    assert f"{made.document_length} + {grown.document_length - made.document_length} tokens" in outcome.out
    assert memory.read_bytes() == before
    assert not target.with_name("grown.ttmem.partial").exists()
    assert run("ask", target, "When does it leave?", "-m", model_folder).code == 0


def test_json_and_methods(run: Any, memory: Path, more: Path, tmp_path: Path, model_folder: Path) -> None:
    options = ["-m", model_folder, "--method", "kvzip+", "--tokens", "12", "--json"]
    outcome = run("extend", memory, more, "-o", tmp_path / "grown.ttmem", *options)
    found = json.loads(outcome.out)
    assert found["method"] == "extended"
    assert found["settings"]["parts"][1]["method"] == "kvzip+"


def test_refusals(run: Any, memory: Path, more: Path, tmp_path: Path, model_folder: Path, other_folder: Path) -> None:
    target = tmp_path / "grown.ttmem"
    assert run("extend", memory, more, "-o", target, "-m", other_folder).code == 7
    assert run("extend", memory, more, "-o", memory, "-m", model_folder).code == 6
    assert run("extend", memory, tmp_path / "none.txt", "-o", target, "-m", model_folder).code == 4
    assert run("extend", memory, more, "-o", target, "-m", model_folder, "--method", "summary").code == 5
    assert not target.exists()
