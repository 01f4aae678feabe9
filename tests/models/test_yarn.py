"""YaRN reaches the model: what is stretched in place is what transformers builds from the settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from ttmem.errors import BudgetError, ModelError
from ttmem.fast_weights import TTCDConfig, TTCDForCausalLM, install
from ttmem.models.yarn import apply_yarn, yarn_parameters

IDS = torch.randint(1, 60, (2, 40), generator=torch.Generator().manual_seed(0))


def by_the_formula(theta: float, size: int, factor: float, original: int) -> torch.Tensor:
    """Rates: kept where a pair turns more than 32 times in the original length, divided where it turns less than once,
    and in between in proportion to the pair's index between these two (Peng et al., 2023)."""

    def index(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), size - 1)
    pairs = torch.arange(size // 2, dtype=torch.float32)
    rates = theta ** (-2 * pairs / size)
    divided = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return rates * (1 - divided) + rates / factor * divided


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_stretched_model_is_the_one_that_transformers_builds(
    make_network: Any, tmp_path: Path, family: str
) -> None:
    plain, stretched = make_network(family), apply_yarn(make_network(family), 8.0)
    settings = stretched.config.rope_parameters
    assert (settings["rope_type"], settings["factor"]) == ("yarn", 8.0)
    assert settings["original_max_position_embeddings"] == plain.config.max_position_embeddings
    assert stretched.config.max_position_embeddings == 8 * plain.config.max_position_embeddings
    built = make_network(
        family, rope_parameters=dict(settings), max_position_embeddings=stretched.config.max_position_embeddings
    )
    stretched.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = stretched(IDS).logits
        assert torch.equal(built(IDS).logits, logits)
        assert torch.equal(loaded(IDS).logits, logits)
        assert (plain(IDS).logits - logits).abs().max() > 1e-3
    rotary = stretched.get_decoder().rotary_emb
    theta, original = settings["rope_theta"], plain.config.max_position_embeddings
    torch.testing.assert_close(rotary.inv_freq, by_the_formula(theta, 16, 8.0, original))
    assert rotary.attention_scaling == pytest.approx(0.1 * math.log(8.0) + 1.0)


def test_fast_weights_in_a_stretched_model(make_network: Any) -> None:
    base = apply_yarn(make_network("llama"), 4.0)
    with torch.no_grad():
        expected = base(IDS).logits
        model = install(base, student_window=8, chunk_size=7)
        assert torch.equal(model(IDS).logits, expected)
        after = apply_yarn(install(make_network("llama"), student_window=8, chunk_size=7), 4.0)
        assert torch.equal(after(IDS).logits, expected)
    assert model.config.rope_parameters["factor"] == 4.0


def test_full_attention_with_yarn_from_scratch() -> None:
    """The baseline of the models from scratch: Llama with the same settings, whichever name they are given under."""
    size = {
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    torch.manual_seed(0)
    model = TTCDForCausalLM(TTCDConfig(**size, rule="window", windows=None, rope_parameters=dict(yarn))).eval()
    older = TTCDConfig(**size, rule="window", windows=None, rope_scaling=dict(yarn))
    assert older.rope_parameters == model.config.rope_parameters
    llama = LlamaForCausalLM(model.config).eval()
    llama.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, llama(IDS).logits)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, by_the_formula(1e4, 16, 8.0, 64))


def test_what_cannot_be_stretched(make_network: Any) -> None:
    for factor in (1.0, 0.5, -2.0, math.nan, math.inf):
        with pytest.raises(BudgetError, match=f"factor is {factor}; it must be a finite number above 1"):
            apply_yarn(make_network("llama"), factor)
    with pytest.raises(ModelError, match="cannot be stretched"):
        apply_yarn(apply_yarn(make_network("llama"), 2.0), 2.0)
    with pytest.raises(ModelError, match="gemma3"):
        yarn_parameters(make_network("gemma3").config, 2.0)
