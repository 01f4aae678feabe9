"""What methods share for one document: its full memory, teacher rollouts and reconstruction scores.

Each is computed when first asked for, once, and kept in the workspace. Methods and budgets compared on the same
document reuse them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ttmem.compaction.document import Document
from ttmem.compaction.importance import kvzip_plus_scores
from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prompts import rollout_prompts
from ttmem.compaction.rollouts import QueryPool, Rollouts, collect_rollouts
from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.compaction.workspace import Workspace
from ttmem.memory import Memory, MemoryInfo
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.models import Model
from ttmem.progress import Progress
from ttmem.versions import versions


@dataclass
class Prepared:
    """A model, a document, and the artifacts of the teacher, computed on demand."""

    model: Model
    document: Document
    settings: LatentSettings = field(default_factory=LatentSettings)
    progress: Progress = field(default_factory=Progress)
    workspace: Workspace = field(default_factory=lambda: Workspace(None))

    @cached_property
    def full(self) -> Memory:
        """The uncompacted memory: the teacher's."""
        ids = self.document.ids.to(self.model.device).unsqueeze(0)
        with self.progress.stage("reading the document", self.document.length) as advance:
            layers = full_memory_layers(self.model.network, ids, on_chunk=advance)
        return self.memory(layers, "full", Budget(self.document.length, 1.0))

    @cached_property
    def rollouts(self) -> Rollouts:
        """The teacher's answers to the generic prompts, with queries and targets."""
        kept = self.workspace.load("rollouts")
        if kept is not None:
            return _unpack(*kept, self.model)
        prompts = rollout_prompts(self.settings.rollouts)
        rollouts = collect_rollouts(self.model, self.full, prompts, self.settings, self.progress)
        self.workspace.save("rollouts", *_pack(rollouts))
        return rollouts

    @cached_property
    def scores(self) -> list[Tensor]:
        """KVzip+ scores [H, N] per compacted layer."""
        kept = self.workspace.load("scores")
        if kept is not None:
            return [kept[0][f"scores.{i}"].to(self.model.device) for i in range(len(kept[0]))]
        scores = kvzip_plus_scores(self.model, self.full, self.settings.replay_chunk, self.progress)
        self.workspace.save("scores", {f"scores.{i}": score for i, score in enumerate(scores)}, {})
        return scores

    def memory(
        self,
        layers: list[LayerMemory | WindowMemory],
        method: str,
        budget: Budget,
        settings: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> Memory:
        """A memory of this document from its layers."""
        info = MemoryInfo(
            method=method,
            model=self.model.identity(),
            document={"name": self.document.name, "sha256": self.document.sha256, "tokens": self.document.length},
            budget={"tokens": budget.tokens, "ratio": budget.ratio},
            settings=settings or {},
            seed=seed,
            versions=versions(),
        )
        return Memory(layers, self.document.length, info, self.document.ids)


def _pack(rollouts: Rollouts) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {"top_ids": rollouts.top_ids, "top_logits": rollouts.top_logits, "log_z": rollouts.log_z}
    for i, (pool, attention) in enumerate(zip(rollouts.pools, rollouts.max_log_attention, strict=True)):
        tensors[f"pool.{i}.queries"] = pool.queries
        tensors[f"pool.{i}.outputs"] = pool.outputs
        tensors[f"pool.{i}.log_z"] = pool.log_z
        tensors[f"max_log_attention.{i}"] = attention
    return tensors, {"prompts": rollouts.prompts, "answers": rollouts.answers, "scales": rollouts.scales}


def _unpack(tensors: dict[str, Tensor], data: dict[str, Any], model: Model) -> Rollouts:
    def on_device(name: str) -> Tensor:
        return tensors[name].to(model.device)

    count = len(data["scales"])
    return Rollouts(
        prompts=data["prompts"],
        answers=data["answers"],
        top_ids=tensors["top_ids"],
        top_logits=tensors["top_logits"],
        log_z=tensors["log_z"],
        pools=[
            QueryPool(*(on_device(f"pool.{i}.{name}") for name in ("queries", "outputs", "log_z")))
            for i in range(count)
        ],
        max_log_attention=[on_device(f"max_log_attention.{i}") for i in range(count)],
        scales=data["scales"],
    )
