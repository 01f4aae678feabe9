"""Knowing a model and a tokenizer again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem.models.fingerprint import fingerprint_model, hash_tokenizer

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_same_weights_have_one_fingerprint_in_every_precision(make_network: Any, architecture: str) -> None:
    network = make_network(architecture)
    fingerprint = fingerprint_model(network)
    assert len(fingerprint) == 64
    assert fingerprint_model(make_network(architecture)) == fingerprint
    assert fingerprint_model(network.bfloat16()) == fingerprint
    assert fingerprint_model(network.float()) == fingerprint


def test_the_way_it_runs_does_not_count(make_network: Any) -> None:
    network = make_network("llama")
    fingerprint = fingerprint_model(network)
    network.set_attn_implementation("eager")
    network.train().requires_grad_(False)
    network.generation_config.temperature = 0.1
    assert fingerprint_model(network) == fingerprint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("changed", ["another seed", "one layer", "one norm", "rope theta"])
def test_a_change_that_matters_changes_it(make_network: Any, architecture: str, changed: str) -> None:
    fingerprint = fingerprint_model(make_network(architecture))
    if changed == "another seed":
        network = make_network(architecture, seed=1)
    elif changed == "rope theta":
        network = make_network(architecture)
        theta = {"rope_type": "default", "rope_theta": 12345.0}
        parameters = theta if architecture != "gemma3" else {"full_attention": theta, "sliding_attention": theta}
        network.config.rope_parameters = parameters
    else:
        network = make_network(architecture)
        part = "mlp.down_proj" if changed == "one layer" else "input_layernorm"
        with torch.no_grad():
            network.get_submodule(f"model.layers.1.{part}").weight.mul_(1.05).add_(0.01)
    assert fingerprint_model(network) != fingerprint


@pytest.mark.parametrize("changes", [{"num_attention_heads": 4}, {"num_key_value_heads": 3}, {"num_hidden_layers": 2}])
def test_another_shape_changes_it(make_network: Any, changes: dict[str, int]) -> None:
    assert fingerprint_model(make_network("llama", **changes)) != fingerprint_model(make_network("llama"))


def test_the_window_counts(make_network: Any) -> None:
    assert fingerprint_model(make_network("gemma3", sliding_window=8)) != fingerprint_model(make_network("gemma3"))


def test_a_fine_tuned_large_weight_is_noticed_although_it_is_sampled(make_network: Any) -> None:
    network = make_network("llama", intermediate_size=1024)
    fingerprint = fingerprint_model(network)
    with torch.no_grad():
        weight = network.model.layers[0].mlp.up_proj.weight
        weight.add_(0.02 * torch.randn(weight.shape))
    assert fingerprint_model(network) != fingerprint


def test_tokenizers(make_tokenizer: Any) -> None:
    first = hash_tokenizer(make_tokenizer())
    assert hash_tokenizer(make_tokenizer()) == first
    assert hash_tokenizer(make_tokenizer(chat_template="{{ messages }}")) == first
    more = make_tokenizer()
    more.add_tokens(["ferry"])
    assert hash_tokenizer(more) != first


def test_the_hash_of_a_tokenizer_does_not_depend_on_what_it_has_read(model: Any, make_tokenizer: Any) -> None:
    assert hash_tokenizer(model.tokenizer) == hash_tokenizer(make_tokenizer())
    model.encode("a <|im_end|> that is read as plain text")
    assert hash_tokenizer(model.tokenizer) == hash_tokenizer(make_tokenizer())
