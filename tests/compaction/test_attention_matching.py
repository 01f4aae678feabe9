"""Attention Matching against its definition, on shares read off eager attention weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ttmem import LatentSettings, Model
from ttmem.attention.ragged import memory_attention
from ttmem.compaction.attention_matching import AttentionMatching, AttentionMatchingOMP
from ttmem.compaction.prompts import replay_request
from ttmem.compaction.settings import Budget

TOKENS = 20


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def replayed(
    request: pytest.FixtureRequest,
    make_network: Any,
    tokenizer: Any,
    make_prepared: Any,
    quick_settings: LatentSettings,
) -> tuple[Any, list[list[Tensor]]]:
    """A prepared document, and per compacted layer and KV head the shares [queries, N] of the document's mass.

    They are the eager attention weights of the replayed document over the document, normalized over it.
    """
    eager = make_network(request.param)
    eager.set_attn_implementation("eager")
    model = Model(make_network(request.param), tokenizer)
    prepared = make_prepared(model, settings=replace(quick_settings, replay_chunk=4096, replay_pool=4096))
    ids = prepared.document.ids.tolist()
    sequence = [*ids, *model.encode(replay_request()), *ids]
    with torch.no_grad():
        attentions = eager(torch.tensor([sequence]), output_attentions=True, use_cache=False).attentions
    shares = []
    for layer in model.compacted_layers:
        weights = attentions[layer.index][0, :, -len(ids) :, : len(ids)].double()
        weights = weights / weights.sum(-1, keepdim=True)
        shares.append(list(weights.unflatten(0, (layer.num_kv_heads, -1)).flatten(1, 2)))
    return prepared, shares


def positions_of(keys: Tensor, all_keys: Tensor) -> list[int]:
    """Where the keys lie in the document."""
    return [(all_keys == key).all(-1).nonzero().item() for key in keys]  # type: ignore[misc]


def best_weights(design: Tensor, lower: float, upper: float) -> Tensor:
    """Bounded least squares towards a mass of one, by many small steps (accelerated projected gradient)."""
    gram, moment = design.T @ design, design.sum(0)
    weights = torch.ones(design.shape[1], dtype=torch.float64)
    step = 1 / torch.linalg.matrix_norm(gram, 2)
    previous, momentum = weights, 1.0
    for _ in range(4000):
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = weights + (momentum - 1) / following * (weights - previous)
        previous, momentum = weights, following
        weights = (ahead - step * (gram @ ahead - moment)).clamp(lower, upper)
    return weights


def mass_error(design: Tensor, weights: Tensor) -> float:
    return (design @ weights.double() - 1).square().mean().item()


def check_values(shares: Tensor, weights: Tensor, all_values: Tensor, values: Tensor, chosen: list[int]) -> None:
    """The values solve the ridge towards the full document's outputs, as one stacked least-squares system."""
    attention = shares[:, chosen] * weights.double()
    attention = attention / attention.sum(-1, keepdim=True)
    damping = (1e-6 * attention.square().sum(0).mean()).sqrt()
    stacked = torch.cat([attention, damping * torch.eye(len(chosen), dtype=torch.float64)])
    prior = all_values[chosen].double()
    targets = torch.cat([shares @ all_values.double(), damping * prior])
    expected = torch.linalg.lstsq(stacked, targets, driver="gelsd").solution
    best = (stacked @ expected - targets).square().sum()
    found = (stacked @ values.double() - targets).square().sum()
    assert found <= best * 1.01 + 1e-6


def test_keys_are_those_of_highest_root_mean_square_attention(replayed: tuple[Any, list[list[Tensor]]]) -> None:
    prepared, shares = replayed
    memory = AttentionMatching()(prepared, Budget.of(prepared.document.length, tokens=TOKENS))
    for layer, full, heads in zip(memory.compacted, prepared.full.compacted, shares, strict=True):
        assert layer.lengths == (TOKENS, TOKENS)
        for (keys, values, bias), (all_keys, all_values, _), share in zip(
            layer.heads(), full.heads(), heads, strict=True
        ):
            scores = [math.sqrt(sum(x * x for x in column) / len(column)) for column in share.T.tolist()]
            best = sorted(range(len(scores)), key=lambda i: -scores[i])[:TOKENS]
            chosen = positions_of(keys, all_keys)
            assert chosen == sorted(best)
            assert bias is not None
            assert bias.min() >= -3 - 1e-5
            assert bias.max() <= 3 + 1e-5
            check_values(share, bias.exp(), all_values, values, chosen)
    assert memory.info.method == "am"
    assert memory.info.settings == {"iterations": 2, "bound": 3.0, "strength": 1e-6}


