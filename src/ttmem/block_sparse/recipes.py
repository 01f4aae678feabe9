"""Model and training by name: the reference of the paper, and a size that a CPU trains in minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ttmem.block_sparse.retrieval import PAD, Needles
from ttmem.training.loop import TrainSettings


@dataclass(frozen=True)
class Recipe:
    """model: what differs from `BlockSparseConfig`'s defaults. length: training context; batch: sequences per step.

    shortest: of the retrieval task's training sequences (see `RetrievalObjective`), none for all of `length`.
    look_back: whether the model starts with a first layer that looks at the tokens just before (see `start`).
    """

    model: dict[str, Any]
    training: TrainSettings
    length: int
    batch: int
    shortest: int | None = None
    look_back: bool = False
    task: Needles = field(default_factory=Needles)


RECIPES: dict[str, Recipe] = {
    # The paper says the model's shape, data, steps, batch and AdamW at 3e-4. Schedule, warmup and decay are ours.
    "345m": Recipe(
        model={},
        training=TrainSettings(
            steps=30_000, lr=3e-4, weight_decay=0.1, schedule="cosine", warmup=1000, checkpoint_every=500
        ),
        length=8192,
        batch=128,
    ),
    "cpu": Recipe(
        model={
            "vocab_size": Needles().vocabulary,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "chunk_size": 8,  # below the head's width, so that a regression over a chunk is underdetermined
            "chunks_per_query": 4,
            "window": 16,
            "query_rank": 16,
            "initializer_range": 0.08,
            "pad_token_id": PAD,
        },
        training=TrainSettings(steps=3000, optimizer="muon", lr=0.01, weight_decay=0.01, schedule="wsd", warmup=50),
        length=128,
        batch=16,
        shortest=60,
        look_back=True,
    ),
}
