"""Token sequences with a weight per token, and their padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class TokenSequence:
    """Token ids, and for each how much its prediction counts in the loss: 0 for what is only read."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens that the model reads and is not asked to predict."""
        self.predict(ids, [0.0] * len(ids))

    def predict(self, ids: Sequence[int], weights: Sequence[float]) -> None:
        """Append tokens that the model is to predict, with their weights."""
        if len(ids) != len(weights):
            raise ValueError(f"{len(ids)} tokens with {len(weights)} weights")
        self.ids += ids
        self.weights += weights

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class TokenBatch:
    """B sequences padded on the right to L tokens: ids [B, L] int64, weights [B, L] fp32, 0 for padding.

    Under causal attention, padding on the right changes nothing before it, so no mask is needed.
    """

    ids: Tensor
    weights: Tensor


def pad(sequences: Sequence[TokenSequence], pad_id: int) -> TokenBatch:
    """Sequences as one batch."""
    length = max(map(len, sequences))
    ids = torch.full((len(sequences), length), pad_id)
    weights = torch.zeros(len(sequences), length)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence.ids)
        weights[row, : len(sequence)] = torch.tensor(sequence.weights)
    return TokenBatch(ids, weights)


@dataclass
class Predictions:
    """What a network says about the tokens of a batch that count, in row-major order: P of them.

    logits [P, V]; before, targets [P]: the token before and the token itself; weights [P].
    """

    logits: Tensor
    before: Tensor
    targets: Tensor
    weights: Tensor

    def loss(self) -> Tensor:
        """Cross-entropy in nats, the weighted mean over tokens."""
        losses = torch.nn.functional.cross_entropy(self.logits.float(), self.targets, reduction="none")
        return (losses * self.weights).sum() / self.weights.sum()

    def hits(self) -> Tensor:
        """Where the most likely token is the right one: bool [P]."""
        return self.logits.argmax(-1) == self.targets


def predict(network: PreTrainedModel, batch: TokenBatch) -> Predictions:
    """Run a decoder; logits are computed only for tokens that count."""
    hidden = network.get_decoder()(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    counts = batch.weights[:, 1:] > 0
    logits = network.get_output_embeddings()(hidden[counts])
    return Predictions(logits, batch.ids[:, :-1][counts], batch.ids[:, 1:][counts], batch.weights[:, 1:][counts])
