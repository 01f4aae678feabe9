"""Stage 2: the grouped KL, padded batches and their gradients, and what training changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ttmem import Memory, Model, Progress
from ttmem.compaction.distillation import (
    DistillationState,
    distill,
    distillation_loss,
    grouped_kl,
    rollout_loss,
    trainable,
)
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.rollouts import Rollouts
from ttmem.compaction.settings import Budget
from ttmem.models.layers import cache_keyword


@pytest.fixture(scope="module", params=["model", "gemma"])
def prepared(request: pytest.FixtureRequest, make_prepared: Any) -> Prepared:
    found: Prepared = make_prepared(request.getfixturevalue(request.param))
    return found


@pytest.fixture(scope="module")
def student(prepared: Prepared) -> Memory:
    return KVzipPlus()(prepared, Budget.of(prepared.document.length, tokens=24))


@pytest.fixture(scope="module")
def uneven(prepared: Prepared) -> Rollouts:
    """Prompts and answers of different lengths."""
    rollouts = prepared.rollouts
    prompts = [p[:-cut] if cut else p for p, cut in zip(rollouts.prompts, (0, 30, 11, 50, 2), strict=True)]
    return replace(rollouts, prompts=prompts, answers=[a[: 6 - i] for i, a in enumerate(rollouts.answers)])


def direct_grouped_kl(student: Tensor, teacher: Tensor, top: list[int]) -> float:
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    total = sum((p[i] * (p[i] / q[i]).log()).item() for i in top)
    rest = [i for i in range(len(p)) if i not in top]
    tail_p, tail_q = p[rest].sum(), q[rest].sum()
    return float(total + (tail_p * (tail_p / tail_q).log()).item())


@given(vocabulary=st.integers(3, 30), k=st.integers(1, 20), spread=st.floats(0.1, 6), seed=st.integers(0, 10**6))
def test_grouped_kl_is_the_sum_over_its_categories(vocabulary: int, k: int, spread: float, seed: int) -> None:
    k = min(k, vocabulary - 1)
    torch.manual_seed(seed)
    teacher, student = torch.randn(vocabulary) * spread, torch.randn(vocabulary) * spread
    top = teacher.topk(k)
    found = grouped_kl(student, top.indices, top.values, teacher.logsumexp(-1)).item()
    assert found == pytest.approx(direct_grouped_kl(student, teacher, top.indices.tolist()), abs=1e-4, rel=1e-3)
    same = grouped_kl(teacher, top.indices, top.values, teacher.logsumexp(-1)).item()
    assert same == pytest.approx(0.0, abs=1e-5)
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    assert -1e-5 <= found <= (log_p.exp() * (log_p - log_q)).sum().item() + 1e-4


def test_grouped_kl_of_a_very_sure_teacher_is_finite_with_its_gradient() -> None:
    teacher, student = torch.full((50,), -100.0), torch.zeros(50, requires_grad=True)
    teacher[3] = 100.0
    top = teacher.topk(5)
    loss = grouped_kl(student, top.indices, top.values, teacher.logsumexp(-1))
    (gradient,) = torch.autograd.grad(loss, student)
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=1e-4)
    assert torch.isfinite(gradient).all()


def test_the_loss_of_a_padded_batch_is_the_mean_of_means() -> None:
    torch.manual_seed(0)
    lengths, width, vocabulary, k = [3, 1, 4], 4, 20, 5
    teacher, student = torch.randn(3, width, vocabulary), torch.randn(3, width, vocabulary)
    answers = teacher.argmax(-1)
    top = teacher.topk(k)
    mask = torch.tensor([[step < length for step in range(width)] for length in lengths])
    kl, lm = distillation_loss(student, answers, mask, top.indices, top.values, teacher.logsumexp(-1))
    kls, lms = [], []
    for row, length in enumerate(lengths):
        triples = list(zip(student[row], teacher[row], top.indices[row].tolist(), strict=True))[:length]
        kls.append(sum(direct_grouped_kl(*triple) for triple in triples) / length)
        lms.append(-student[row, range(length)].log_softmax(-1)[range(length), answers[row, :length]].mean().item())
    assert kl.item() == pytest.approx(sum(kls) / 3, rel=1e-4)
    assert lm.item() == pytest.approx(sum(lms) / 3, rel=1e-4)


def test_a_padded_batch_has_the_loss_and_gradients_of_single_passes(
    prepared: Prepared, student: Memory, uneven: Rollouts
) -> None:
    chosen = torch.tensor([0, 1, 3, 4])
    assert len({len(uneven.prompts[i]) for i in chosen}) == len({len(uneven.answers[i]) for i in chosen}) == 4
    memory, parameters = trainable(student)
    kl, lm = rollout_loss(prepared.model, memory, uneven, chosen)
    gradients = torch.autograd.grad(kl + lm, parameters)
    singles = []
    accumulated = [torch.zeros_like(parameter) for parameter in parameters]
    for i in chosen:
        memory, parameters = trainable(student)
        one = rollout_loss(prepared.model, memory, uneven, i.unsqueeze(0))
        singles.append([part.item() for part in one])
        for total, gradient in zip(accumulated, torch.autograd.grad(sum(one), parameters), strict=True):
            total += gradient / 4
    assert [kl.item(), lm.item()] == pytest.approx([sum(column) / 4 for column in zip(*singles, strict=True)], rel=1e-4)
    for found, expected in zip(gradients, accumulated, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_gradients_are_those_of_the_plain_model_with_a_trainable_cache(prepared: Prepared, uneven: Rollouts) -> None:
    """The full memory as student, against autograd through transformers' own cache, one rollout."""
    model, full = prepared.model, prepared.full
    memory, parameters = trainable(full)
    kl, lm = rollout_loss(model, memory, uneven, torch.tensor([1]))
    found = torch.autograd.grad(kl + lm, parameters)

    assert full.tokens is not None
    cache, leaves = DynamicCache(config=model.network.config), []
    with torch.no_grad():
        model.network(input_ids=full.tokens[None], use_cache=True, **{cache_keyword(model.network): cache})
    for attention in model.compacted_layers:
        layer = cache.layers[attention.index]
        layer.keys, layer.values = (t.clone().requires_grad_(True) for t in (layer.keys, layer.values))
        leaves += [layer.keys, layer.values]
    prompt, answer = uneven.prompts[1], uneven.answers[1]
    ids = torch.tensor([prompt + answer[:-1]])
    output = model.network(input_ids=ids, use_cache=True, **{cache_keyword(model.network): cache})
    logits = output.logits[0, -len(answer) :]
    losses = []
    for step, token in enumerate(answer):
        log_q = logits[step].log_softmax(-1)
        log_p = uneven.top_logits[1, step] - uneven.log_z[1, step]
        tops = uneven.top_ids[1, step]
        tail_p, tail_q = 1 - log_p.exp().sum(), 1 - log_q[tops].exp().sum()
        kl_step = (log_p.exp() * (log_p - log_q[tops])).sum() + tail_p * (tail_p / tail_q).log()
        losses.append(kl_step - log_q[token])
    expected = torch.autograd.grad(torch.stack(losses).mean(), leaves)
    for i in range(len(full.compacted)):
        for part in range(2):
            wanted = expected[2 * i + part][0].flatten(0, 1)
            torch.testing.assert_close(found[3 * i + part], wanted, atol=1e-5, rtol=1e-3)


