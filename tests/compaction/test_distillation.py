"""Stage 2: the grouped KL, padded batches and their gradients, and what training changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, SupportsFloat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ttmem import LatentSettings, Memory, Model, Progress
from ttmem.compaction.distillation import (
    DistillationState,
    Teaching,
    distill,
    full_kl,
    grouped_kl,
    mean_over_steps,
    rate_factor,
    supervised_loss,
    trainable,
)
from ttmem.compaction.fitting import fit
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.rollouts import Rollouts
from ttmem.compaction.settings import Budget
from ttmem.models.layers import cache_keyword


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


def loss_of(prepared: Prepared, memory: Memory, rollouts: Rollouts, chosen: list[int], **changes: Any) -> Tensor:
    settings = replace(prepared.settings, **changes)
    return supervised_loss(prepared.model, memory, rollouts.chosen(chosen), settings, prepared.full)


def teaching(prepared: Prepared) -> Teaching:
    passages = prepared.passages if prepared.settings.passage_rounds else None
    return Teaching(prepared.full, prepared.rollouts, passages)


@pytest.fixture(scope="module")
def reading(prepared: Prepared) -> Prepared:
    """The same document, prepared for stage 2 with passages."""
    settings = replace(prepared.settings, passage_rounds=2, distill_passages=2, passage_tokens=12)
    return Prepared(prepared.model, prepared.document, settings)


def test_the_mean_over_steps_is_a_mean_of_means() -> None:
    values = torch.arange(12.0).view(3, 4)
    lengths = [3, 1, 4]
    mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(-1)
    values[~mask] = torch.nan
    expected = [values[row, :length].mean().item() for row, length in enumerate(lengths)]
    assert mean_over_steps(values, mask).item() == pytest.approx(sum(expected) / 3)


def test_full_kl_is_zero_for_the_teacher_and_above_the_grouped_one() -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(5, 30), torch.randn(5, 30)
    top = teacher.topk(4)
    grouped = grouped_kl(student, top.indices, top.values, teacher.logsumexp(-1))
    assert (full_kl(student, teacher) >= grouped).all()
    torch.testing.assert_close(full_kl(teacher, teacher), torch.zeros(5), atol=1e-6, rtol=0)


def test_a_padded_batch_has_the_loss_and_gradients_of_single_passes(
    prepared: Prepared, student: Memory, uneven: Rollouts
) -> None:
    chosen = [0, 1, 3, 4]
    assert len({len(uneven.prompts[i]) for i in chosen}) == len({len(uneven.answers[i]) for i in chosen}) == 4
    memory, parameters = trainable(student)
    together = loss_of(prepared, memory, uneven, chosen)
    gradients = torch.autograd.grad(together, parameters)
    singles = []
    accumulated = [torch.zeros_like(parameter) for parameter in parameters]
    for i in chosen:
        memory, parameters = trainable(student)
        one = loss_of(prepared, memory, uneven, [i])
        singles.append(one.item())
        for total, gradient in zip(accumulated, torch.autograd.grad(one, parameters), strict=True):
            total += gradient / 4
    assert together.item() == pytest.approx(sum(singles) / 4, rel=1e-4)
    for found, expected in zip(gradients, accumulated, strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_gradients_are_those_of_the_plain_model_with_a_trainable_cache(prepared: Prepared, uneven: Rollouts) -> None:
    """The full memory as student, against autograd through transformers' own cache, one rollout."""
    model, full = prepared.model, prepared.full
    memory, parameters = trainable(full)
    found = torch.autograd.grad(loss_of(prepared, memory, uneven, [1]), parameters)

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
        log_p = uneven.predictions.top_logits[1, step] - uneven.predictions.log_z[1, step]
        tops = uneven.predictions.top_ids[1, step]
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
    memory, curve = distill(prepared.model, student, teaching(prepared), settings, 0, Progress())
    assert len(curve) == 16
    assert sum(curve[-4:]) < 0.9 * sum(curve[:4])
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


def test_losses_are_told_as_they_come(prepared: Prepared, student: Memory) -> None:
    class Recorder(Progress):
        def figure(self, stage: str, step: int, value: SupportsFloat) -> None:
            told.append((stage, step, float(value)))

    told: list[tuple[str, int, float]] = []
    settings = replace(prepared.settings, distill_updates=3)
    _, curve = distill(prepared.model, student, teaching(prepared), settings, 0, Recorder(), label="a stage")
    assert told == [("a stage", i + 1, loss) for i, loss in enumerate(curve)]
    told.clear()
    fitted = replace(prepared.settings, fit_updates=4)
    latents = 4
    _, by_layer = fit(student.layers, latents, prepared.rollouts.pools, prepared.scales, fitted, 0, Recorder())
    assert [step for _, step, _ in told] == [1, 2, 3, 4]
    assert [loss for *_, loss in told] == pytest.approx([sum(losses) / len(losses) for losses in by_layer])


