"""Stage 1: fit anchors and diversifiers to the full memory's attention outputs and log-normalizers (paper 3.3).

Layers are independent, and AdamW acts elementwise, so all layers are fitted as one batched problem: every head has
the same number M of trained entries. The frozen preservers answer each pooled query the same way at every update;
their branch is computed once and merged by log-sum-exp, so an update costs M entries per head, not the whole budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.attention.branches import Branch, branch_attention, merge_branches
from ttmem.attention.ragged import memory_attention
from ttmem.compaction.rollouts import QueryPool, Rollouts
from ttmem.compaction.selection import LayerSelection, gather_entries
from ttmem.compaction.settings import LatentSettings
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.progress import Progress

STD_FLOOR = 1e-4
SMALLEST_SHARE = 1e-3
"""The share of a query's mass that trained entries are assumed to carry at least."""


@dataclass
class FittingProblem:
    """All layers' pooled queries and targets: L layers, H heads, G queries per group, P positions, M trained entries.

    queries [L, H, G, P, d]; target (full document) and preserved (frozen preservers): outputs [L, H, G, P, value_dim]
    and log-normalizers [L, H, G, P]; output_std, log_z_std [L, H, G, 1]; keys, values [L, H, M, .], biases [L, H, M].
    """

    queries: Tensor
    target: Branch
    preserved: Branch
    output_std: Tensor
    log_z_std: Tensor
    keys: Tensor
    values: Tensor
    biases: Tensor
    scales: Tensor

    def losses(self, positions: Tensor) -> Tensor:
        """Stage-1 loss per layer [L] on a sample of pool positions (paper eq. 8)."""
        target = Branch(self.target.output[..., positions, :], self.target.log_z[..., positions])
        preserved = Branch(self.preserved.output[..., positions, :], self.preserved.log_z[..., positions])
        queries = self.queries[..., positions, :].flatten(2, 3) * self.scales.view(-1, 1, 1, 1)
        latent = branch_attention(queries, self.keys, self.values, 1.0, self.biases.unsqueeze(-2))
        latent = Branch(latent.output.view_as(target.output), latent.log_z.view_as(target.log_z))
        fitted = merge_branches(preserved, latent)
        output_error = (fitted.output - target.output) / self.output_std.unsqueeze(-1)
        log_z_error = (fitted.log_z - target.log_z) / self.log_z_std
        return output_error.square().flatten(1).mean(-1) + log_z_error.square().flatten(1).mean(-1)


def fit(
    memory: Memory,
    selections: list[LayerSelection],
    rollouts: Rollouts,
    settings: LatentSettings,
    seed: int,
    progress: Progress,
) -> tuple[list[LayerMemory | WindowMemory], list[list[float]]]:
    """Run stage 1 from the initial entries. Returns the layers, and the loss per layer at each update."""
    problem = fitting_problem(memory, selections, rollouts)
    if settings.mass_start:
        problem.biases = mass_biases(problem)
    parameters = [problem.keys, problem.values, problem.biases]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=settings.fit_lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    pool = problem.queries.shape[-2]
    curve: list[Tensor] = []
    with progress.stage("stage 1: attention fitting", settings.fit_updates) as advance:
        for _ in range(settings.fit_updates):
            positions = torch.randint(pool, (min(settings.fit_positions, pool),), generator=generator)
            losses = problem.losses(positions.to(problem.queries.device))
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            curve.append(losses.detach())
            advance(1)
    return fitted_layers(memory, selections, problem), torch.stack(curve).tolist() if curve else []


@torch.no_grad()
def fitting_problem(memory: Memory, selections: list[LayerSelection], rollouts: Rollouts) -> FittingProblem:
    """Gather pools, targets, the preservers' branch and the initial trained entries of all layers."""
    queries, targets, preserved, keys, values = [], [], [], [], []
    for layer, selection, pool, scale in zip(
        memory.compacted, selections, rollouts.pools, rollouts.scales, strict=True
    ):
        heads = layer.num_heads
        queries.append(pool.queries.float().unflatten(0, (heads, -1)))
        targets.append(_by_head(Branch(pool.outputs, pool.log_z), heads))
        frozen = gather_entries(layer, selection.preservers)
        preserved.append(_by_head(_answer_pool(pool, frozen, scale), heads))
        index = torch.arange(heads, device=selection.latents.device).unsqueeze(-1)
        keys.append(layer.keys.unflatten(0, (heads, -1))[index, selection.latents].float())
        values.append(layer.values.unflatten(0, (heads, -1))[index, selection.latents].float())
    target = Branch(torch.stack([t.output for t in targets]), torch.stack([t.log_z for t in targets]))
    trained = torch.stack(keys)
    return FittingProblem(
        queries=torch.stack(queries),
        target=target,
        preserved=Branch(torch.stack([p.output for p in preserved]), torch.stack([p.log_z for p in preserved])),
        output_std=target.output.flatten(-2).std(-1, unbiased=False, keepdim=True).clamp_min(STD_FLOOR),
        log_z_std=target.log_z.std(-1, unbiased=False, keepdim=True).clamp_min(STD_FLOOR),
        keys=trained,
        values=torch.stack(values),
        biases=trained.new_zeros(trained.shape[:-1]),
        scales=torch.tensor(rollouts.scales, device=trained.device),
    )


@torch.no_grad()
def mass_biases(problem: FittingProblem) -> Tensor:
    """Biases [L, H, M], one value per head, at which the trained entries carry the mass the preservers leave.

    For a query, that mass is Z_full - Z_preserved, never negative, since preservers are part of the document; the bias
    is the mean over the head's pooled queries of its logarithm against the entries' own log-normalizer.
    """
    queries = problem.queries.flatten(2, 3) * problem.scales.view(-1, 1, 1, 1)
    latent = branch_attention(queries, problem.keys, problem.values, 1.0).log_z.view_as(problem.target.log_z)
    kept = torch.exp(problem.preserved.log_z - problem.target.log_z).clamp(max=1.0 - SMALLEST_SHARE)
    missing = problem.target.log_z + torch.log1p(-kept)
    return (missing - latent).mean(dim=(2, 3)).unsqueeze(-1).expand(problem.biases.shape).clone()


def _answer_pool(pool: QueryPool, layer: LayerMemory, scale: float) -> Branch:
    output, log_z = memory_attention(pool.queries.unsqueeze(0), layer, scale)
    return Branch(output[0], log_z[0])


def _by_head(branch: Branch, heads: int) -> Branch:
    return Branch(branch.output.unflatten(0, (heads, -1)), branch.log_z.unflatten(0, (heads, -1)))


@torch.no_grad()
def fitted_layers(
    memory: Memory, selections: list[LayerSelection], problem: FittingProblem
) -> list[LayerMemory | WindowMemory]:
    """Preservers as they were, then the fitted entries, per head; keys and values in the memory's dtype."""
    layers: list[LayerMemory | WindowMemory] = []
    slot = 0
    for layer in memory.layers:
        if isinstance(layer, WindowMemory):
            layers.append(layer)
            continue
        frozen = list(gather_entries(layer, selections[slot].preservers).heads())
        keys, values, biases = problem.keys[slot], problem.values[slot], problem.biases[slot]
        layers.append(
            LayerMemory.from_heads(
                [torch.cat([head[0].float(), keys[h]]) for h, head in enumerate(frozen)],
                [torch.cat([head[1].float(), values[h]]) for h, head in enumerate(frozen)],
                [torch.cat([biases.new_zeros(head[0].shape[0]), biases[h]]) for h, head in enumerate(frozen)],
            )
        )
        slot += 1
    return layers
