"""Budgets, and the settings of Latent Compaction with its presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ttmem.errors import BudgetError

MIN_TOKENS = 4
"""A smaller budget than this per head leaves no room for a sink beside anything else."""


INITIALIZERS = ("mixed", "random")
MERGINGS = ("normalizer", "equal")


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
    """Every constant of the method. The defaults are the paper's recipe (docs/methods/latent-compaction.md).

    What is marked (ours) is not in the paper, and off by default; what is marked (ablation) is there to be taken away.
    """

    rollouts: int = 480
    """Generic prompts answered by the teacher, of the 480 in `prompts.py`."""
    rollout_tokens: int = 24
    """Tokens of an answer at most."""
    top_k: int = 20
    """Teacher tokens kept one by one per answer step; the rest is one tail category."""
    replay_chunk: int = 1024
    """Tokens of the document replayed at once for the reconstruction scores."""
    replay_pool: int = 4096
    """Query positions of the replay that are kept, evenly thinned."""
    passage_rounds: int = 0
    """Times the document is gone through in passages, each asked for by words before it or in it; the closed form fits
    their queries, stage 2 what the teacher predicts along them (ours)."""
    passage_tokens: int = 64
    """Tokens of a passage."""
    initializer: str = "mixed"
    """What takes the latent slots: "mixed" (anchors and diversifiers), or "random" document positions (ablation)."""
    latent_fraction: float = 0.25
    """Part of the budget that goes to anchors and diversifiers; the rest are preservers."""
    anchor_fraction: float = 0.25
    """Part of those that are anchors."""
    preserver_floor: float = 0.0
    """Part of the preservers that is dealt out evenly, a head's best each, before the ranking of all (ours)."""
    biases: bool = True
    """Whether entries have biases; without, they stay zero (ablation)."""
    merging: str = "normalizer"
    """How memory and new tokens are weighed: by "normalizer" (paper eq. 5), or "equal" at inference (ablation)."""

    closed_form: bool = False
    """Start from biases and values in closed form on generic and replayed queries, for all entries (ours)."""
    closed_bound: float = 6.0
    """Biases of the closed form lie within +- this."""
    closed_ridge: float = 0.1
    """How strongly values of the closed form are held at their originals, relative to the mean curvature."""
    mass_start: bool = False
    """Start the biases of anchors and diversifiers where a head's mass is right on average, instead of at zero (ours).
    Early layers attend to the whole document: a few entries miss most of the mass, and biases of zero take a thousand
    updates to get there."""
    pool: int = 4096
    """Query positions of the rollouts kept for stage 1, evenly thinned."""
    choose_split: bool = False
    """Try several latent fractions and preserver floors in closed form, and keep what is closest to the full context on
    held-out prompts and passages, instead of the two settings (ours)."""
    fit_replay: bool = False
    """Whether stage 1 fits the replay's queries beside those of the rollouts (ours)."""
    fit_updates: int = 1000
    fit_lr: float = 3e-3
    fit_positions: int = 128
    """Query positions sampled per stage-1 update."""
    fit_preservers: bool = False
    """Whether preservers train in stage 1 too (ablation)."""
    log_z_weight: float = 1.0
    """Weight of the log-normalizer's loss in stage 1 (0: ablation)."""

    distill_updates: int = 1000
    distill_lr: float = 1e-4
    relative_rate: bool = False
    """Whether the stage-2 rate of a layer's keys and of its values is in units of their root mean square (ours)."""
    distill_batch: int = 4
    """Rollouts per stage-2 update."""
    distill_passages: int = 0
    """Passages of the document per stage-2 update (ours)."""
    trial_updates: int = 0
    """Updates of a trial run: above 0, the rate is the best of `distill_lr` and parts of it, on held-out prompts and
    passages, and training that brings the memory no closer is undone (ours)."""
    lm_weight: float = 1.0
    """Weight of the cross-entropy of the teacher's tokens beside the KL divergence (0: ablation)."""
    full_vocabulary: bool = False
    """KL over the whole vocabulary instead of the top tokens and a tail; the teacher runs again (ablation)."""
    decay: bool = False
    """Warm the stage-2 rate up over a tenth of the updates, then let it fall linearly to zero (ours)."""
    clip: float = 1.0
    """Stage-2 gradients are clipped to this norm."""

    def __post_init__(self) -> None:
        """Raise BudgetError for a value outside its range, before any computing."""
        counts = ("rollouts", "rollout_tokens", "top_k", "replay_chunk", "replay_pool", "pool", "fit_positions")
        for name in (*counts, "passage_tokens"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        passages, updates = ("passage_rounds", "distill_passages"), ("fit_updates", "distill_updates", "trial_updates")
        for name in (*passages, *updates, "distill_batch", "log_z_weight", "lm_weight"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("fit_lr", "distill_lr", "clip", "closed_bound", "closed_ridge"):
            self._require(name, getattr(self, name) > 0, "above 0")
        for name in ("latent_fraction", "anchor_fraction", "preserver_floor"):
            self._require(name, 0 <= getattr(self, name) <= 1, "between 0 and 1")
        for name, known in (("initializer", INITIALIZERS), ("merging", MERGINGS)):
            self._require(name, getattr(self, name) in known, f"one of {', '.join(known)}")
        self._require("rollouts", self.rollouts <= 480, "at most 480")
        batch = self.distill_batch + self.distill_passages
        self._require("distill_batch", batch >= 1, "at least 1 without distill_passages")
        learned = self.passage_rounds > 0 or self.distill_passages == 0
        self._require("distill_passages", learned, "0 without passage_rounds")
        self._require("choose_split", self.closed_form or not self.choose_split, "off without closed_form")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise BudgetError(f"the setting {name} is {getattr(self, name)}; it must be {wanted}")

    def passages(self, document_length: int) -> int:
        """Passages of a document: all of every round."""
        return self.passage_rounds * -(-document_length // self.passage_tokens)

    def latents(self, budget: Budget) -> int:
        """Anchors and diversifiers per head: M = B/4 by default, at least one."""
        return max(1, int(budget.tokens * self.latent_fraction))

    def anchors(self, budget: Budget) -> int:
        """Anchors per head: M/4 by default, at least the first position."""
        return max(1, int(self.latents(budget) * self.anchor_fraction))


_QUICK = LatentSettings(
    rollouts=48,
    pool=1024,
    replay_pool=1024,
    passage_rounds=1,
    closed_form=True,
    fit_updates=0,
    distill_updates=0,
)
_BALANCED = replace(
    _QUICK,
    passage_rounds=2,
    choose_split=True,
    distill_updates=60,
    distill_lr=0.05,
    relative_rate=True,
    distill_passages=4,
    trial_updates=6,
    lm_weight=0.0,
    decay=True,
)
PRESETS = {
    "quick": _QUICK,
    "balanced": _BALANCED,
    "thorough": replace(_BALANCED, passage_rounds=8, distill_updates=300, distill_batch=2, distill_passages=8),
    "paper": LatentSettings(),
}
"""From the cheapest on: no training at all; training that is chosen per document; more of it; the paper's recipe."""


def preset_settings(name: str) -> LatentSettings:
    """The settings of a preset. Raises BudgetError for an unknown name."""
    if name not in PRESETS:
        raise BudgetError(f"the preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
