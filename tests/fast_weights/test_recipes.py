"""Recipes: the paper's numbers, models that can be built and counted, baselines of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem.errors import BudgetError, ModelError
from ttmem.fast_weights import TTCDForCausalLM
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.counting import forward_flops, training_plan
from ttmem.fast_weights.recipes import RECIPES, SYSTEMS, build, make_config, outlined
from ttmem.training.loop import TrainSettings

PAPER = {
    # parameters without embeddings (M), tokens in a step and in all, optimiser, rate, warmup, length, student, chunk
    "340m": (308, 2**19, 2e10, "muon", 3e-3, 500, 32_768, 1024, [0, 6, 12, 18]),
    "760m": (680, 2**20, 4e10, "muon", 3e-3, 500, 32_768, 1024, [0, 6, 12, 18]),
    "smollm2-360m": (315, 2**20, 1e10, "adamw", 1e-5, 200, 65_536, 2048, [0, 8, 16, 24]),
    "smollm2-1.7b": (1611, 2**20, 1e10, "adamw", 1e-5, 200, 65_536, 2048, [0, 6, 12, 18]),
    "qwen3-0.6b": (440, 2**20, 1e10, "adamw", 1e-5, 200, 65_536, 2048, [0, 7, 14, 21]),
    "qwen3-1.7b": (1409, 2**20, 1e10, "adamw", 1e-5, 200, 65_536, 2048, [0, 7, 14, 21]),
    "llama-3.1-8b": (6980, 2**21, 1e10, "adamw", 5e-6, 200, 65_536, 2048, [0, 8, 16, 24]),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes(name: str) -> None:
    millions, per_step, tokens, optimizer, rate, warmup, length, window, layers = PAPER[name]
    recipe, network = RECIPES[name], outlined(RECIPES[name])
    training, config = recipe.training, network.config
    assert isinstance(network, TTCDForCausalLM)
    assert all(parameter.is_meta for parameter in network.parameters())
    fast = sum(p.numel() for n, p in network.named_parameters() if ".fast." in n)
    embeddings = sum(p.numel() for n, p in network.named_parameters() if "embed" in n or "lm_head" in n)
    count = sum(p.numel() for p in network.parameters())
    assert round((count - fast - embeddings) / 1e6) == pytest.approx(millions, abs=1)
    d, f = config.hidden_size, config.intermediate_size
    assert fast == 4 * (2 * 5 * f + d * d + d)
    assert recipe.length * recipe.batch == per_step
    assert recipe.tokens == pytest.approx(tokens, rel=1e-3)
    assert (training.optimizer, training.lr, training.warmup) == (optimizer, rate, warmup)
    assert (training.weight_decay, training.clip) == (0.1, 1.0)
    assert training.schedule == ("wsd" if recipe.base is None else "cosine")
    assert (recipe.length, config.student_window, config.chunk_size, config.fast_layers) == (
        length, window, window, layers,
    )  # fmt: skip
    assert (config.fast_lr, config.conv_kernel) == (0.3, 5)
    scratch = recipe.base is None
    assert config.teacher_window == (2048 if scratch else None)
    assert (config.normalize_keys, config.convolved_reads) == (scratch, scratch)
    assert config.convolution_start == ("scratch" if scratch else "pretrained")
    assert config.max_position_embeddings >= recipe.length


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_from_scratch(system: str) -> None:
    network = outlined(RECIPES["cpu"], system)
    config = network.config
    assert config.rule == ("window" if system == "full" else system)
    layers = {"ttcd": [0, 2], "in_place": [0, 2], "window": [], "full": []}.get(system, [0, 1, 2, 3])
    assert config.fast_layers == layers
    assert config.window_of(1) == (None if system == "full" else 128)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(700_000, rel=0.25)


def test_changes_go_before_the_recipe() -> None:
    config = make_config(RECIPES["cpu"].model, "ttcd", {"num_hidden_layers": 6, "fast_layers": [5], "conv_kernel": 0})
    assert (config.num_hidden_layers, config.fast_layers, config.conv_kernel) == (6, [5], 0)
    assert make_config(RECIPES["cpu"].model, "lact", {"num_hidden_layers": 3}).fast_layers == [0, 1, 2]
    with pytest.raises(BudgetError, match="'mamba' is not one of ttcd"):
        make_config(RECIPES["cpu"].model, "mamba", {})


def test_systems_in_a_base(make_network: Any, make_ids: Any) -> None:
    recipe, ids = RECIPES["cpu-continual"], make_ids(1, 40)
    base = make_network("llama")
    assert build(recipe, "full", base=base) is base
    windowed = build(recipe, "window", {"windows": 16}, base=make_network("llama"))
    assert windowed.config.windows == 16
    assert build(recipe, "window", base=make_network("llama")).config.windows == recipe.sliding
    ttcd = build(recipe, "ttcd", {"fast_layers": [1], "teacher_window": None}, base=make_network("llama"))
    assert (ttcd.config.fast_layers, ttcd.config.chunk_size) == ([1], 512)
    with torch.no_grad():
        torch.testing.assert_close(ttcd(ids).logits, base(ids).logits)
        stretched = build(recipe, "full", base=make_network("llama"), yarn=4.0)
        assert stretched.config.rope_parameters["rope_type"] == "yarn"
        assert (stretched(ids).logits - base(ids).logits).abs().max() > 1e-4
    with pytest.raises(BudgetError, match="chunk_size: the system 'full'"):
        build(recipe, "full", {"chunk_size": 3}, base=make_network("llama"))
    with pytest.raises(ModelError, match="'lact' cannot be installed"):
        build(recipe, "lact", base=make_network("llama"))


def test_a_base_by_name(make_network: Any, make_tokenizer: Any, tmp_path: Path) -> None:
    from ttmem.fast_weights.recipes import load_base

    make_network("llama").bfloat16().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    base, tokenizer = load_base(str(tmp_path))
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert base.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in base.parameters())
    with pytest.raises(ModelError, match="cannot load"):
        load_base(str(tmp_path / "nothing"))


def test_yarn_from_scratch() -> None:
    network = outlined(RECIPES["cpu"], "full", yarn=4.0)
    assert network.config.rope_parameters["factor"] == 4.0
    assert network.config.max_position_embeddings == 4 * 16384


TINY = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None, "windows": None,
}  # fmt: skip


def test_operations_are_those_of_the_products() -> None:
    """Full attention: all matrices, every score once and every value once, masked ones too."""
    with torch.device("meta"):
        network = TTCDForCausalLM(TTCDConfig(**TINY, rule="window"))
    T, d, f, width, kv = 32, 16, 24, 16, 8
    layer = 2 * T * (d * (width + 2 * kv) + width * d + 3 * d * f) + 2 * 2 * T * T * width
    angles = 2 * T * kv // 2  # older transformers take the rotary angles by a product too
    assert forward_flops(network, T) - (3 * layer + 2 * T * d * 50) in (0, angles)


@pytest.mark.parametrize("rule", ["ttcd", "gated_deltanet", "window"])
def test_layers_that_are_alike_are_counted_once(rule: str) -> None:
    """As many operations as a run of all layers has."""
    from torch.utils.flop_counter import FlopCounterMode

    windows = {"windows": [None, 4, 4], "teacher_window": 8, "student_window": 4, "chunk_size": 4}
    layers = {"ttcd": [1], "gated_deltanet": [1, 2], "window": []}[rule]
    with torch.device("meta"):
        network = TTCDForCausalLM(TTCDConfig(**{**TINY, **windows}, rule=rule, fast_layers=layers))
    found = forward_flops(network, 96)
    assert len(network.model.layers) == 3
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, 96, dtype=torch.long, device="meta"), use_cache=False)
    assert found == counter.get_total_flops()


def test_a_plan_is_what_training_takes() -> None:
    with torch.device("meta"):
        network = TTCDForCausalLM(TTCDConfig(**TINY, rule="window", tie_word_embeddings=True))
    count = sum(parameter.numel() for parameter in network.parameters())
    plan = training_plan(network, TrainSettings(steps=10), 32, 4)
    assert (plan["parameters"], plan["embedding_parameters"], plan["fast_parameters"]) == (count, 800, 0)
    assert (plan["tokens"], plan["tokens_per_step"]) == (1280, 128)
    assert plan["training_flops"] == 3 * plan["forward_flops_per_token"] * 1280
    assert plan["bytes"]["parameters"] == 4 * count
    assert 8 * count <= plan["bytes"]["optimizer"] <= 8 * count + 4 * 100
    muon = training_plan(network, TrainSettings(steps=10, optimizer="muon"), 32, 4)
    assert muon["bytes"]["optimizer"] < plan["bytes"]["optimizer"]
