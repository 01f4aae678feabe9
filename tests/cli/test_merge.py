"""`ttmem merge`: one memory of several files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ttmem import Memory


def test_two_memories_become_one(run: Any, memory: Path, made: Memory, tmp_path: Path, model_folder: Path) -> None:
    target = tmp_path / "both.ttmem"
    outcome = run("merge", memory, memory, "-o", target, "-m", model_folder)
    assert outcome.code == 0
    assert "2 documents" in outcome.out
    merged = Memory.load(target)
    assert merged.document_length == 2 * made.document_length
    heads = sum(layer.num_heads for layer in made.compacted)
    assert heads <= 2 * made.entries - merged.entries <= 2 * heads  # one sink for all; a preserver, or an anchor too
    assert merged.info.document["name"] == "ferry.txt + ferry.txt"
    assert run("ask", target, "When does the ferry leave?", "-m", model_folder).code == 0
    assert run("info", target).code == 0


def test_sinks_stay_where_they_are_wanted(
    run: Any, memory: Path, made: Memory, tmp_path: Path, model_folder: Path
) -> None:
    target = tmp_path / "both.ttmem"
    assert run("merge", memory, memory, "-o", target, "-m", model_folder, "--keep-sinks").code == 0
    assert Memory.load(target).entries == 2 * made.entries


def test_json(run: Any, memory: Path, tmp_path: Path, model_folder: Path) -> None:
    outcome = run("merge", memory, memory, "-o", tmp_path / "both.ttmem", "-m", model_folder, "--json")
    found = json.loads(outcome.out)
    assert found["method"] == "merged"
    assert len(found["document"]["parts"]) == 2


def test_refusals(run: Any, memory: Path, tmp_path: Path, model_folder: Path, other_folder: Path) -> None:
    assert run("merge", memory, "-o", tmp_path / "both.ttmem", "-m", model_folder).code == 5
    assert run("merge", memory, memory, "-o", tmp_path / "both.ttmem", "-m", other_folder).code == 7
    assert run("merge", memory, tmp_path / "none.ttmem", "-o", tmp_path / "both.ttmem").code == 6
    before = memory.read_bytes()
    assert run("merge", memory, memory, "-o", memory, "-m", model_folder).code == 6
    assert memory.read_bytes() == before
    assert not (tmp_path / "both.ttmem").exists()
