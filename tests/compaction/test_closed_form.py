"""The closed form against a plain solver, head by head, and what it must not touch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ttmem import Progress
from ttmem.compaction.closed_form import closed_form
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.pools import joined
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.memory.layer import LayerMemory


@pytest.fixture(scope="module")
def kept(prepared: Prepared) -> list[Any]:
    return KVzipPlus()(prepared, Budget.of(prepared.document.length, tokens=12)).layers


def run(prepared: Prepared, kept: list[Any], **changes: Any) -> list[LayerMemory]:
    pools = joined(prepared.rollouts.pools, prepared.replay_pools)
    settings = replace(prepared.settings, **changes)
    layers = closed_form(kept, pools, prepared.scales, settings, Progress())
    return [layer for layer in layers if isinstance(layer, LayerMemory)]


def test_values_are_the_ridge_solution_and_weights_the_bounded_one(prepared: Prepared, kept: list[Any]) -> None:
    pools = joined(prepared.rollouts.pools, prepared.replay_pools)
    fitted = run(prepared, kept, closed_ridge=0.05)
    sources = [layer for layer in kept if isinstance(layer, LayerMemory)]
    for slot, (layer, source) in enumerate(zip(fitted, sources, strict=True)):
        heads = layer.num_heads
        group = pools[slot].queries.shape[0] // heads
        for head, ((keys, values, biases), (own_keys, own_values, _)) in enumerate(
            zip(layer.heads(), source.heads(), strict=True)
        ):
            assert torch.equal(keys, own_keys)
            if not len(keys):
                continue
            rows = slice(head * group, (head + 1) * group)
            queries = pools[slot].queries[rows].flatten(0, 1).double().numpy()
            log_z = pools[slot].log_z[rows].flatten().double().numpy()
            outputs = pools[slot].outputs[rows].flatten(0, 1).double().numpy()
            shares = np.exp(prepared.scales[slot] * queries @ keys.double().numpy().T - log_z[:, None])
            assert biases is not None
            weights = biases.double().exp().numpy()
            assert (np.abs(biases.numpy()) <= prepared.settings.closed_bound + 1e-4).all()
            error = np.square(shares @ weights - 1).mean()
            for other in (np.ones_like(weights), np.full_like(weights, 1 / shares.sum(1).mean())):
                assert error <= np.square(shares @ np.clip(other, math.exp(-6), math.exp(6)) - 1).mean() + 1e-6
            attention = shares * weights
            attention /= attention.sum(1, keepdims=True)
            gram = attention.T @ attention
            shrink = 0.05 * np.trace(gram) / len(weights)
            prior = own_values.double().numpy()
            expected = prior + np.linalg.solve(
                gram + shrink * np.eye(len(weights)), attention.T @ outputs - gram @ prior
            )
            np.testing.assert_allclose(values.numpy(), expected, atol=2e-3, rtol=2e-2)


def test_the_fit_comes_closer_to_the_full_memory(prepared: Prepared, kept: list[Any]) -> None:
    from ttmem.attention.ragged import memory_attention

    pools = joined(prepared.rollouts.pools, prepared.replay_pools)
    sources = [layer for layer in kept if isinstance(layer, LayerMemory)]
    for fitted, source, pool, scale in zip(run(prepared, kept), sources, pools, prepared.scales, strict=True):
        before, after = (memory_attention(pool.queries[None].float(), layer, scale) for layer in (source, fitted))
        assert (after.log_z[0] - pool.log_z).square().mean() < (before.log_z[0] - pool.log_z).square().mean()
        assert (after.output[0] - pool.outputs).square().mean() < (before.output[0] - pool.outputs).square().mean()


def test_without_biases_only_values_are_fitted(prepared: Prepared, kept: list[Any]) -> None:
    for layer in run(prepared, kept, biases=False):
        assert layer.unbiased
        assert not layer.biases.any()
