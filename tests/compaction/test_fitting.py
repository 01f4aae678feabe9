"""Stage 1 against the loss written out over all entries (paper eq. 8)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ttmem import LatentSettings, Model, Progress
from ttmem.compaction.fitting import STD_FLOOR, FittingProblem, fit, fitting_problem, mass_biases
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.rollouts import Rollouts
from ttmem.compaction.selection import LayerSelection, initial_layers, select
from ttmem.compaction.settings import Budget
from ttmem.memory.layer import LayerMemory


@pytest.fixture(scope="module")
def selections(prepared: Prepared) -> list[LayerSelection]:
    budget = Budget.of(prepared.document.length, tokens=24)
    return select(prepared.full, prepared.scores, prepared.rollouts.max_log_attention, budget, prepared.settings)


def run(prepared: Prepared, selections: list[LayerSelection], seed: int = 0, **changes: Any) -> Any:
    settings = replace(prepared.settings, **changes)
    latents = selections[0].latents.shape[1]
    layers = initial_layers(prepared.full, selections)
    return fit(layers, latents, prepared.rollouts.pools, prepared.rollouts.scales, settings, seed, Progress())


def problem_of(prepared: Prepared, selections: list[LayerSelection], latents: int | None = -1) -> FittingProblem:
    layers = initial_layers(prepared.full, selections)
    latents = selections[0].latents.shape[1] if latents == -1 else latents
    return fitting_problem(layers, latents, prepared.rollouts.pools, prepared.rollouts.scales)


def direct_loss(layer: LayerMemory, rollouts: Rollouts, slot: int, positions: Tensor) -> Tensor:
    """MSE of outputs plus MSE of log-normalizers, standardised per query head, one softmax over all entries."""
    pool, scale = rollouts.pools[slot], rollouts.scales[slot]
    group = pool.queries.shape[0] // layer.num_heads
    output_errors, log_z_errors = [], []
    for head, query in enumerate(pool.queries[:, positions]):
        own = slice(layer.offsets[head // group], layer.offsets[head // group + 1])
        scores = scale * query.float() @ layer.keys[own].T + layer.biases[own]
        output_std = max(pool.outputs[head].std(unbiased=False).item(), STD_FLOOR)
        log_z_std = max(pool.log_z[head].std(unbiased=False).item(), STD_FLOOR)
        output_errors.append((scores.softmax(-1) @ layer.values[own] - pool.outputs[head, positions]) / output_std)
        log_z_errors.append((scores.logsumexp(-1) - pool.log_z[head, positions]) / log_z_std)
    return torch.stack(output_errors).square().mean() + torch.stack(log_z_errors).square().mean()


def compacted(layers: list[Any]) -> list[LayerMemory]:
    return [layer for layer in layers if isinstance(layer, LayerMemory)]


def test_the_loss_with_merged_preservers_is_the_loss_over_all_entries(
    prepared: Prepared, selections: list[LayerSelection]
) -> None:
    problem = problem_of(prepared, selections)
    torch.manual_seed(0)
    for trained in (problem.keys, problem.values, problem.biases):
        trained += 0.3 * torch.randn_like(trained)
    positions = torch.randint(problem.queries.shape[-2], (20,))
    losses = problem.losses(positions)
    for slot, (source, selection) in enumerate(zip(prepared.full.compacted, selections, strict=True)):
        heads = []
        for head, (keys, values, _) in enumerate(source.heads()):
            kept = selection.preservers[head]
            heads.append((
                torch.cat([keys[kept], problem.keys[slot, head]]),
                torch.cat([values[kept], problem.values[slot, head]]),
                torch.cat([torch.zeros(len(kept)), problem.biases[slot, head]]),
            ))  # fmt: skip
        layer = LayerMemory.from_heads(*map(list, zip(*heads, strict=True)))
        expected = direct_loss(layer, prepared.rollouts, slot, positions)
        torch.testing.assert_close(losses[slot], expected, rtol=1e-4, atol=1e-5)


def test_heads_without_preservers(prepared: Prepared, selections: list[LayerSelection]) -> None:
    nothing = torch.tensor([], dtype=torch.long)
    bare = [LayerSelection([nothing] * len(s.preservers), s.latents) for s in selections]
    layers, curve = run(prepared, bare, fit_updates=3)
    assert torch.isfinite(torch.tensor(curve)).all()
    for layer, s in zip(compacted(layers), bare, strict=True):
        assert layer.lengths == (s.latents.shape[1],) * len(s.preservers)
        assert torch.isfinite(layer.biases).all()


def test_gradients_reach_the_latents_and_nothing_else(prepared: Prepared, selections: list[LayerSelection]) -> None:
    problem = problem_of(prepared, selections)
    for trained in (problem.keys, problem.values, problem.biases):
        trained.requires_grad_(True)
    problem.losses(torch.arange(10)).sum().backward()
    for trained in (problem.keys, problem.values, problem.biases):
        assert trained.grad is not None
        assert trained.grad.abs().sum() > 0
    for layer in prepared.full.layers:
        assert not layer.keys.requires_grad
        assert layer.keys.grad is None
    assert all(parameter.grad is None for parameter in prepared.model.network.parameters())


@pytest.mark.parametrize("mass_start", [False, True])
def test_the_loss_falls_in_every_layer(prepared: Prepared, selections: list[LayerSelection], mass_start: bool) -> None:
    _, curve = run(prepared, selections, fit_updates=60, fit_positions=64, fit_lr=0.02, mass_start=mass_start)
    assert len(curve) == 60
    first, last = torch.tensor(curve[:8]).mean(0), torch.tensor(curve[-8:]).mean(0)
    assert (last < 0.9 * first).all()


def test_preservers_stay_bit_identical_and_latents_move(prepared: Prepared, selections: list[LayerSelection]) -> None:
    layers, _ = run(prepared, selections)
    for layer, source, selection in zip(compacted(layers), prepared.full.compacted, selections, strict=True):
        assert not layer.unbiased
        heads = zip(layer.heads(), source.heads(), selection.preservers, selection.latents, strict=True)
        for (keys, values, biases), (all_keys, all_values, _), kept, trained in heads:
            assert biases is not None
            count = len(kept)
            assert torch.equal(keys[:count], all_keys[kept])
            assert torch.equal(values[:count], all_values[kept])
            assert not biases[:count].any()
            assert len(keys) == count + len(trained)
            assert not torch.equal(keys[count:], all_keys[trained])
            assert not torch.equal(values[count:], all_values[trained])
            assert biases[count:].all()


def test_without_updates_the_initial_entries_are_kept(prepared: Prepared, selections: list[LayerSelection]) -> None:
    layers, curve = run(prepared, selections, fit_updates=0)
    assert curve == []
    for layer, source, selection in zip(compacted(layers), prepared.full.compacted, selections, strict=True):
        assert not layer.biases.any()
        for (keys, _, _), (all_keys, _, _), kept, trained in zip(
            layer.heads(), source.heads(), selection.preservers, selection.latents, strict=True
        ):
            assert torch.equal(keys, torch.cat([all_keys[kept], all_keys[trained]]))


def test_windows_are_passed_on(prepared: Prepared, selections: list[LayerSelection]) -> None:
    layers, _ = run(prepared, selections, fit_updates=1)
    for layer, source in zip(layers, prepared.full.layers, strict=True):
        assert isinstance(layer, LayerMemory) == isinstance(source, LayerMemory)
        if not isinstance(source, LayerMemory):
            assert layer is source


def test_layers_do_not_influence_each_other(prepared: Prepared, selections: list[LayerSelection]) -> None:
    together, curve = run(prepared, selections)
    slot = 1
    alone = [layer for layer in initial_layers(prepared.full, selections) if isinstance(layer, LayerMemory)][slot]
    pools, scales = [prepared.rollouts.pools[slot]], [prepared.rollouts.scales[slot]]
    layers, own_curve = fit(
        [alone], selections[slot].latents.shape[1], pools, scales, prepared.settings, 0, Progress()
    )
    assert isinstance(layers[0], LayerMemory)
    torch.testing.assert_close(layers[0].keys, compacted(together)[slot].keys, atol=1e-5, rtol=1e-4)
    assert [losses[0] for losses in own_curve] == pytest.approx([losses[slot] for losses in curve], rel=1e-4)


def test_the_seed_decides(prepared: Prepared, selections: list[LayerSelection]) -> None:
    one, again, other = (compacted(run(prepared, selections, seed)[0]) for seed in (1, 1, 2))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a.keys, b.keys) for a, b in zip(one, other, strict=True))


def test_fitting_leaves_its_inputs_as_they_are(prepared: Prepared, selections: list[LayerSelection]) -> None:
    keys = [layer.keys.clone() for layer in prepared.full.layers]
    queries = [pool.queries.clone() for pool in prepared.rollouts.pools]
    run(prepared, selections)
    assert all(torch.equal(layer.keys, before) for layer, before in zip(prepared.full.layers, keys, strict=True))
    pools = zip(prepared.rollouts.pools, queries, strict=True)
    assert all(torch.equal(pool.queries, before) for pool, before in pools)


def test_more_sampled_positions_than_the_pool_has(model: Model, make_prepared: Any) -> None:
    settings = LatentSettings(rollouts=2, rollout_tokens=2, top_k=4, pool=5, fit_updates=2)
    prepared = make_prepared(model, settings=settings)
    budget = Budget.of(prepared.document.length, tokens=8)
    chosen = select(prepared.full, prepared.scores, prepared.rollouts.max_log_attention, budget, settings)
    _, curve = run(prepared, chosen)
    assert torch.isfinite(torch.tensor(curve)).all()


def test_mass_biases_carry_the_missing_mass(prepared: Prepared, selections: list[LayerSelection]) -> None:
    """Per head, the mean over its queries of log((Z_full - Z_preservers) / Z_trained), in doubles."""
    biases = mass_biases(problem_of(prepared, selections))
    for slot, (source, selection) in enumerate(zip(prepared.full.compacted, selections, strict=True)):
        pool, scale = prepared.rollouts.pools[slot], prepared.rollouts.scales[slot]
        queries = pool.queries.double().unflatten(0, (source.num_heads, -1))
        for head, (keys, _, _) in enumerate(source.heads()):
            mass = (scale * queries[head] @ keys.double().T).exp()
            missing = mass.sum(-1) - mass[..., selection.preservers[head]].sum(-1)
            expected = (missing / mass[..., selection.latents[head]].sum(-1)).log().mean()
            assert biases[slot, head].tolist() == pytest.approx([expected.item()] * biases.shape[-1], abs=1e-3)


def test_without_mass_the_loss_is_that_of_the_outputs(prepared: Prepared, selections: list[LayerSelection]) -> None:
    problem = problem_of(prepared, selections)
    positions = torch.arange(20)
    with_mass, without = problem.losses(positions), problem.losses(positions, log_z_weight=0.0)
    double = problem.losses(positions, log_z_weight=2.0)
    assert (without < with_mass).all()
    torch.testing.assert_close(double - with_mass, with_mass - without, rtol=1e-4, atol=1e-5)


def test_training_preservers_too_has_the_same_loss_at_the_start(
    prepared: Prepared, selections: list[LayerSelection]
) -> None:
    positions = torch.arange(20)
    every, latents = problem_of(prepared, selections, None), problem_of(prepared, selections)
    torch.testing.assert_close(every.losses(positions), latents.losses(positions), rtol=1e-4, atol=1e-5)
    layers, _ = run(prepared, selections, fit_preservers=True, fit_updates=3)
    for layer, source, selection in zip(compacted(layers), prepared.full.compacted, selections, strict=True):
        heads = zip(layer.heads(), source.heads(), selection.preservers, selection.latents, strict=True)
        for (keys, _, _), (all_keys, _, _), kept, trained in heads:
            assert keys.shape[0] == len(kept) + len(trained)
            assert not (keys[: len(kept)] == all_keys[kept]).all(dim=-1).any()


def test_without_biases_they_stay_zero(prepared: Prepared, selections: list[LayerSelection]) -> None:
    layers, _ = run(prepared, selections, biases=False, mass_start=True)
    assert not any(layer.biases.any() for layer in compacted(layers))
