"""A memory used wrongly says so: other attention, other shapes, inputs without the document's mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Memory, MemoryMismatchError, Model
from ttmem.models.layers import cache_keyword

QUESTION = torch.tensor([[40, 77, 12, 26, 9]])


@pytest.fixture(scope="module")
def full(any_model: Model, make_full: Any) -> Memory:
    memory: Memory = make_full(any_model)
    return memory


@torch.no_grad()
def run(network: Any, memory: Memory, ids: torch.Tensor = QUESTION) -> None:
    network(**memory.inputs(ids), **{cache_keyword(network): memory.cache()})


def test_eager_attention_is_refused_with_the_remedy(any_model: Model, full: Memory, make_network: Any) -> None:
    network = make_network(any_model.name.split()[-1])
    run(network, full)
    network.set_attn_implementation("eager")
    with pytest.raises(MemoryMismatchError, match=r"set_attn_implementation\('sdpa'\)"):
        run(network, full)
    with pytest.raises(MemoryMismatchError, match="'sdpa'"):
        network.generate(**full.inputs(QUESTION), **{cache_keyword(network): full.cache()}, max_new_tokens=2)


@pytest.mark.parametrize(
    "changes", [{"num_key_value_heads": 1}, {"head_dim": 32}, {"num_attention_heads": 3, "num_key_value_heads": 3}]
)
def test_another_shape_is_refused(model: Model, make_full: Any, make_network: Any, changes: dict[str, int]) -> None:
    with pytest.raises(MemoryMismatchError, match="made for another model"):
        run(make_network("llama", **changes), make_full(model))


def test_a_model_with_more_layers_is_refused(model: Model, make_full: Any, make_network: Any) -> None:
    with pytest.raises(MemoryMismatchError):
        run(make_network("llama", num_hidden_layers=4), make_full(model))


def test_a_bare_question_in_generate_is_refused_with_the_remedy(any_model: Model, full: Memory) -> None:
    for extra in ({}, {"attention_mask": torch.ones_like(QUESTION)}):
        options = {cache_keyword(any_model.network): full.cache(), "max_new_tokens": 2, **extra}
        with pytest.raises(MemoryMismatchError, match=r"memory\.inputs"):
            any_model.network.generate(QUESTION, **options)


def test_removing_the_document_is_refused(model: Model, make_full: Any) -> None:
    cache = make_full(model).cache()
    with pytest.raises(MemoryMismatchError, match="cannot remove 1 tokens: 0 follow the document"):
        cache.crop(-1)
