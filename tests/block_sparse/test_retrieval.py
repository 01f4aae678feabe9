"""Needles, and training on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem.block_sparse import KINDS, BlockSparseForCausalLM
from ttmem.block_sparse.objectives import RetrievalObjective
from ttmem.block_sparse.recipes import RECIPES
from ttmem.block_sparse.retrieval import ASK, SPECIAL, Needles, accuracy
from ttmem.block_sparse.start import OFFSETS, look_back
from ttmem.errors import TaskError
from ttmem.training.loop import TrainSettings, train

Make = Callable[..., BlockSparseForCausalLM]
SMALL = Needles(key_symbols=8, value_symbols=8, noise_symbols=8, value_tokens=1)


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(0, 40), st.integers(1, 2), st.integers(1, 3), st.integers(0, 99)
)
def test_sequences(needles: int, asked: int, hay: int, key_tokens: int, value_tokens: int, seed: int) -> None:
    asked = min(asked, needles)
    task = Needles(8, 8, 8, key_tokens, value_tokens)
    length = task.shortest(needles, asked) + hay
    sequence = task.sequence(np.random.default_rng(seed), length, needles, asked)
    assert len(sequence) == length
    assert max(sequence.ids) < task.vocabulary
    end = length - asked * (1 + key_tokens + value_tokens)
    document, questions = sequence.ids[:end], sequence.ids[end:]
    assert not any(sequence.weights[:end])
    keys_begin = [i for i, token in enumerate(document) if SPECIAL <= token < SPECIAL + 8]
    book = {
        tuple(document[i : i + key_tokens]): tuple(document[i + key_tokens : i + key_tokens + value_tokens])
        for i in keys_begin[::key_tokens]
    }
    assert len(book) == needles
    assert sum(token >= SPECIAL + 16 for token in document) == hay
    seen = set()
    for q in range(asked):
        one = questions[q * (1 + key_tokens + value_tokens) :][: 1 + key_tokens + value_tokens]
        weights = sequence.weights[end + q * len(one) :][: len(one)]
        key = tuple(one[1 : 1 + key_tokens])
        assert one[0] == ASK
        assert book[key] == tuple(one[1 + key_tokens :])
        assert weights == [0.0] * (1 + key_tokens) + [1.0] * value_tokens
        seen.add(key)
    assert len(seen) == asked


def test_refused_sequences() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(TaskError, match="take 5 tokens, and there are 4"):
        SMALL.sequence(rng, 4, 1)
    with pytest.raises(TaskError, match="at least one needle"):
        SMALL.sequence(rng, 40, 1, 2)
    with pytest.raises(TaskError, match="as many keys; there are 8"):
        SMALL.sequence(rng, 60, 9)


class Knowing(torch.nn.Module):
    """Looks the key up in the sequence: what accuracy must find perfect, or perfectly wrong."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.shift, self.device = shift, torch.device("cpu")

    def get_decoder(self) -> Callable[..., Any]:
        def decode(input_ids: torch.Tensor, use_cache: bool) -> Any:
            logits = torch.zeros(*input_ids.shape, SMALL.vocabulary)
            for row, ids in enumerate(input_ids.tolist()):
                for place in range(1, len(ids)):
                    if ids[place - 1] == ASK:
                        value = ids[ids.index(ids[place]) + 1]
                        logits[row, place, SPECIAL + 8 + (value - SPECIAL - 8 + self.shift) % 8] = 1.0
            return type("Outputs", (), {"last_hidden_state": logits})

        return decode

    def get_output_embeddings(self) -> Callable[..., Any]:
        return lambda hidden: hidden


def test_accuracy() -> None:
    assert accuracy(Knowing(), SMALL, 4, 40, 20, seed=0, batch=8) == 1.0  # type: ignore[arg-type]
    assert accuracy(Knowing(1), SMALL, 4, 40, 20, seed=0, batch=8) == 0.0  # type: ignore[arg-type]


def test_batches_do_not_depend_on_what_came_before(make_lm: Make) -> None:
    def losses(steps: list[int]) -> list[float]:
        objective = RetrievalObjective(make_lm(), SMALL, 64, 2, seed=5, shortest=48, needles=(1, 4), asked=4)
        return [objective.loss(step).item() for step in steps]

    assert losses([3, 4]) == [losses([3])[0], losses([4])[0]]
    assert losses([3]) != losses([4])
    with pytest.raises(TaskError, match="must hold 20"):
        RetrievalObjective(make_lm(), SMALL, 64, 2, seed=5, shortest=10, needles=(4,), asked=4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_compressor_learns_in_place(kind: str, make_lm: Make) -> None:
    """The loss of a fixed small set falls, and every parameter of the compressor moves."""
    lm = make_lm(compressor=kind, initializer_range=0.1).train()
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    objective = RetrievalObjective(lm, SMALL, 40, 4, seed=0, needles=(3,), asked=3)
    first = objective.loss  # the same batch at every step
    objective.loss = lambda step: first(0)  # type: ignore[method-assign]
    train(dict(lm.named_parameters()), objective, TrainSettings(steps=25, lr=1e-2, schedule="constant"))
    assert objective.losses[-1] < 0.6 * objective.losses[0]
    still = [name for name, p in lm.named_parameters() if "compressor" in name and torch.equal(p, before[name])]
    assert not still


def test_the_first_layer_looks_back() -> None:
    recipe = RECIPES["cpu"]
    torch.manual_seed(0)
    from ttmem.block_sparse import BlockSparseConfig

    lm = BlockSparseForCausalLM(BlockSparseConfig(**{**recipe.model, "attention": "full"}))
    look_back(lm)
    layer = lm.model.layers[0]
    attention = layer.self_attn
    x = layer.input_layernorm(lm.model.embed_tokens(torch.randint(2, 194, (1, 24))))
    query, keys = (attention._rotate(attention._heads(p(x)), None, 24) for p in (attention.q_proj, attention.k_proj))
    weights = (query.unflatten(1, (2, 2)) @ keys.unsqueeze(2).mT / 4).flatten(1, 2)[0]
    weights = weights.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf).softmax(-1)
    for head in range(4):
        offset = OFFSETS[head % len(OFFSETS)]
        assert weights[head].diagonal(-offset)[8:].mean() > 0.6, offset
