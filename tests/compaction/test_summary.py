"""The text summary: written within the budget, read as a document of its own, followed by what is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Model, ask
from ttmem.compaction.settings import Budget
from ttmem.compaction.summary import REQUEST, TextSummary
from ttmem.evaluation.fidelity import measure_fidelity
from ttmem.evaluation.speed import decode_seconds
from ttmem.generation import greedy_answers
from ttmem.memory.layer import LayerMemory, WindowMemory

PROMPT = "\n\nQuestion: When does the ferry leave?\nAnswer:"


@torch.no_grad()
def written_directly(model: Model, ids: list[int], tokens: int, no_repeat: int = 12) -> list[int]:
    """The likeliest continuation of document and request that repeats no 12 tokens, one full forward per token."""
    behind = model.encode(REQUEST.format(words=max(1, int(0.75 * tokens))))
    start = len(behind)
    while len(behind) - start < tokens:
        logits = model.network(torch.tensor([ids + behind]), use_cache=False).logits[0, -1]
        seen = [behind[i : i + no_repeat] for i in range(len(behind) - no_repeat + 1)]
        for token in logits.argsort(descending=True).tolist():
            if [*behind[len(behind) - no_repeat + 1 :], token] not in seen:
                break
        if token in model.eos_token_ids:
            break
        behind.append(token)
    return behind[start:]


@pytest.mark.parametrize("tokens", [4, 40])
def test_the_memory_is_the_full_cache_of_what_the_model_writes(
    any_model: Model, make_prepared: Any, tokens: int
) -> None:
    prepared = make_prepared(any_model)
    ids = prepared.document.ids.tolist()
    expected = written_directly(any_model, ids, tokens)
    memory = TextSummary()(prepared, Budget.of(len(ids), tokens=tokens))
    n = len(expected)
    assert memory.document_length == n <= tokens
    assert memory.entries == 2 * len(any_model.compacted_layers) * n
    alone = make_prepared(any_model)
    alone.document.ids = torch.tensor(expected)
    for layer, wanted in zip(memory.layers, alone.full.layers, strict=True):
        assert type(layer) is type(wanted)
        torch.testing.assert_close(layer.keys, wanted.keys)
        torch.testing.assert_close(layer.values, wanted.values)
        if isinstance(layer, WindowMemory):
            assert layer.keys.shape[1] == min(n, layer.window - 1)
        else:
            assert isinstance(layer, LayerMemory)
            assert layer.lengths == (n, n)
    assert memory.info.method == "summary"
    assert memory.info.settings == {"request": REQUEST, "no_repeat": 12, "summary_tokens": n}
    assert memory.info.document["tokens"] == len(ids)
    assert memory.tokens is not None
    assert memory.tokens.tolist() == ids


def test_what_is_asked_follows_the_summary(any_model: Model, make_prepared: Any) -> None:
    prepared = make_prepared(any_model)
    memory = TextSummary()(prepared, Budget.of(prepared.document.length, tokens=25))
    summary = written_directly(any_model, prepared.document.ids.tolist(), 25)
    prompt = any_model.encode(PROMPT)
    sequence = summary + prompt
    expected = []
    with torch.no_grad():
        for _ in range(6):
            token = int(any_model.network(torch.tensor([sequence]), use_cache=False).logits[0, -1].argmax())
            sequence, expected = [*sequence, token], [*expected, token]
            if token in any_model.eos_token_ids:
                break
    assert greedy_answers(any_model, memory, [prompt, prompt[2:]], 6)[0] == expected
    assert isinstance(ask(any_model, memory, "When?", max_new_tokens=3)[0], str)
    assert decode_seconds(any_model, memory, tokens=2) > 0


def test_fidelity_reads_prompts_behind_the_summary(any_model: Model, make_prepared: Any) -> None:
    """KL against the plain model on the summary's text, with the full context's answer teacher-forced."""
    prepared = make_prepared(any_model)
    memory = TextSummary()(prepared, Budget.of(prepared.document.length, tokens=25))
    found = measure_fidelity(any_model, prepared.full, memory, prompts=[PROMPT])
    prompt = any_model.encode(PROMPT)
    answer = greedy_answers(any_model, prepared.full, [prompt], 24)[0]
    ids = prepared.document.ids.tolist()
    logs = []
    with torch.no_grad():
        for before in (ids, written_directly(any_model, ids, 25)):
            whole = torch.tensor([before + prompt + answer[:-1]])
            logits = any_model.network(whole, use_cache=False).logits[0, -len(answer) :]
            logs.append(logits.double().log_softmax(-1))
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
    assert kl > 1e-3
    assert found.kl == pytest.approx(kl, rel=1e-3)


@pytest.mark.parametrize(("written", "kept"), [([5, 6, 257], [5, 6]), ([257], [257]), ([5, 6, 7], [5, 6, 7])])
def test_the_end_token_is_not_part_of_the_summary(
    model: Model, make_prepared: Any, monkeypatch: pytest.MonkeyPatch, written: list[int], kept: list[int]
) -> None:
    prepared = make_prepared(model)
    monkeypatch.setattr("ttmem.compaction.summary.greedy_answers", lambda *arguments: [written])
    method, budget = TextSummary(), Budget.of(prepared.document.length, tokens=12)
    assert method.summary(prepared, budget) == kept
    assert method(prepared, budget).document_length == len(kept)


@pytest.mark.parametrize("no_repeat", [2, 3])
def test_a_summary_does_not_go_round_in_circles(model: Model, make_prepared: Any, no_repeat: int) -> None:
    prepared = make_prepared(model)
    ids, budget = prepared.document.ids.tolist(), Budget.of(prepared.document.length, tokens=80)
    plain = TextSummary(no_repeat=0).summary(prepared, budget)
    assert len({tuple(plain[i : i + no_repeat]) for i in range(81 - no_repeat)}) < 81 - no_repeat, "a loop"
    summary = TextSummary(no_repeat=no_repeat).summary(prepared, budget)
    assert summary == written_directly(model, ids, 80, no_repeat)
    pieces = [tuple(summary[i : i + no_repeat]) for i in range(len(summary) - no_repeat + 1)]
    assert len(set(pieces)) == len(pieces)
