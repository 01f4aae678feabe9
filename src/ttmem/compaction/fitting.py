"""Stage 1: fit entries to the full memory's attention outputs and log-normalizers (paper 3.3).

Layers are independent, and AdamW acts elementwise, so all layers are fitted as one batched problem. As the paper has
it, only the last entries of each head train, its anchors and diversifiers, of which every head has the same number M.
The frozen preservers before them answer each pooled query the same way at every update; their branch is computed once
and merged by log-sum-exp, so an update costs M entries per head, not the whole budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.attention.branches import Branch, branch_attention, merge_branches
from ttmem.attention.ragged import memory_attention
from ttmem.compaction.pools import QueryPool
from ttmem.compaction.settings import LatentSettings
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.progress import Progress

LABEL = "stage 1: attention fitting"
STD_FLOOR = 1e-4
SMALLEST_SHARE = 1e-3
"""The share of a query's mass that trained entries are assumed to carry at least."""

Layers = list[LayerMemory | WindowMemory]


@dataclass
class FittingProblem:
    """All layers' pooled queries and targets: L layers, H heads, G queries per group, P positions, M trained entries.

    queries [L, H, G, P, d]; target (full document) and preserved (frozen entries): outputs [L, H, G, P, value_dim]
    and log-normalizers [L, H, G, P]; output_std, log_z_std [L, H, G, 1]; keys, values [L, H, M, .], biases [L, H, M].
    real [L, H, 1, M]: which entries exist, where heads train different numbers of them; None where all do.
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
    real: Tensor | None = None

    def losses(self, positions: Tensor, log_z_weight: float = 1.0) -> Tensor:
        """Stage-1 loss per layer [L] on a sample of pool positions (paper eq. 8)."""
        target = Branch(self.target.output[..., positions, :], self.target.log_z[..., positions])
        preserved = Branch(self.preserved.output[..., positions, :], self.preserved.log_z[..., positions])
        queries = self.queries[..., positions, :].flatten(2, 3) * self.scales.view(-1, 1, 1, 1)
        latent = branch_attention(queries, self.keys, self.values, 1.0, self.biases.unsqueeze(-2), self.real)
        latent = Branch(latent.output.view_as(target.output), latent.log_z.view_as(target.log_z))
        fitted = merge_branches(preserved, latent)
        output_error = (fitted.output - target.output) / self.output_std.unsqueeze(-1)
        log_z_error = (fitted.log_z - target.log_z) / self.log_z_std
        return output_error.square().flatten(1).mean(-1) + log_z_weight * log_z_error.square().flatten(1).mean(-1)


def fit(
    layers: Layers,
    latents: int,
    pools: list[QueryPool],
    scales: list[float],
    settings: LatentSettings,
    seed: int,
    progress: Progress,
) -> tuple[Layers, list[list[float]]]:
    """Run stage 1 from initial layers, whose heads end with their `latents` anchors and diversifiers.

    pools, scales: queries, targets and attention scale of each compacted layer. Returns the layers, keys and values
    fp32, and the loss per layer at each update.
    """
    if settings.fit_updates == 0 and not settings.mass_start:
        return layers, []
    problem = fitting_problem(layers, None if settings.fit_preservers else latents, pools, scales)
    if settings.mass_start and settings.biases:
        problem.biases = mass_biases(problem)
    parameters = [problem.keys, problem.values, *([problem.biases] if settings.biases else [])]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=settings.fit_lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    pool = problem.queries.shape[-2]
    curve: list[Tensor] = []
    with progress.stage(LABEL, settings.fit_updates) as advance:
        for update in range(settings.fit_updates):
            positions = torch.randint(pool, (min(settings.fit_positions, pool),), generator=generator)
            losses = problem.losses(positions.to(problem.queries.device), settings.log_z_weight)
            optimizer.zero_grad()
            losses.sum().backward()
            optimizer.step()
            curve.append(losses.detach())
            progress.figure(LABEL, update + 1, curve[-1].mean())
            advance(1)
    return fitted_layers(layers, problem), torch.stack(curve).tolist() if curve else []


@torch.no_grad()
def fitting_problem(
    layers: Layers, latents: int | None, pools: list[QueryPool], scales: list[float]
) -> FittingProblem:
    """Pools, targets, the frozen entries' branch and the trained entries of all layers: all, if latents is None."""
    compacted = [layer for layer in layers if isinstance(layer, LayerMemory)]
    queries, targets, preserved, trained = [], [], [], []
    for layer, pool, scale in zip(compacted, pools, scales, strict=True):
        heads = layer.num_heads
        queries.append(pool.queries.float().unflatten(0, (heads, -1)))
        targets.append(_by_head(Branch(pool.outputs, pool.log_z), heads))
        frozen, own = split_entries(layer, latents)
        preserved.append(_by_head(_answer_pool(pool, frozen, scale), heads))
        trained.append(own)
    width = max(max(own.lengths) for own in trained)
    parts = zip(*(padded(own, width) for own in trained), strict=True)
    keys, values, biases, real = (torch.stack(part) for part in parts)
    target = Branch(torch.stack([t.output for t in targets]), torch.stack([t.log_z for t in targets]))
    return FittingProblem(
        queries=torch.stack(queries),
        target=target,
        preserved=Branch(torch.stack([p.output for p in preserved]), torch.stack([p.log_z for p in preserved])),
        output_std=target.output.flatten(-2).std(-1, unbiased=False, keepdim=True).clamp_min(STD_FLOOR),
        log_z_std=target.log_z.std(-1, unbiased=False, keepdim=True).clamp_min(STD_FLOOR),
        keys=keys,
        values=values,
        biases=biases,
        scales=torch.tensor(scales, device=keys.device),
        real=None if bool(real.all()) else real.unsqueeze(-2),
    )


