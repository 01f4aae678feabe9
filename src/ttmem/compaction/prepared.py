"""What methods share for one document: its full memory, teacher rollouts and reconstruction scores.

Each is computed when first asked for, once, and kept in the workspace. Methods and budgets compared on the same
document reuse them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ttmem.compaction.choice import Choice
from ttmem.compaction.document import Document
from ttmem.compaction.importance import Replay, replay_document
from ttmem.compaction.passages import collect_passages
from ttmem.compaction.pools import NAMES, QueryPool
from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prompts import rollout_prompts
from ttmem.compaction.rollouts import Rollouts, collect_rollouts
from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.compaction.supervision import Predictions
from ttmem.compaction.workspace import Workspace
from ttmem.memory import Memory, MemoryInfo
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.models import Model
from ttmem.progress import Progress
from ttmem.versions import versions

PASSAGE_SEED = 0
"""Passages are the document's, like its rollouts: the same whatever the seed of a method."""


@dataclass
class Prepared:
    """A model, a document, and the artifacts of the teacher, computed on demand."""

    model: Model
    document: Document
    settings: LatentSettings = field(default_factory=LatentSettings)
    progress: Progress = field(default_factory=Progress)
    workspace: Workspace = field(default_factory=lambda: Workspace(None))
    before: Memory | None = None
    """What lies before the document: its tokens see it, and all that is computed for them."""

    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    """Seconds each artifact took, without those of the artifacts it needed."""
    used: set[str] = field(default_factory=set, init=False, repr=False)
    """Artifacts asked for since this was last cleared: what a method's preparation rests on."""

    @property
    def full(self) -> Memory:
        """The uncompacted memory: the teacher's."""
        return self._artifact("full", self._read)

    @property
    def rollouts(self) -> Rollouts:
        """The teacher's answers to the generic prompts, with queries and targets."""
        return self._artifact("rollouts", self._roll_out)

    @property
    def passages(self) -> Rollouts:
        """Passages of the document, asked for in different ways, with the teacher's queries and predictions."""
        return self._artifact("passages", self._collect_passages)

    @property
    def choice(self) -> Choice:
        """What decides how this document's memory is trained."""
        return self._artifact("choice", lambda: Choice.of(self.model, self.full, self.settings, self.progress))

    @property
    def replay(self) -> Replay:
        """The document's replay: KVzip+ scores and replayed queries."""
        return self._artifact("replay", self._replay)

    @property
    def scores(self) -> list[Tensor]:
        """KVzip+ scores [H, N] per compacted layer."""
        return self.replay.scores

    @property
    def replay_pools(self) -> list[QueryPool]:
        """Queries of the replayed document per compacted layer."""
        return self.replay.pools

    @property
    def scales(self) -> list[float]:
        """The attention scale of each compacted layer."""
        return self.replay.scales

    def _artifact(self, name: str, make: Callable[[], Any]) -> Any:
        self.used.add(name)
        if name not in self._made:
            start, before = time.perf_counter(), sum(self.seconds.values())
            self._made[name] = make()
            self.seconds[name] = time.perf_counter() - start - (sum(self.seconds.values()) - before)
        return self._made[name]

    def _read(self) -> Memory:
        ids = self.document.ids.to(self.model.device).unsqueeze(0)
        with self.progress.stage("reading the document", self.document.length) as advance:
            layers = full_memory_layers(self.model.network, ids, on_chunk=advance, before=self.before)
        return self.memory(layers, "full", Budget(self.document.length, 1.0))

    def _roll_out(self) -> Rollouts:
        kept = self.workspace.load("rollouts")
        if kept is not None:
            return _unpack(*kept, self.model)
        prompts = rollout_prompts(self.settings.rollouts)
        rollouts = collect_rollouts(self.model, self.full, prompts, self.settings, self.progress)
        self.workspace.save("rollouts", *_pack(rollouts))
        return rollouts

    def _collect_passages(self) -> Rollouts:
        kept = self.workspace.load("passages")
        if kept is not None:
            return _unpack(*kept, self.model)
        count = self.settings.passages(self.document.length)
        passages = collect_passages(self.model, self.full, count, self.settings, PASSAGE_SEED, self.progress)
        self.workspace.save("passages", *_pack(passages))
        return passages

    def _replay(self) -> Replay:
        kept = self.workspace.load("replay")
        if kept is not None:
            return _unpack_replay(*kept, self.model)
        settings = self.settings
        replay = replay_document(self.model, self.full, settings.replay_chunk, settings.replay_pool, self.progress)
        self.workspace.save("replay", *_pack_replay(replay))
        return replay

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
        length = self.document.length + (0 if self.before is None else self.before.document_length)
        return Memory(layers, length, info, self.document.ids, before=self.before)


def _pack_pools(pools: list[QueryPool]) -> dict[str, Tensor]:
    return {f"pool.{i}.{name}": getattr(pool, name) for i, pool in enumerate(pools) for name in NAMES}


def _unpack_pools(tensors: dict[str, Tensor], count: int, model: Model) -> list[QueryPool]:
    return [QueryPool(*(tensors[f"pool.{i}.{name}"].to(model.device) for name in NAMES)) for i in range(count)]


def _pack_predictions(predictions: Predictions) -> dict[str, Tensor]:
    return {f"predictions.{name}": tensor for name, tensor in vars(predictions).items()}


def _unpack_predictions(tensors: dict[str, Tensor]) -> Predictions:
    return Predictions(*(tensors[f"predictions.{name}"] for name in ("top_ids", "top_logits", "log_z")))


def _pack_replay(replay: Replay) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"scores.{i}": score for i, score in enumerate(replay.scores)} | _pack_pools(replay.pools)
    return tensors, {"scales": replay.scales}


def _unpack_replay(tensors: dict[str, Tensor], data: dict[str, Any], model: Model) -> Replay:
    count = len(data["scales"])
    scores = [tensors[f"scores.{i}"].to(model.device) for i in range(count)]
    return Replay(scores, _unpack_pools(tensors, count, model), data["scales"])


def _pack(rollouts: Rollouts) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = _pack_predictions(rollouts.predictions)
    tensors |= _pack_pools(rollouts.pools)
    tensors |= {f"max_log_attention.{i}": attention for i, attention in enumerate(rollouts.max_log_attention)}
    return tensors, {"prompts": rollouts.prompts, "answers": rollouts.answers, "scales": rollouts.scales}


def _unpack(tensors: dict[str, Tensor], data: dict[str, Any], model: Model) -> Rollouts:
    count = len(data["scales"])
    maxima = sum(name.startswith("max_log_attention.") for name in tensors)
    return Rollouts(
        prompts=data["prompts"],
        answers=data["answers"],
        predictions=_unpack_predictions(tensors),
        pools=_unpack_pools(tensors, count, model),
        max_log_attention=[tensors[f"max_log_attention.{i}"].to(model.device) for i in range(maxima)],
        scales=data["scales"],
    )