def test_training_lowers_the_loss_and_moves_everything(prepared: Prepared, student: Memory) -> None:
    settings = replace(prepared.settings, distill_updates=16, distill_lr=5e-3)
    before = [(layer.keys.clone(), layer.values.clone(), layer.biases.clone()) for layer in student.compacted]
    memory, curve = distill(prepared.model, student, prepared.rollouts, settings, 0, Progress())
    assert len(curve) == 16
    totals = [kl + lm for kl, lm in curve]
    assert sum(totals[-4:]) < 0.9 * sum(totals[:4])
    for layer, source, (keys, values, biases) in zip(memory.compacted, student.compacted, before, strict=True):
        assert layer.lengths == source.lengths
        assert not layer.unbiased
        assert not layer.keys.requires_grad
        assert (layer.keys != keys).any(dim=-1).all()
        assert (layer.values != values).any(dim=-1).all()
        assert (layer.biases != biases).all()
        assert torch.equal(source.keys, keys)
        assert torch.equal(source.values, values)
    assert all(parameter.grad is None for parameter in prepared.model.network.parameters())


def test_a_run_goes_on_from_its_state_exactly(prepared: Prepared, student: Memory, monkeypatch: Any) -> None:
    monkeypatch.setattr("ttmem.compaction.distillation.CHECKPOINT_EVERY", 2)
    settings = replace(prepared.settings, distill_updates=7, distill_lr=1e-3)
    states: list[DistillationState] = []
    arguments = (prepared.model, student, prepared.rollouts, settings, 0, Progress())
    straight, curve = distill(*arguments, checkpoint=states.append)
    assert [state.update for state in states] == [2, 4, 6]
    for state in states:
        resumed, rest = distill(*arguments, state=state)
        assert rest == curve[state.update :]
        for a, b in zip(straight.compacted, resumed.compacted, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            assert torch.equal(a.biases, b.biases)


def test_gradients_are_clipped(prepared: Prepared, student: Memory) -> None:
    """With a norm of zero nothing moves (AdamW divides by epsilon)."""
    settings = replace(prepared.settings, distill_updates=2, clip=1e-30)
    memory, _ = distill(prepared.model, student, prepared.rollouts, settings, 0, Progress())
    for a, b in zip(memory.compacted, student.compacted, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-6, rtol=0)


def test_trainable_is_a_copy_in_fp32(model: Model, make_full: Any) -> None:
    full = make_full(model).to(dtype=torch.bfloat16)
    memory, parameters = trainable(full)
    assert len(parameters) == 3 * len(full.compacted)
    assert all(p.requires_grad and p.is_leaf and p.dtype == torch.float32 for p in parameters)
    assert not any(layer.keys.requires_grad or layer.biases.requires_grad for layer in full.compacted)
    assert [layer.lengths for layer in memory.compacted] == [layer.lengths for layer in full.compacted]
