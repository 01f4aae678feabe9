"""Needles in noise, token by token: what a small model is trained and tested on.

A sequence is noise with needles planted at random places, and questions behind it:

    n n n K V V n n n n K V V n n ... n | ? K V V | ? K V V

A needle is a key (K) with its value (V), from symbols that noise does not use; keys in a sequence differ. A question
repeats a key, and only the value behind it counts in the loss. One needle is RULER's single-key task (any needle will
do), several are its multi-key task (the key has to be compared).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from transformers import PreTrainedModel

from ttmem.errors import TaskError
from ttmem.training.packing import Predictions, TokenBatch, TokenSequence, pad, predict

PAD, ASK, SPECIAL = 0, 1, 2


@dataclass(frozen=True)
class Needles:
    """The symbols there are, in tokens of one id each, and how many make a key and a value.

    Token ids: padding, the question mark, keys, values, noise, in this order.
    """

    key_symbols: int = 64
    value_symbols: int = 64
    noise_symbols: int = 64
    key_tokens: int = 1
    value_tokens: int = 2

    @property
    def vocabulary(self) -> int:
        return SPECIAL + self.key_symbols + self.value_symbols + self.noise_symbols

    def shortest(self, needles: int, asked: int) -> int:
        """Tokens of a sequence without noise."""
        size = self.key_tokens + self.value_tokens
        return needles * size + asked * (1 + size)

    def sequence(self, rng: Generator, length: int, needles: int, asked: int = 1) -> TokenSequence:
        """`length` tokens with so many needles, of which `asked` are asked for.

        Raises TaskError where they do not fit, or where there are not so many keys.
        """
        hay = length - self.shortest(needles, asked)
        if hay < 0 or not 1 <= asked <= needles:
            raise TaskError(
                f"{needles} needles with {asked} questions take {self.shortest(needles, asked)} tokens, and there are "
                f"{length}; at least one needle has to be asked for, and no more than there are."
            )
        if needles > self.key_symbols**self.key_tokens:
            raise TaskError(f"{needles} needles need as many keys; there are {self.key_symbols**self.key_tokens}.")
        keys = self._keys(rng, needles)
        values = SPECIAL + self.key_symbols + rng.integers(0, self.value_symbols, (needles, self.value_tokens))
        noise = SPECIAL + self.key_symbols + self.value_symbols + rng.integers(0, self.noise_symbols, hay)
        places = np.sort(rng.integers(0, hay + 1, needles))
        sequence = TokenSequence()
        before = 0
        for key, value, place in zip(keys.tolist(), values.tolist(), places.tolist(), strict=True):
            sequence.read([*noise[before:place].tolist(), *key, *value])
            before = place
        sequence.read(noise[before:].tolist())
        for needle in rng.permutation(needles)[:asked]:
            sequence.read([ASK, *keys[needle].tolist()])
            sequence.predict(values[needle].tolist(), [1.0] * self.value_tokens)
        return sequence

    def _keys(self, rng: Generator, count: int) -> np.ndarray:
        """Keys, no two alike: [count, key_tokens]."""
        numbers = rng.choice(self.key_symbols**self.key_tokens, count, replace=False)
        digits = [numbers // self.key_symbols**place % self.key_symbols for place in range(self.key_tokens)]
        return SPECIAL + np.stack(digits, axis=1)


def run(network: PreTrainedModel, sequences: list[TokenSequence]) -> Predictions:
    """What the network says about the tokens that count, on its own device."""
    batch = pad(sequences, PAD)
    return predict(network, TokenBatch(batch.ids.to(network.device), batch.weights.to(network.device)))


@torch.no_grad()
def accuracy(
    network: PreTrainedModel, task: Needles, needles: int, length: int, sequences: int, seed: int, batch: int = 16
) -> float:
    """Share of values that greedy decoding gets right altogether, one question behind each sequence.

    The right value is fed in: a value is right altogether just when each of its tokens is right behind the right ones.
    Sequence i is the same for the same seed, length and number of needles, however many there are.
    """
    training = network.training
    network.eval()
    right = []
    for first in range(0, sequences, batch):
        rngs = [np.random.default_rng([seed, needles, length, i]) for i in range(first, min(first + batch, sequences))]
        hits = run(network, [task.sequence(rng, length, needles) for rng in rngs]).hits()
        right.append(hits.view(-1, task.value_tokens).all(1).float())
    network.train(training)
    return torch.cat(right).mean().item()
