"""Budgets, and the settings of Latent Compaction with its three presets."""

from __future__ import annotations

from dataclasses import dataclass

from ttmem.errors import BudgetError

MIN_TOKENS = 4
"""A smaller budget than this per head leaves no room for a sink beside anything else."""


@dataclass(frozen=True)
class Budget:
    """KV pairs per layer and KV head, on average: B. `ratio` is N / B for the document it was made for."""

    tokens: int
    ratio: float

    @classmethod
    def of(cls, document_length: int, ratio: float | None = None, tokens: int | None = None) -> Budget:
        """The budget for a document of N tokens, as a ratio (B = N // ratio) or as a number of tokens.

        A budget of N or more keeps everything. Raises BudgetError for both or neither, and for less than 4 tokens.
        """
        if (ratio is None) == (tokens is None):
            raise BudgetError(f"give a ratio or a number of tokens, one of them (ratio={ratio}, tokens={tokens})")
        if ratio is not None:
            if not 1.0 <= ratio < float("inf"):
                raise BudgetError(f"the ratio is {ratio}; it must be at least 1 (16 keeps one sixteenth)")
            tokens = int(document_length / ratio)
        assert tokens is not None
        if tokens >= document_length:
            return cls(document_length, 1.0)
        if tokens < MIN_TOKENS:
            raise BudgetError(
                f"the budget is {tokens} tokens per head for a document of {document_length}; at least {MIN_TOKENS} "
                f"are needed: use a ratio of at most {max(1.0, document_length // MIN_TOKENS)}, or more tokens"
            )
        return cls(tokens, document_length / tokens)


@dataclass(frozen=True)
class LatentSettings:
    """Every constant of the method. The defaults are the paper's recipe (docs/methods/latent-compaction.md)."""

    rollouts: int = 480
    """Generic prompts answered by the teacher, of the 480 in `prompts.py`."""
    rollout_tokens: int = 24
    """Tokens of an answer at most."""
    top_k: int = 20
    """Teacher tokens kept one by one per answer step; the rest is one tail category."""
    replay_chunk: int = 1024
    """Tokens of the document replayed at once for the reconstruction scores."""
    latent_fraction: float = 0.25
    """Part of the budget that goes to anchors and diversifiers; the rest are preservers."""
    anchor_fraction: float = 0.25
    """Part of those that are anchors."""
    mass_start: bool = False
    """Start the biases of anchors and diversifiers where a head's mass is right on average, instead of at zero (ours).
    Early layers attend to the whole document: a few entries miss most of the mass, and biases of zero take a thousand
    updates to get there."""
    pool: int = 4096
    """Query positions kept for stage 1, evenly thinned."""
    fit_updates: int = 1000
    fit_lr: float = 3e-3
    fit_positions: int = 128
    """Query positions sampled per stage-1 update."""
    distill_updates: int = 1000
    distill_lr: float = 1e-4
    distill_batch: int = 4
    """Rollouts per stage-2 update."""
    clip: float = 1.0
    """Stage-2 gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        """Raise BudgetError for a value outside its range, before any computing."""
        for name in ("rollouts", "rollout_tokens", "top_k", "replay_chunk", "pool", "fit_positions", "distill_batch"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("fit_updates", "distill_updates"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("fit_lr", "distill_lr", "clip"):
            self._require(name, getattr(self, name) > 0, "above 0")
        for name in ("latent_fraction", "anchor_fraction"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        self._require("rollouts", self.rollouts <= 480, "at most 480")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise BudgetError(f"the setting {name} is {getattr(self, name)}; it must be {wanted}")

    def latents(self, budget: Budget) -> int:
        """Anchors and diversifiers per head: M = B/4 by default, at least one."""
        return max(1, int(budget.tokens * self.latent_fraction))

    def anchors(self, budget: Budget) -> int:
        """Anchors per head: M/4 by default, at least the first position."""
        return max(1, int(self.latents(budget) * self.anchor_fraction))


PRESETS = {
    "quick": LatentSettings(rollouts=48, mass_start=True, fit_updates=400, distill_updates=40),
    "balanced": LatentSettings(rollouts=120, mass_start=True, fit_updates=1000, distill_updates=200),
    "paper": LatentSettings(),
}


def preset_settings(name: str) -> LatentSettings:
    """The settings of a preset. Raises BudgetError for an unknown name."""
    if name not in PRESETS:
        raise BudgetError(f"the preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