@pytest.mark.parametrize("distill_passages", [0, 2])
def test_a_run_goes_on_from_its_state_exactly(
    reading: Prepared, student: Memory, monkeypatch: Any, distill_passages: int
) -> None:
    monkeypatch.setattr("ttmem.compaction.distillation.CHECKPOINT_EVERY", 2)
    changes = {"distill_updates": 7, "distill_lr": 1e-3, "distill_passages": distill_passages, "decay": True}
    settings = replace(reading.settings, **changes)
    states: list[DistillationState] = []
    arguments = (reading.model, student, teaching(reading), settings, 0, Progress())
    straight, curve = distill(*arguments, checkpoint=states.append)
    assert [state.update for state in states] == [2, 4, 6]
    for state in states:
        resumed, rest = distill(*arguments, state=state)
        assert rest == curve[state.update :]
        for a, b in zip(straight.compacted, resumed.compacted, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
            assert torch.equal(a.biases, b.biases)


def test_passages_alone_lower_their_loss(reading: Prepared, student: Memory) -> None:
    settings = replace(reading.settings, distill_updates=30, distill_lr=2e-2, distill_batch=0, distill_passages=4)
    _, curve = distill(reading.model, student, teaching(reading), settings, 0, Progress())
    assert sum(curve[-6:]) < 0.95 * sum(curve[:6])


def test_both_sources_add_up(reading: Prepared, student: Memory) -> None:
    """One update on rollouts and passages has the sum of their losses."""
    found = {}
    for name, changes in {"both": {}, "rollouts": {"distill_passages": 0}, "passages": {"distill_batch": 0}}.items():
        settings = replace(reading.settings, distill_updates=1, **changes)
        _, (found[name],) = distill(reading.model, student, teaching(reading), settings, 0, Progress())
    assert found["both"] == pytest.approx(found["rollouts"] + found["passages"], rel=1e-5)


def test_the_whole_vocabulary_is_the_grouped_loss_with_every_token_kept(prepared: Prepared, student: Memory) -> None:
    every = replace(prepared.settings, top_k=299)
    rollouts = Prepared(prepared.model, prepared.document, every).rollouts
    grouped = loss_of(prepared, student, rollouts, [0, 2])
    whole = loss_of(prepared, student, rollouts, [0, 2], full_vocabulary=True)
    assert whole.item() == pytest.approx(grouped.item(), rel=1e-4)


def test_the_lm_loss_is_weighted(prepared: Prepared, student: Memory) -> None:
    none, one, two = (loss_of(prepared, student, prepared.rollouts, [0], lm_weight=w).item() for w in (0, 1, 2))
    assert two - one == pytest.approx(one - none, rel=1e-4)
    assert one > none


def test_without_biases_these_stay_as_they_are(prepared: Prepared, student: Memory) -> None:
    settings = replace(prepared.settings, biases=False, distill_updates=2)
    memory, _ = distill(prepared.model, student, teaching(prepared), settings, 0, Progress())
    assert all(layer.unbiased and not layer.biases.any() for layer in memory.compacted)


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    settings = LatentSettings(distill_updates=40, decay=True)
    factors = [rate_factor(update, settings) for update in range(40)]
    assert factors[0] == pytest.approx(0.25)
    assert max(factors) == factors[3] == pytest.approx(1 - 3 / 40)
    assert factors[-1] == pytest.approx(1 / 40)
    assert {rate_factor(update, replace(settings, decay=False)) for update in range(40)} == {1.0}


def test_gradients_are_clipped(prepared: Prepared, student: Memory) -> None:
    """With a norm of zero nothing moves (AdamW divides by epsilon)."""
    settings = replace(prepared.settings, distill_updates=2, clip=1e-30)
    memory, _ = distill(prepared.model, student, teaching(prepared), settings, 0, Progress())
    for a, b in zip(memory.compacted, student.compacted, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-6, rtol=0)


def test_trainable_is_a_copy_in_fp32(model: Model, make_full: Any) -> None:
    full = make_full(model).to(dtype=torch.bfloat16)
    memory, parameters = trainable(full)
    assert len(parameters) == 3 * len(full.compacted)
    assert all(p.requires_grad and p.is_leaf and p.dtype == torch.float32 for p in parameters)
    assert not any(layer.keys.requires_grad or layer.biases.requires_grad for layer in full.compacted)
    assert [layer.lengths for layer in memory.compacted] == [layer.lengths for layer in full.compacted]