def split_entries(layer: LayerMemory, latents: int | None) -> tuple[LayerMemory, LayerMemory]:
    """The entries of each head before its last `latents`, and these; all are among the latter if it is None."""
    heads = list(layer.heads())
    counts = [0 if latents is None else keys.shape[0] - latents for keys, _, _ in heads]
    return tuple(  # type: ignore[return-value]
        LayerMemory.from_heads(
            [keys[part] for (keys, _, _), part in zip(heads, parts, strict=True)],
            [values[part] for (_, values, _), part in zip(heads, parts, strict=True)],
            None if layer.unbiased else [b[part] for (*_, b), part in zip(heads, parts, strict=True) if b is not None],
        )
        for parts in ([slice(0, n) for n in counts], [slice(n, None) for n in counts])
    )


def padded(layer: LayerMemory, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """keys, values [H, width, .], biases and a mask of real entries [H, width], fp32: heads filled up with zeros."""
    lengths = torch.tensor(layer.lengths, device=layer.keys.device)
    real = torch.arange(width, device=layer.keys.device) < lengths.unsqueeze(-1)
    parts = []
    for flat in (layer.keys, layer.values, layer.biases):
        full = flat.new_zeros(*real.shape, *flat.shape[1:], dtype=torch.float32)
        full[real] = flat.float()
        parts.append(full)
    return parts[0], parts[1], parts[2], real


@torch.no_grad()
def mass_biases(problem: FittingProblem) -> Tensor:
    """Biases [L, H, M], one value per head, at which the trained entries carry the mass the frozen ones leave.

    For a query, that mass is Z_full - Z_preserved, never negative, since preservers are part of the document; the bias
    is the mean over the head's pooled queries of its logarithm against the entries' own log-normalizer.
    """
    queries = problem.queries.flatten(2, 3) * problem.scales.view(-1, 1, 1, 1)
    latent = branch_attention(queries, problem.keys, problem.values, 1.0, mask=problem.real).log_z
    kept = torch.exp(problem.preserved.log_z - problem.target.log_z).clamp(max=1.0 - SMALLEST_SHARE)
    missing = problem.target.log_z + torch.log1p(-kept)
    difference = missing - latent.view_as(problem.target.log_z)
    return difference.mean(dim=(2, 3)).unsqueeze(-1).expand(problem.biases.shape).clone()


def _answer_pool(pool: QueryPool, layer: LayerMemory, scale: float) -> Branch:
    output, log_z = memory_attention(pool.queries.unsqueeze(0), layer, scale)
    return Branch(output[0], log_z[0])


def _by_head(branch: Branch, heads: int) -> Branch:
    return Branch(branch.output.unflatten(0, (heads, -1)), branch.log_z.unflatten(0, (heads, -1)))


@torch.no_grad()
def fitted_layers(layers: Layers, problem: FittingProblem) -> Layers:
    """Each head's frozen entries as they were, then the fitted ones; keys and values fp32."""
    fitted: Layers = []
    slot = 0
    for layer in layers:
        if isinstance(layer, LayerMemory):
            layer = _fitted(layer, problem, slot)
            slot += 1
        fitted.append(layer)
    return fitted


def _fitted(layer: LayerMemory, problem: FittingProblem, slot: int) -> LayerMemory:
    keys, values, biases = [], [], []
    for head, (old_keys, old_values, old_biases) in enumerate(layer.heads()):
        trained = min(problem.keys.shape[2], old_keys.shape[0])
        kept = old_keys.shape[0] - trained
        before = problem.biases.new_zeros(kept) if old_biases is None else old_biases[:kept]
        keys.append(torch.cat([old_keys[:kept].float(), problem.keys[slot, head, :trained].detach()]))
        values.append(torch.cat([old_values[:kept].float(), problem.values[slot, head, :trained].detach()]))
        biases.append(torch.cat([before, problem.biases[slot, head, :trained].detach()]))
    return LayerMemory.from_heads(keys, values, biases)
