"""Haystacks of prose, and sentences planted in them."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain

from ttmem.tasks.corpora import essays, long_essays


@dataclass(frozen=True)
class Prose:
    """Sentences without end: behind the last one the first follows again.

    pieces: the sentences, each led by what separates it from the one before, a space or a blank line.
    words_before: words before each sentence, and behind the last one.
    """

    sentences: tuple[str, ...]
    pieces: tuple[str, ...]
    words_before: tuple[int, ...]

    def first_pieces(self, count: int) -> list[str]:
        """The first `count` sentences with their separators: their concatenation is text in paragraphs."""
        rounds, rest = divmod(count, len(self.pieces))
        return [*self.pieces * rounds, *self.pieces[:rest]]

    def first_words(self, count: int) -> list[str]:
        """The sentences that hold the first `count` words, the last of them cut where these end."""
        rounds, rest = divmod(count, self.words_before[-1])
        whole = bisect_left(self.words_before, rest)
        sentences = [*self.sentences * rounds, *self.sentences[:whole]]
        if whole and (surplus := self.words_before[whole] - rest):
            sentences[-1] = " ".join(sentences[-1].split(" ")[:-surplus])
        return sentences


def essay_prose(number: int) -> Prose:
    """The essays in a round that begins with the `number`-th long one: every document its own beginning."""
    first = long_essays()[number % len(long_essays())]
    parts = [*_essay_parts()[first:], *_essay_parts()[:first]]
    return Prose(
        sentences=tuple(chain.from_iterable(sentences for sentences, _, _ in parts)),
        pieces=tuple(chain.from_iterable(pieces for _, pieces, _ in parts)),
        words_before=(0, *accumulate(chain.from_iterable(words for _, _, words in parts))),
    )


@cache
def _essay_parts() -> tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]], ...]:
    """Of every essay: its sentences, its pieces, and the words of each sentence."""
    parts = []
    for essay in essays():
        sentences = tuple(chain.from_iterable(essay))
        pieces = tuple(("\n\n" if i == 0 else " ") + paragraph[i] for paragraph in essay for i in range(len(paragraph)))
        parts.append((sentences, pieces, tuple(len(sentence.split(" ")) for sentence in sentences)))
    return tuple(parts)


def plant(sentences: Sequence[str], needles: Sequence[str], gaps: Sequence[int]) -> list[str]:
    """Sentences with `needles[i]` before sentence `gaps[i]`; gaps, in 0..len(sentences), come in rising order."""
    planted: list[str] = []
    start = 0
    for needle, gap in zip(needles, gaps, strict=True):
        planted += [*sentences[start:gap], needle]
        start = gap
    return [*planted, *sentences[start:]]


def spread_depths(rng: random.Random, count: int) -> list[float]:
    """One random depth in each of `count` equal parts of [0, 1), in rising order."""
    return [(part + rng.random()) / count for part in range(count)]
