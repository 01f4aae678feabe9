"""Packing: what counts in the loss is what was to be predicted, and padding changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem.training.packing import TokenSequence, pad, predict


def example_sequences() -> list[TokenSequence]:
    first, second = TokenSequence(), TokenSequence()
    first.read([5, 9, 14])
    first.predict([7, 8], [1.0, 0.5])
    first.read([3])
    first.predict([21], [2.0])
    second.read([30, 31])
    second.predict([32], [1.0])
    return [first, second]


def test_sequences_are_padded_on_the_right() -> None:
    batch = pad(example_sequences(), pad_id=99)
    assert batch.ids.tolist() == [[5, 9, 14, 7, 8, 3, 21], [30, 31, 32, 99, 99, 99, 99]]
    assert batch.weights.tolist() == [[0, 0, 0, 1, 0.5, 0, 2], [0, 0, 1, 0, 0, 0, 0]]


def test_tokens_and_weights_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 weights"):
        TokenSequence().predict([1, 2], [1.0])


def test_loss_is_the_weighted_mean_of_each_sequence_read_alone(make_network: Any) -> None:
    network = make_network()
    sequences = example_sequences()
    predictions = predict(network, pad(sequences, pad_id=0))
    total = weight = 0.0
    hits = []
    for sequence in sequences:
        logits = network(torch.tensor([sequence.ids])).logits[0]
        for i, w in enumerate(sequence.weights):
            if w:
                total -= w * logits[i - 1].log_softmax(-1)[sequence.ids[i]].item()
                weight += w
                hits.append(logits[i - 1].argmax().item() == sequence.ids[i])
    assert predictions.loss().item() == pytest.approx(total / weight, rel=1e-5)
    assert predictions.hits().tolist() == hits
    assert predictions.targets.tolist() == [7, 8, 21, 32]
    assert predictions.before.tolist() == [14, 7, 3, 31]
