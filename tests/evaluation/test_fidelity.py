"""Fidelity against a full-vocabulary KL written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Memory, Model, Progress, measure_fidelity
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prompts import HELD_OUT_PROMPTS
from ttmem.compaction.settings import Budget
from ttmem.evaluation import fidelity as fidelity_module
from ttmem.evaluation.fidelity import measure_fidelities
from ttmem.generation import greedy_answers

PROMPTS = HELD_OUT_PROMPTS[:4]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_module, "ANSWER_TOKENS", 8)


@pytest.fixture(scope="module", params=["model", "gemma"])
def subject(request: pytest.FixtureRequest, make_prepared: Any) -> tuple[Model, Memory, dict[str, Memory]]:
    """A model, its full memory, and two compacted ones."""
    model: Model = request.getfixturevalue(request.param)
    prepared = make_prepared(model)
    compacted = {str(n): KVzipPlus()(prepared, Budget.of(prepared.document.length, tokens=n)) for n in (8, 60)}
    return model, prepared.full, compacted


def test_the_full_memory_is_itself(subject: tuple[Model, Memory, dict[str, Memory]]) -> None:
    model, full, _ = subject
    found = measure_fidelity(model, full, full, prompts=PROMPTS)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.top1 == 1.0
    assert found.prompts == 4
    assert found.steps == 4 * 8


@torch.no_grad()
def direct(model: Model, full: Memory, memory: Memory) -> tuple[float, float]:
    """One prompt at a time: the teacher is the plain model on all ids, the student runs behind the memory."""
    kls, same = [], []
    assert full.tokens is not None
    for prompt in PROMPTS:
        ids = model.encode(prompt)
        answer = greedy_answers(model, full, [ids], 8)[0]
        whole = torch.tensor([full.tokens.tolist() + ids + answer])
        plain = model.network(input_ids=whole, use_cache=False).logits[0, -len(answer) - 1 : -1]
        behind = model.forward(torch.tensor([ids + answer[:-1]]), memory.cache()).logits[0, -len(answer) :]
        teacher, student = plain.double().log_softmax(-1), behind.double().log_softmax(-1)
        kls += (teacher.exp() * (teacher - student)).sum(-1).tolist()
        same += (teacher.argmax(-1) == student.argmax(-1)).tolist()
    return sum(kls) / len(kls), sum(same) / len(same)


def test_it_is_the_mean_kl_over_the_whole_vocabulary(subject: tuple[Model, Memory, dict[str, Memory]]) -> None:
    model, full, compacted = subject
    found = measure_fidelities(model, full, compacted, prompts=PROMPTS)
    for name, memory in compacted.items():
        kl, top1 = direct(model, full, memory)
        assert found[name].kl == pytest.approx(kl, rel=1e-3)
        assert found[name].top1 == pytest.approx(top1, abs=1e-9)
        assert measure_fidelity(model, full, memory, prompts=PROMPTS).kl == pytest.approx(found[name].kl, rel=1e-6)
    assert found["8"].kl > found["60"].kl > 1e-4


@pytest.mark.parametrize("size", [1, 2])
def test_the_batch_size_changes_nothing(
    subject: tuple[Model, Memory, dict[str, Memory]], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    model, full, compacted = subject
    expected = measure_fidelities(model, full, compacted, prompts=PROMPTS)
    monkeypatch.setattr(fidelity_module, "BATCH", size)
    found = measure_fidelities(model, full, compacted, prompts=PROMPTS)
    for name in compacted:
        assert found[name].kl == pytest.approx(expected[name].kl, rel=1e-3)
        assert found[name].top1 == expected[name].top1
        assert found[name].steps == expected[name].steps


def test_the_stage_is_timed(model: Model, make_full: Any) -> None:
    progress = Progress()
    full = make_full(model)
    measure_fidelity(model, full, full, progress, prompts=PROMPTS[:1])
    assert list(progress.seconds) == ["fidelity on held-out prompts"]