def test_weights_fit_the_mass_within_their_bounds(replayed: tuple[Any, list[list[Tensor]]]) -> None:
    prepared, shares = replayed
    budget = Budget.of(prepared.document.length, tokens=TOKENS)
    quick, exact = AttentionMatching()(prepared, budget), AttentionMatching(iterations=60)(prepared, budget)
    for layer, converged, full, heads in zip(
        quick.compacted, exact.compacted, prepared.full.compacted, shares, strict=True
    ):
        rows = zip(layer.heads(), converged.heads(), full.heads(), heads, strict=True)
        for (keys, _, bias), (_, _, exact_bias), (all_keys, _, _), share in rows:
            assert bias is not None
            assert exact_bias is not None
            design = share[:, positions_of(keys, all_keys)]
            best = mass_error(design, best_weights(design, math.exp(-3), math.exp(3)))
            assert mass_error(design, bias.exp()) < mass_error(design, torch.ones(TOKENS))
            assert mass_error(design, bias.exp()) <= 3 * best + 1e-9
            assert mass_error(design, exact_bias.exp()) <= 1.02 * best + 1e-9


def test_pursuit_fits_the_mass_better_than_the_highest_attention(replayed: tuple[Any, list[list[Tensor]]]) -> None:
    prepared, shares = replayed
    budget = Budget.of(prepared.document.length, tokens=TOKENS)
    plain, pursued = (
        AttentionMatching(iterations=60, bound=7.0)(prepared, budget),
        AttentionMatchingOMP()(prepared, budget),
    )
    assert pursued.info.method == "am-omp"
    errors: dict[str, list[float]] = {"plain": [], "pursued": []}
    for name, memory in (("plain", plain), ("pursued", pursued)):
        for layer, full, heads in zip(memory.compacted, prepared.full.compacted, shares, strict=True):
            assert layer.lengths == (TOKENS, TOKENS)
            rows = zip(layer.heads(), full.heads(), heads, strict=True)
            for (keys, values, bias), (all_keys, all_values, _), share in rows:
                assert bias is not None
                assert bias.abs().max() <= 7 + 1e-4
                chosen = positions_of(keys, all_keys)
                assert chosen == sorted(set(chosen))
                errors[name].append(mass_error(share[:, chosen], bias.exp()))
                check_values(share, bias.exp(), all_values, values, chosen)
    assert sum(errors["pursued"]) < sum(errors["plain"])


@pytest.mark.parametrize("method", [AttentionMatching(), AttentionMatchingOMP()])
def test_nearly_the_whole_document_answers_as_the_whole(
    method: AttentionMatching, model: Model, make_prepared: Any
) -> None:
    prepared = make_prepared(model, "The ferry to Lerwick leaves at nine on Mondays. Ada Quist keeps the store.")
    memory = method(prepared, Budget.of(prepared.document.length, tokens=prepared.document.length - 1))
    for layer, pool, scale in zip(memory.compacted, prepared.replay_pools, prepared.scales, strict=True):
        output, log_z = memory_attention(pool.queries.unsqueeze(0), layer, scale)
        torch.testing.assert_close(log_z[0], pool.log_z, atol=0.05, rtol=0)
        torch.testing.assert_close(output[0], pool.outputs, atol=0.05, rtol=0.05)


def test_the_fit_beats_the_same_entries_unfitted(model: Model, make_prepared: Any) -> None:
    prepared = make_prepared(model)
    memory = AttentionMatching()(prepared, Budget.of(prepared.document.length, tokens=16))
    for layer, full, pool, scale in zip(
        memory.compacted, prepared.full.compacted, prepared.replay_pools, prepared.scales, strict=True
    ):
        plain = [
            positions_of(keys, all_keys)
            for (keys, _, _), (all_keys, _, _) in zip(layer.heads(), full.heads(), strict=True)
        ]
        unfitted = type(layer).from_heads(
            [head[0][chosen] for head, chosen in zip(full.heads(), plain, strict=True)],
            [head[1][chosen] for head, chosen in zip(full.heads(), plain, strict=True)],
        )
        for part, error in (("output", 0.9), ("log_z", 0.5)):
            wanted = getattr(pool, "outputs" if part == "output" else part)
            fitted_error = (
                (getattr(memory_attention(pool.queries[None], layer, scale), part)[0] - wanted).square().mean()
            )
            plain_error = (
                (getattr(memory_attention(pool.queries[None], unfitted, scale), part)[0] - wanted).square().mean()
            )
            assert fitted_error < error * plain_error
