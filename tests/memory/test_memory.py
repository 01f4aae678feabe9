"""`Memory`: inputs for generate, conversions, and the check that it belongs to a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from ttmem import Memory, MemoryMismatchError, Model

QUESTION = [5, 7, 11]


@pytest.fixture(scope="module")
def full(model: Model, make_full: Any) -> Memory:
    memory: Memory = make_full(model)
    return memory


@pytest.mark.parametrize("ids", [torch.tensor(QUESTION), torch.tensor([QUESTION]), torch.tensor([QUESTION] * 3)])
def test_inputs_put_a_mask_of_the_document_before_the_question(full: Memory, ids: torch.Tensor) -> None:
    inputs = full.inputs(ids)
    batch = 1 if ids.dim() == 1 else ids.shape[0]
    assert inputs["input_ids"].shape == (batch, 3)
    assert inputs["attention_mask"].shape == (batch, full.document_length + 3)
    assert inputs["attention_mask"].all()


def test_inputs_keep_the_padding_of_the_question(full: Memory) -> None:
    ids, mask = torch.tensor([[0, 5], [5, 7]]), torch.tensor([[0, 1], [1, 1]])
    expected = torch.cat([torch.ones(2, full.document_length, dtype=torch.long), mask], dim=1)
    encoded = {"input_ids": ids, "attention_mask": mask}
    for inputs in (full.inputs(ids, mask), full.inputs(encoded), full.inputs(BatchEncoding(encoded))):
        assert torch.equal(inputs["attention_mask"], expected)
        assert torch.equal(inputs["input_ids"], ids)


def test_inputs_cover_what_a_cache_already_holds(full: Memory, model: Model) -> None:
    cache = full.cache()
    model.forward(torch.tensor([QUESTION]), cache)
    inputs = full.inputs(torch.tensor([9, 8]), cache=cache)
    assert inputs["attention_mask"].shape == (1, full.document_length + 3 + 2)


def test_figures_of_a_memory(full: Memory, gemma: Model, make_full: Any) -> None:
    assert full.entries == 3 * 2 * full.document_length
    assert full.dtype == torch.float32
    assert full.compacted == full.layers
    mixed = make_full(gemma)
    assert len(mixed.compacted) == 2
    assert mixed.entries == 2 * 2 * mixed.document_length


def test_converting_a_memory(full: Memory) -> None:
    half = full.to(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert full.dtype == torch.float32
    assert half.info is full.info
    assert half.tokens is full.tokens
    assert all(layer.biases.dtype == torch.float32 for layer in half.compacted)


def test_a_memory_knows_its_model(full: Memory, model: Model, tokenizer: Any, make_network: Any) -> None:
    full.check_model(model)
    full.check_model(Model(make_network("llama"), tokenizer, name="the same weights under another name"))
    full.check_model(Model(make_network("llama").bfloat16(), tokenizer))


@pytest.mark.parametrize("other", ["qwen2", "other weights"])
def test_another_model_is_refused_by_name(full: Memory, tokenizer: Any, make_network: Any, other: str) -> None:
    network = make_network("llama", seed=1) if other == "other weights" else make_network(other)
    with pytest.raises(MemoryMismatchError, match=r"made with tiny llama.*LlamaForCausalLM.*not with the other one"):
        full.check_model(Model(network, tokenizer, name="the other one"))


def test_another_tokenizer_is_refused(full: Memory, make_network: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["ferry"])
    with pytest.raises(MemoryMismatchError, match="another tokenizer"):
        full.check_model(Model(make_network("llama"), tokenizer))


def test_what_the_memory_records(full: Memory, model: Model) -> None:
    info = copy.deepcopy(full.info)
    assert info.method == "full"
    assert info.model == model.identity()
    assert info.document["tokens"] == full.document_length
    assert info.budget == {"tokens": full.document_length, "ratio": 1.0}
    assert set(info.versions) == {"python", "ttmem", "torch", "transformers", "safetensors"}


def test_inputs_hide_the_padding_of_an_earlier_turn(full: Memory, model: Model) -> None:
    first = torch.tensor([[0, 5], [5, 7]])
    first_mask = torch.tensor([[0, 1], [1, 1]])
    cache = full.cache()
    with torch.no_grad():
        model.forward(first, cache, attention_mask=full.inputs(first, first_mask)["attention_mask"])
    ids = torch.tensor([[3], [4]])
    whole = torch.cat([first_mask, torch.ones_like(ids)], dim=1)
    mask = full.inputs(ids, whole, cache)["attention_mask"]
    assert torch.equal(mask[:, full.document_length :], whole)
    with pytest.raises(MemoryMismatchError, match="4 tokens, but only 3"):
        full.inputs(ids, torch.ones(2, 4, dtype=torch.long), cache)
