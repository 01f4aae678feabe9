"""Teacher rollouts against plain generation and plain forwards on the whole sequence."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem import LatentSettings, Memory, Model, Progress
from ttmem.compaction import rollouts as rollouts_module
from ttmem.compaction.rollouts import QueryPool, Rollouts, collect_rollouts, max_log_attention
from ttmem.memory.layer import LayerMemory

QUESTIONS = ("Summarise the text in detail, please.", "Who?", "When does it leave?")
PROMPTS = [f"\n\n{question}\nAnswer:" for question in QUESTIONS]
SETTINGS = LatentSettings(rollout_tokens=6, top_k=8, pool=10**6)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3", "llama that ends early"])
def teacher(request: pytest.FixtureRequest, make_network: Any, tokenizer: Any, make_full: Any) -> tuple[Model, Memory]:
    network = make_network(request.param.split()[0])
    model = Model(network, tokenizer)
    full = make_full(model)
    if "early" in request.param:  # a token that the first answers hold ends them
        answers = [plain_answer(model, full, prompt) for prompt in PROMPTS]
        network.generation_config.eos_token_id = [answers[0][2], answers[1][0]]
        model = Model(network, tokenizer)
    return model, full


@pytest.fixture(scope="module")
def collected(teacher: tuple[Model, Memory]) -> Rollouts:
    return collect_rollouts(*teacher, PROMPTS, SETTINGS, Progress())


def sequence(model: Model, full: Memory, prompt: str, answer: list[int] | None = None) -> Tensor:
    assert full.tokens is not None
    return torch.tensor([full.tokens.tolist() + model.encode(prompt) + (answer or [])])


def plain_answer(model: Model, full: Memory, prompt: str) -> list[int]:
    ids = sequence(model, full, prompt)
    output = model.network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    return list(output[0, ids.shape[1] :].tolist())


@torch.no_grad()
def plain_run(model: Model, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [L, V] of one unpadded forward, and the post-rotary queries [H*G, L, d] of every layer."""
    queries: list[Tensor] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        queries.append(query[0])
        return attend(query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", note)
        logits = model.network(input_ids=ids, use_cache=False).logits[0]
    return logits, queries


def test_answers_are_the_models_own_greedy_ones(teacher: tuple[Model, Memory], collected: Rollouts) -> None:
    model, full = teacher
    assert collected.prompts == [model.encode(prompt) for prompt in PROMPTS]
    assert collected.answers == [plain_answer(model, full, prompt) for prompt in PROMPTS]
    ends = model.eos_token_ids
    for answer in collected.answers:
        assert 1 <= len(answer) <= 6
        assert not ends & set(answer[:-1])
        assert len(answer) == 6 or answer[-1] in ends


def test_some_answers_end_early(teacher: tuple[Model, Memory], collected: Rollouts) -> None:
    model, _ = teacher
    if len(model.eos_token_ids) > 1:
        assert len(collected.answers[0]) <= 3
        assert len(collected.answers[1]) == 1


def test_supervision_is_that_of_a_plain_forward(teacher: tuple[Model, Memory], collected: Rollouts) -> None:
    model, full = teacher
    assert collected.predictions.top_ids.shape == collected.predictions.top_logits.shape == (3, 6, 8)
    for i, (prompt, answer) in enumerate(zip(PROMPTS, collected.answers, strict=True)):
        logits, _ = plain_run(model, sequence(model, full, prompt, answer))
        steps = logits[-len(answer) - 1 : -1]
        top = steps.topk(8)
        assert torch.equal(collected.predictions.top_ids[i, : len(answer)], top.indices)
        kept = collected.predictions[torch.tensor([i])][:, : len(answer)]
        torch.testing.assert_close(kept.top_logits[0], top.values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.log_z[0], steps.logsumexp(-1), atol=1e-4, rtol=1e-4)
        assert collected.predictions.top_ids[i, : len(answer), 0].tolist() == answer


def test_the_pool_holds_every_query_of_unpadded_runs(teacher: tuple[Model, Memory], collected: Rollouts) -> None:
    model, full = teacher
    runs = [
        plain_run(model, sequence(model, full, prompt, answer))[1]
        for prompt, answer in zip(PROMPTS, collected.answers, strict=True)
    ]
    n = full.document_length
    for slot, (layer, pool) in enumerate(zip(model.compacted_layers, collected.pools, strict=True)):
        expected = torch.cat([queries[layer.index][:, n:] for queries in runs], dim=1)
        assert expected.shape[1] == sum(map(len, collected.prompts)) + sum(map(len, collected.answers))
        torch.testing.assert_close(pool.queries, expected, atol=1e-4, rtol=1e-4)
        check_pool(pool, full.compacted[slot], collected.scales[slot])
        assert collected.scales[slot] == pytest.approx(layer.module.scaling)


def check_pool(pool: QueryPool, layer: LayerMemory, scale: float) -> None:
    """Outputs and log-normalizers are those of the document alone."""
    keys, values = (t.unflatten(0, (layer.num_heads, -1)) for t in (layer.keys, layer.values))
    group = pool.queries.shape[0] // layer.num_heads
    for head in range(pool.queries.shape[0]):
        scores = scale * pool.queries[head] @ keys[head // group].T
        torch.testing.assert_close(pool.log_z[head], scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool.outputs[head], scores.softmax(-1) @ values[head // group], atol=1e-4, rtol=1e-4)


def direct_maximum(pool: QueryPool, layer: LayerMemory, scale: float) -> Tensor:
    keys = layer.keys.unflatten(0, (layer.num_heads, -1))
    group = pool.queries.shape[0] // layer.num_heads
    weights = [(scale * query @ keys[head // group].T).softmax(-1) for head, query in enumerate(pool.queries)]
    return torch.stack(weights).unflatten(0, (-1, group)).amax(dim=(1, 2))


def test_maximum_attention_is_over_all_queries_although_the_pool_is_thinned(
    teacher: tuple[Model, Memory], collected: Rollouts
) -> None:
    model, full = teacher
    thinned = collect_rollouts(model, full, PROMPTS, replace(SETTINGS, pool=10), Progress())
    for slot, layer in enumerate(full.compacted):
        expected = direct_maximum(collected.pools[slot], layer, collected.scales[slot])
        torch.testing.assert_close(thinned.max_log_attention[slot].exp(), expected, atol=1e-5, rtol=1e-3)
        assert thinned.pools[slot].queries.shape[1] == 10


def test_maximum_attention_in_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = LayerMemory.full(torch.randn(2, 9, 4), torch.randn(2, 9, 4))
    queries = torch.randn(4, 11, 4)
    log_z = torch.stack([(0.5 * queries[h] @ layer.keys.view(2, 9, 4)[h // 2].T).logsumexp(-1) for h in range(4)])
    pool = QueryPool(queries, torch.zeros(4, 11, 4), log_z)
    monkeypatch.setattr(rollouts_module, "ROWS", 5)
    torch.testing.assert_close(max_log_attention(pool, layer, 0.5).exp(), direct_maximum(pool, layer, 0.5))


@pytest.mark.parametrize("size", [1, 2])
def test_the_batch_size_changes_nothing(
    teacher: tuple[Model, Memory], collected: Rollouts, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(rollouts_module, "BATCH", size)
    found = collect_rollouts(*teacher, PROMPTS, SETTINGS, Progress())
    assert found.answers == collected.answers
    for i, answer in enumerate(found.answers):
        assert torch.equal(found.predictions.top_ids[i, : len(answer)], collected.predictions.top_ids[i, : len(answer)])
        for name in ("top_logits", "log_z"):
            a, b = (getattr(r.predictions, name)[i, : len(answer)] for r in (found, collected))
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for a, b in zip(found.pools, collected.pools, strict=True):
        torch.testing.assert_close(vars(a), vars(b), atol=1e-4, rtol=1e-4)
    for x, y in zip(found.max_log_attention, collected.max_log_attention, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@given(parts=st.lists(st.integers(1, 30), min_size=1, max_size=4), size=st.integers(1, 60))
def test_thinning_is_even_and_keeps_both_ends(parts: list[int], size: int) -> None:
    total, start, pools = sum(parts), 0, []
    for count in parts:
        numbers = torch.arange(start, start + count, dtype=torch.float32)
        pools.append(QueryPool(numbers.view(1, -1, 1), numbers.view(1, -1, 1), numbers.view(1, -1)))
        start += count
    pool = QueryPool.concatenate(pools).thinned(size)
    kept = pool.log_z[0].int().tolist()
    assert pool.queries[0, :, 0].int().tolist() == pool.outputs[0, :, 0].int().tolist() == kept
    if total <= size:
        assert kept == list(range(total))
    else:
        assert len(kept) == len(set(kept)) == size
        assert kept[0] == 0
        if size > 1:
            assert kept[-1] == total - 1
            gaps = [b - a for a, b in pairwise(kept)]
            assert max(gaps) - min(gaps) <= 1


def test_progress_is_told_all_of_the_work_where_no_answer_ends_early(teacher: tuple[Model, Memory]) -> None:
    told: list[int] = []

    class Count(Progress):
        def stage(self, name: str, total: int) -> Any:
            told.append(-total)
            return super().stage(name, total)

        def show(self, name: str, total: int) -> Any:
            return nullcontext(told.append)

    model, full = teacher
    rollouts = collect_rollouts(model, full, PROMPTS, SETTINGS, Count())
    if all(len(answer) == 6 for answer in rollouts.answers):
        assert sum(told) == 0
    else:
        assert sum(told) <= 0
