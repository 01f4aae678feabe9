"""The next token of a sequence: the most likely one, or drawn with the request's own generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GREEDY_BELOW = 1e-4
"""Temperatures below this are greedy: dividing by them would overflow."""

NUCLEUS_FIRST = 256
"""The nucleus is looked for among so many tokens first; sorting a whole vocabulary takes milliseconds."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with that mass; seed None draws one."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


class Sampler:
    """Draws of one sequence. One uniform number per token from its own generator, so that what others draw, and in
    which order, changes nothing."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator()
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def draw(self, logits: Tensor) -> int:
        """A token for logits [V], by inversion of the (truncated) distribution."""
        scaled = (logits.cpu() - logits.max().cpu()) / self.sampling.temperature
        probabilities = scaled.softmax(dim=-1)
        uniform = torch.rand((), generator=self.generator, dtype=torch.float64)
        if self.sampling.top_p >= 1.0:
            return _invert(probabilities, uniform)
        masses, tokens = nucleus(probabilities, self.sampling.top_p)
        return int(tokens[_invert(masses, uniform)])


def nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely tokens with at least `top_p` of the mass, one at least: probabilities and ids."""
    for count in (min(NUCLEUS_FIRST, probabilities.shape[0]), probabilities.shape[0]):
        masses, tokens = probabilities.topk(count)
        before = masses.cumsum(0) - masses
        kept = max(1, int((before < top_p).sum()))
        if kept < count:
            break
    return masses[:kept], tokens[:kept]


def _invert(masses: Tensor, uniform: Tensor) -> int:
    sums = masses.double().cumsum(0)
    return int(torch.searchsorted(sums, uniform * sums[-1], right=True).clamp_(max=masses.shape[0] - 1))


def choose(logits: Tensor, samplers: list[Sampler]) -> list[int | None]:
    """One token per row of logits [B, V]; None where they are not numbers (a memory with absurd entries)."""
    best = logits.argmax(dim=-1).tolist()
    sound = torch.isfinite(logits.amax(dim=-1)).tolist()  # the maximum of a row with a NaN is NaN
    return [
        None if not sound[i] else best[i] if sampler.sampling.greedy else sampler.draw(logits[i])
        for i, sampler in enumerate(samplers)
    ]
