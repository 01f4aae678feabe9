"""`ttmem compact`: the file it writes, what it prints, and interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem import Memory
from ttmem.compaction.workspace import Workspace


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_memory_file_beside_the_document(run: Any, document: Path, model_folder: Path) -> None:
    outcome = run("compact", document, "-m", model_folder, "--ratio", "8", "--dtype", "float32")
    assert outcome.code == 0
    assert names(document.parent) == ["ferry.ttmem", "ferry.txt"]
    memory = Memory.load(document.with_suffix(".ttmem"))
    n = memory.document_length
    assert memory.entries == 3 * 2 * (n // 8)
    assert memory.info.document["name"] == "ferry.txt"
    assert memory.info.model["name"] == str(model_folder)
    assert memory.tokens is not None
    assert f"{n} tokens -> {n // 8} per layer and head" in outcome.out
    assert "same next token" in outcome.out
    assert "stage 2" in outcome.err
    assert "stage 2" not in outcome.out


def test_options_reach_the_memory(run: Any, document: Path, model_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.ttmem"
    options = ["--tokens", "20", "--seed", "7", "--preset", "quick", "-o", target, "--no-keep-document"]
    assert run("compact", document, "-m", model_folder, *options, "--dtype", "bfloat16").code == 0
    memory = Memory.load(target)
    assert memory.info.budget["tokens"] == 20
    assert memory.info.seed == 7
    assert memory.tokens is None
    assert memory.dtype == torch.bfloat16


@pytest.mark.parametrize("method", ["kvzip+", "full", "latent"])
def test_methods(run: Any, document: Path, model_folder: Path, method: str) -> None:
    assert run("compact", document, "-m", model_folder, "--method", method, "--dtype", "float32").code == 0
    assert Memory.load(document.with_suffix(".ttmem")).info.method == method


def test_json(run: Any, document: Path, model_folder: Path) -> None:
    outcome = run("compact", document, "-m", model_folder, "--json", "--dtype", "float32")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["memory"] == str(document.with_suffix(".ttmem"))
    memory = Memory.load(found["memory"])
    assert found["bytes"] == memory.num_bytes()
    assert found["method"] == "latent"
    assert found["fidelity"]["kl"] > 0
    assert found["document"]["sha256"] == memory.info.document["sha256"]
    assert all(seconds >= 0 for seconds in found["seconds"].values())


@pytest.mark.parametrize("step", ["replay", "rollouts", "stage1"])
def test_an_interrupted_run_leaves_no_memory_and_goes_on_with_resume(
    run: Any, document: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    arguments = ["compact", document, "-m", model_folder, "--ratio", "8", "--dtype", "float32"]
    save = Workspace.save

    def interrupted(self: Workspace, name: str, *others: Any) -> None:
        save(self, name, *others)
        if name.partition("-")[0] == step:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "save", interrupted)
        outcome = run(*arguments)
    assert outcome.code == 130
    assert outcome.out == ""
    assert names(document.parent) == ["ferry.ttmem.partial", "ferry.txt"]
    assert any(name.startswith(step) for name in names(document.parent / "ferry.ttmem.partial"))

    assert run(*arguments, "--resume").code == 0
    assert names(document.parent) == ["ferry.ttmem", "ferry.txt"]
    resumed = Memory.load(document.with_suffix(".ttmem"))
    assert run(*arguments).code == 0
    straight = Memory.load(document.with_suffix(".ttmem"))
    for a, b in zip(resumed.compacted, straight.compacted, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.biases, b.biases)


def test_an_interrupted_run_leaves_an_older_memory_as_it_is(
    run: Any, document: Path, memory: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    before = memory.read_bytes()
    monkeypatch.setattr(Workspace, "save", interrupted)
    assert run("compact", document, "-m", model_folder).code == 130
    assert memory.read_bytes() == before


def test_a_memory_that_cannot_be_written_keeps_the_finished_work(
    run: Any, document: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compact", document, "-m", model_folder, "--dtype", "float32"]
    with monkeypatch.context() as patch:

        def full_disk(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("ttmem.memory.file.save_file", full_disk)
        outcome = run(*arguments, "--method", "full")
    assert outcome.code == 6
    assert "No space left" in outcome.err
    assert "ferry.ttmem" not in names(document.parent)
    assert run(*arguments, "--method", "full", "--resume").code == 0


@pytest.mark.parametrize("name", ["notes.ttmem", "notes.txt"])
def test_the_document_is_never_overwritten(
    run: Any, tmp_path: Path, document: Path, model_folder: Path, name: str
) -> None:
    """Neither by the default name of the output nor by a slip of the hand."""
    source = tmp_path / name
    source.write_bytes(document.read_bytes())
    options = [] if name.endswith(".ttmem") else ["-o", source]
    outcome = run("compact", source, "-m", model_folder, *options)
    assert source.read_bytes() == document.read_bytes()
    assert outcome.code != 0 or name.endswith(".ttmem")
