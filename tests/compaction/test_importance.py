"""KVzip+ scores against eager attention weights, and the KVzip+ method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from ttmem import Model, Progress
from ttmem.compaction.importance import replay_document, value_norms
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prompts import replay_request
from ttmem.compaction.settings import Budget
from ttmem.compaction.supervision import CUE_TOKENS
from ttmem.memory.layer import LayerMemory


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def replayer(request: pytest.FixtureRequest, make_network: Any, tokenizer: Any) -> tuple[Model, Any]:
    """A model, and the same weights with eager attention, which shows its weights."""
    eager = make_network(request.param)
    eager.set_attn_implementation("eager")
    return Model(make_network(request.param), tokenizer), eager


@torch.no_grad()
def direct_scores(model: Model, eager: Any, ids: list[int], values: list[Tensor], chunk: int) -> list[Tensor]:
    """max over replayed t and the group of a[t, i] / ||h_t|| * ||W_O v_i||, by plain forwards over [document, replay].

    values: [H, N, d] of the document per compacted layer.
    """
    layers = [layer.index for layer in model.compacted_layers]
    hidden: dict[int, Tensor] = {}

    def note(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            hidden[index] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    modules = {i: eager.model.layers[i].self_attn for i in layers}
    handles = [module.register_forward_pre_hook(note(i), with_kwargs=True) for i, module in modules.items()]
    n = len(ids)
    best = [torch.zeros(values[0].shape[0], n) for _ in layers]
    for start in range(0, n, chunk):
        part = ids[start : start + chunk]
        cue = model.decode(ids[max(0, start - CUE_TOKENS) : start]) if start else ""
        sequence = [*ids, *model.encode(replay_request(cue)), *part]
        attentions = eager(torch.tensor([sequence]), output_attentions=True, use_cache=False).attentions
        for slot, index in enumerate(layers):
            weights = attentions[index][0, :, -len(part) :, :n]  # [heads, t, N]
            norms = hidden[index][-len(part) :].norm(dim=-1)
            group = weights.shape[0] // best[slot].shape[0]
            matrix = modules[index].o_proj.weight
            for head in range(weights.shape[0]):
                own = matrix[:, head * values[slot].shape[-1] : (head + 1) * values[slot].shape[-1]]
                lengths = (values[slot][head // group] @ own.T).norm(dim=-1)
                scores = (weights[head] / norms.unsqueeze(-1)).amax(0) * lengths
                best[slot][head // group] = torch.maximum(best[slot][head // group], scores)
    for handle in handles:
        handle.remove()
    return best


@pytest.mark.parametrize("chunk", [1024, 70, 32])
def test_scores_equal_the_formula_with_eager_weights(
    replayer: tuple[Model, Any], make_prepared: Any, chunk: int
) -> None:
    model, eager = replayer
    full = make_prepared(model).full
    values = [layer.values.unflatten(0, (layer.num_heads, -1)) for layer in full.compacted]
    expected = direct_scores(model, eager, full.tokens.tolist(), values, chunk)
    found = replay_document(model, full, chunk, 32, Progress()).scores
    assert len(found) == len(expected)
    for scores, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(scores, wanted, atol=1e-6, rtol=1e-3)


def test_value_norms_are_the_lengths_of_projected_values(any_model: Model, make_full: Any) -> None:
    full = make_full(any_model)
    for attention, layer in zip(any_model.compacted_layers, full.compacted, strict=True):
        norms = value_norms(attention, layer)
        weight = attention.module.o_proj.weight
        values = layer.values.unflatten(0, (layer.num_heads, -1))
        group = attention.num_heads // layer.num_heads
        for head in range(attention.num_heads):
            own = values[head // group]
            padded = torch.zeros(own.shape[0], weight.shape[1])
            padded[:, head * own.shape[1] : (head + 1) * own.shape[1]] = own
            torch.testing.assert_close(norms[head], (padded @ weight.T).norm(dim=-1), atol=1e-4, rtol=1e-4)


def test_hooks_are_removed_also_after_an_error(model: Model, make_prepared: Any) -> None:
    class Stop(Progress):
        def show(self, name: str, total: int) -> Any:
            raise KeyboardInterrupt

    full = make_prepared(model).full
    replay_document(model, full, 64, 32, Progress())
    with pytest.raises(KeyboardInterrupt):
        replay_document(model, full, 64, 32, Stop())
    assert all(not layer.module._forward_pre_hooks for layer in model.layers)


@hypothesis_settings(max_examples=10)
@given(tokens=st.integers(4, 60), sinks=st.integers(0, 6))
def test_the_method_keeps_exactly_its_budget(model: Model, make_prepared: Any, tokens: int, sinks: int) -> None:
    if "prepared" not in CACHE:
        CACHE["prepared"] = make_prepared(model)
    prepared = CACHE["prepared"]
    memory = KVzipPlus(sinks)(prepared, Budget.of(prepared.document.length, tokens=tokens))
    assert memory.entries == 3 * 2 * tokens
    assert memory.info.budget["tokens"] == tokens


CACHE: dict[str, Any] = {}


@pytest.mark.parametrize("sinks", [0, 4])
def test_the_method_keeps_the_highest_scores_and_the_sinks(model: Model, make_prepared: Any, sinks: int) -> None:
    prepared = make_prepared(model)
    memory = KVzipPlus(sinks)(prepared, Budget.of(prepared.document.length, tokens=20))
    scores = [score.clone() for score in prepared.scores]
    for score in scores:
        score[:, :sinks] = torch.inf
    threshold = torch.cat([score.flatten() for score in scores]).sort(descending=True).values[3 * 2 * 20 - 1]
    for layer, full, score in zip(memory.compacted, prepared.full.compacted, scores, strict=True):
        heads = zip(layer.heads(), full.heads(), score, strict=True)
        for (keys, values, bias), (all_keys, all_values, _), row in heads:
            positions = (row >= threshold).nonzero().squeeze(-1)
            assert bias is None
            assert torch.equal(keys, all_keys[positions])
            assert torch.equal(values, all_values[positions])


def test_the_method_leaves_windows_and_scores_as_they_are(gemma: Model, make_prepared: Any) -> None:
    prepared = make_prepared(gemma)
    before = [score.clone() for score in prepared.scores]
    memory = KVzipPlus()(prepared, Budget.of(prepared.document.length, tokens=10))
    assert memory.layers[0] is prepared.full.layers[0]
    assert isinstance(memory.layers[1], LayerMemory)
    assert all(torch.equal(a, b) for a, b in zip(before, prepared.scores, strict=True))
    assert memory.info.method == "kvzip+"
