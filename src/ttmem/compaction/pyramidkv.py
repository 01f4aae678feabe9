"""PyramidKV: SnapKV's scores, with more entries in early layers than in late ones (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction

from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.compaction.snapkv import keep_highest, window_scores
from ttmem.memory import Memory


@dataclass
class PyramidKV:
    """(document, budget) -> Memory: L*H*B entries, a layer's share falling linearly from the first layer to the last.

    beta: how much steeper than flat; the last layer gets (B - window) / beta entries beside the window. window and
    kernel as in `SnapKV`.
    """

    beta: int = 20
    window: int = 32
    kernel: int = 5
    name = "pyramidkv"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Keep L*H*B entries of the prepared document, the same number in every head of a layer."""
        scores = window_scores(prepared, self.window, self.kernel)
        counts = pyramid(len(scores), budget.tokens, prepared.document.length, self.window, self.beta)
        layers = keep_highest(prepared.full, scores, counts)
        return prepared.memory(layers, self.name, budget, asdict(self))


def pyramid(layers: int, tokens: int, length: int, window: int, beta: int) -> list[int]:
    """Entries per head in each of L layers, `window` included, summing to L * tokens exactly.

    Beside the window, the last layer gets m = (tokens - window) / beta and the first 2 (tokens - window) - m. Where the
    document of `length` tokens has fewer, the first gets all and the last the rest of the pair. The fractions are
    rounded down, and what is missing goes to the layers with the largest remainders, earlier ones first. A budget that
    only the window fits is spread evenly.
    """
    average = tokens - window
    if average <= 0 or layers == 1:
        return [tokens] * layers
    last = Fraction(average, beta)
    first = 2 * average - last
    if first > length - window:
        first = Fraction(length - window)
        last = 2 * average - first
    exact = [first - (first - last) * index / (layers - 1) for index in range(layers)]
    counts = [int(share) for share in exact]
    missing = layers * average - sum(counts)
    by_remainder = sorted(range(layers), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[:missing]:
        counts[index] += 1
    return [window + count for count in counts]
