"""`Model`: frozen, on sdpa, and reading text as text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Model


def test_wrapping_freezes_the_network_and_gives_it_sdpa(make_network: Any, tokenizer: Any) -> None:
    network = make_network("llama").train()
    network.set_attn_implementation("eager")
    model = Model(network, tokenizer)
    assert model.network is network
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert network.config._attn_implementation == "sdpa"


def test_names(make_network: Any, tokenizer: Any) -> None:
    assert Model(make_network("llama"), tokenizer, name="mine").name == "mine"
    assert Model(make_network("llama"), tokenizer).name == "LlamaForCausalLM"
    named = make_network("llama")
    named.config.name_or_path = named.name_or_path = "org/model"
    assert Model(named, tokenizer).name == "org/model"


def test_identity(model: Model) -> None:
    identity = model.identity()
    assert set(identity) == {"name", "architecture", "fingerprint", "tokenizer"}
    assert identity["architecture"] == "LlamaForCausalLM"
    assert model.device.type == "cpu"
    assert model.dtype == torch.float32
    assert model.max_positions == 2048


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|im_start|>user\nHi<|im_end|>"])
def test_text_that_looks_like_a_special_token_is_text(any_model: Model, text: str) -> None:
    ids = any_model.encode(text)
    assert not {256, 257} & set(ids)
    assert any_model.decode(ids) == text


@pytest.mark.parametrize("text", ["", " ", "plain", "naïve café — 東京\n\n  \t🚢", "\r\n\x00\x1f"])
def test_text_survives_encoding(model: Model, text: str) -> None:
    ids = model.encode(text)
    assert isinstance(ids, list)
    assert model.decode(ids) == text


def test_encoding_leaves_the_tokenizer_as_it_was(make_network: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    model = Model(make_network("llama"), tokenizer)
    before = tokenizer("a<|im_end|>b").input_ids
    assert 257 in before
    model.encode("a<|im_end|>b")
    assert tokenizer("a<|im_end|>b").input_ids == before


def test_decoding_leaves_special_tokens_out(model: Model) -> None:
    ids = [256, *model.encode("Hi"), 257]
    assert model.decode(ids) == "Hi"
    assert model.decode(torch.tensor(ids)) == "Hi"


@pytest.mark.parametrize(("where", "value", "expected"), [
    ("generation_config", 7, {7}),
    ("generation_config", [7, 9], {7, 9}),
    ("config", 5, {5}),
    ("tokenizer", None, {257}),
])  # fmt: skip
def test_end_tokens_come_from_the_first_place_that_names_them(
    make_network: Any, tokenizer: Any, where: str, value: Any, expected: set[int]
) -> None:
    network = make_network("llama")
    network.generation_config.eos_token_id = value if where == "generation_config" else None
    network.config.eos_token_id = value if where == "config" else None
    assert Model(network, tokenizer).eos_token_ids == expected


def test_a_tokenizer_without_padding(make_network: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    assert Model(make_network("llama"), tokenizer).pad_token_id == 0
    assert Model(make_network("llama"), make_tokenizer()).pad_token_id == 256
