"""Latent Compaction: a trained compact memory of one document (arXiv 2610.20582)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from ttmem.compaction.choice import better, choose_rate, splits
from ttmem.compaction.closed_form import closed_form
from ttmem.compaction.distillation import DistillationState, Teaching, distill
from ttmem.compaction.fitting import Layers, fit
from ttmem.compaction.pools import QueryPool, joined
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.selection import LayerSelection, initial_layers, select
from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory


@dataclass
class LatentCompaction:
    """(document, budget) -> Memory: select entries, fit attention (stage 1), distil answers (stage 2)."""

    settings: LatentSettings = field(default_factory=LatentSettings)
    seed: int = 0
    name = "latent"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Compact the prepared document to `budget`. Continues from the steps its workspace holds."""
        return self.after_stage_2(prepared, self.after_stage_1(prepared, budget))

    def selections(self, prepared: Prepared, budget: Budget) -> list[LayerSelection]:
        """The document positions the memory starts from."""
        return select(
            prepared.full, prepared.scores, prepared.rollouts.max_log_attention, budget, self.settings, self.seed
        )

    def initial(self, prepared: Prepared, budget: Budget) -> Memory:
        """The untrained memory: chosen entries as they are, biases zero."""
        layers = initial_layers(prepared.full, self.selections(prepared, budget))
        return self._memory(prepared, budget, layers, self.settings)

    def after_stage_1(self, prepared: Prepared, budget: Budget) -> Memory:
        """The memory after attention fitting, fp32: in closed form, by gradient, or by both, one after the other."""
        step = f"stage1-{budget.tokens}"
        kept = prepared.workspace.load(step)
        if kept is not None:
            tensors, data = kept
            used = LatentSettings(**data["used"]) if "used" in data else self.settings  # steps of earlier versions
            return self._memory(prepared, budget, _unpack(prepared.full, tensors, data), used)
        layers, settings = self._start(prepared, budget)
        generic, replayed = prepared.rollouts.pools, prepared.replay_pools
        pools = joined(generic, replayed) if settings.fit_replay else generic
        layers, _ = fit(
            layers, settings.latents(budget), pools, prepared.scales, settings, self.seed, prepared.progress
        )
        tensors, data = _pack(layers)
        prepared.workspace.save(step, tensors, {**data, "used": asdict(settings)})
        return self._memory(prepared, budget, layers, settings)

    def _start(self, prepared: Prepared, budget: Budget) -> tuple[Layers, LatentSettings]:
        """Entries as chosen, or fitted in closed form; with `choose_split`, under the best split of the budget."""
        settings = self.settings
        if not settings.closed_form:
            return initial_layers(prepared.full, self.selections(prepared, budget)), settings
        pools = joined(prepared.rollouts.pools, prepared.replay_pools)
        if settings.passage_rounds:
            pools = joined(pools, prepared.passages.pools)
        if not settings.choose_split:
            return self._closed_form(prepared, budget, pools), settings
        starts = [
            (replace(self, settings=each)._closed_form(prepared, budget, pools), each) for each in splits(settings)
        ]
        scores = [
            prepared.choice.divergence(self._memory(prepared, budget, *start), settings).score for start in starts
        ]
        return starts[scores.index(min(scores))]

    def _closed_form(self, prepared: Prepared, budget: Budget, pools: list[QueryPool]) -> Layers:
        layers = initial_layers(prepared.full, self.selections(prepared, budget))
        return closed_form(layers, pools, prepared.scales, self.settings, prepared.progress)

    def after_stage_2(self, prepared: Prepared, fitted: Memory) -> Memory:
        """The memory after distillation of a fitted one, in the model's dtype."""
        memory, settings = fitted, self.settings
        if settings.distill_updates:
            workspace, tokens = prepared.workspace, fitted.info.budget["tokens"]
            passages = prepared.passages if settings.distill_passages else None
            teaching = Teaching(prepared.full, prepared.rollouts, passages)
            if settings.trial_updates:
                settings = replace(settings, distill_lr=self._rate(prepared, fitted, teaching))
            step = f"stage2-{tokens}"
            kept = workspace.load(step)
            state = None if kept is None else DistillationState(int(kept[1]["update"]), kept[0])
            memory, _ = distill(
                prepared.model,
                fitted,
                teaching,
                settings,
                self.seed,
                prepared.progress,
                state,
                lambda state: workspace.save(step, state.tensors, {"update": state.update}),
            )
            if settings.trial_updates:
                memory = better(prepared.choice, fitted, memory, settings)
        return replace(memory.to(dtype=prepared.full.dtype), merging=settings.merging)

    def _rate(self, prepared: Prepared, fitted: Memory, teaching: Teaching) -> float:
        """The stage-2 rate chosen for this document and budget, tried once."""
        step = f"rate-{fitted.info.budget['tokens']}"
        kept = prepared.workspace.load(step)
        if kept is not None:
            return float(kept[1]["rate"])
        rate = choose_rate(prepared.choice, fitted, teaching, self.settings, self.seed, prepared.progress)
        prepared.workspace.save(step, {}, {"rate": rate})
        return rate

    def _memory(self, prepared: Prepared, budget: Budget, layers: Layers, used: LatentSettings) -> Memory:
        """used: the settings with the split of the budget that was chosen, which the memory tells beside its budget."""
        memory = prepared.memory(layers, self.name, budget, asdict(self.settings), self.seed)
        if used.initializer == "mixed" and budget.tokens < prepared.document.length:
            memory.info.budget |= {"latents": used.latents(budget), "anchors": used.anchors(budget)}
        return memory


def _pack(layers: Layers) -> tuple[dict[str, Tensor], dict[str, Any]]:
    compacted = [layer for layer in layers if isinstance(layer, LayerMemory)]
    tensors = {
        f"{i}.{name}": getattr(layer, name)
        for i, layer in enumerate(compacted)
        for name in ("keys", "values", "biases")
    }
    data = {"lengths": [list(layer.lengths) for layer in compacted], "unbiased": [x.unbiased for x in compacted]}
    return tensors, data


def _unpack(full: Memory, tensors: dict[str, Tensor], data: dict[str, Any]) -> Layers:
    layers: Layers = []
    slot = 0
    for layer in full.layers:
        if isinstance(layer, LayerMemory):
            device = layer.keys.device
            keys, values, biases = (tensors[f"{slot}.{name}"].to(device) for name in ("keys", "values", "biases"))
            layer = LayerMemory(keys, values, biases, tuple(data["lengths"][slot]), data["unbiased"][slot])
            slot += 1
        layers.append(layer)
    return layers
