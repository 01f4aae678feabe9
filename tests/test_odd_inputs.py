"""Inputs nobody means to give: each has a defined outcome that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ttmem
from ttmem.cli.common import check_target
from ttmem.compaction.document import read_text
from ttmem.compaction.workspace import Workspace
from ttmem.generation import greedy_answers
from ttmem.memory.layer import LayerMemory


@pytest.fixture(scope="module")
def full(model: ttmem.Model, make_full: Any) -> ttmem.Memory:
    memory: ttmem.Memory = make_full(model)
    return memory


@pytest.mark.parametrize("question", ["", "  \n", "caf\udce9"])
def test_questions_that_are_none(model: ttmem.Model, full: ttmem.Memory, question: str) -> None:
    with pytest.raises(ttmem.QuestionError):
        ttmem.ask(model, full, question)
    with pytest.raises(ttmem.QuestionError):
        list(ttmem.stream(model, full, question))


def test_a_question_beyond_the_positions_is_refused_and_an_answer_ends_at_them(
    model: ttmem.Model, full: ttmem.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = full.document_length + 6
    monkeypatch.setattr(model.network.config, "max_position_embeddings", limit)
    with pytest.raises(ttmem.QuestionError, match="positions"):
        greedy_answers(model, full, [[5] * 6], 4)
    assert len(greedy_answers(model, full, [[5] * 4], 50)[0]) <= 2


def test_penalties_of_a_model_do_not_change_the_greedy_teacher(
    model: ttmem.Model, full: ttmem.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = greedy_answers(model, full, [[5, 7]], 8)
    monkeypatch.setattr(model.network.generation_config, "repetition_penalty", 5.0)
    assert greedy_answers(model, full, [[5, 7]], 8) == plain


@pytest.mark.parametrize(
    ("data", "said"),
    [("text".encode("utf-16"), "iconv -f utf-16"), ("text".encode("utf-16-le"), "UTF-16"), (b"a\xe9", "latin1")],
)
def test_files_in_other_encodings(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "d.txt").write_bytes(data)
    with pytest.raises(ttmem.DocumentError, match=said):
        read_text(tmp_path / "d.txt")


def test_a_memory_that_is_not_finite_leaves_the_old_file(tmp_path: Path, full: ttmem.Memory) -> None:
    full.save(tmp_path / "m.ttmem")
    before = (tmp_path / "m.ttmem").read_bytes()
    layer = full.compacted[0]
    broken = LayerMemory(layer.keys.clone().fill_(torch.nan), layer.values, layer.biases, layer.lengths)
    with pytest.raises(ttmem.MemoryFileError, match="NaN"):
        ttmem.Memory([broken, *full.layers[1:]], full.document_length, full.info).save(tmp_path / "m.ttmem")
    assert (tmp_path / "m.ttmem").read_bytes() == before


@pytest.mark.parametrize("target", ["", ".", "..", "missing/x.ttmem", "x" * 300])
def test_targets_that_cannot_become_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ttmem.MemoryFileError, match="cannot write"):
        check_target(Path(target))


def test_a_step_of_another_run_is_refused(tmp_path: Path) -> None:
    first = Workspace.open(tmp_path / "w", {"seed": 0}, resume=False)
    first.save("replay", {"a": torch.ones(2)}, {})
    other = Workspace(tmp_path / "w", "another key")
    with pytest.raises(ttmem.ResumeError, match="another run"):
        other.load("replay")


def test_discarding_leaves_what_is_not_ours(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "w", {}, resume=False)
    workspace.save("replay", {"a": torch.ones(2)}, {})
    (tmp_path / "w" / "model.safetensors").write_bytes(b"mine")
    workspace.discard()
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["model.safetensors"]


def test_inputs_of_one_question_without_a_batch_axis(full: ttmem.Memory) -> None:
    inputs = full.inputs(torch.tensor([5, 7]), torch.tensor([1, 1]))
    assert inputs["attention_mask"].shape == (1, full.document_length + 2)
