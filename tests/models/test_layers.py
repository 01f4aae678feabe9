"""What ttmem knows of a model's layers, and which models it refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.cache_utils import DynamicCache

from ttmem import Model, ModelError
from ttmem.models.layers import cache_keyword, describe_layers, output_projection, verify_attention

SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(architecture: str, head: str = "ForCausalLM", **config: Any) -> Any:
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{architecture}Config")(**config)
    return getattr(transformers, f"{architecture}{head}")(configuration).eval()


def test_layers_in_order_with_heads_and_windows(any_model: Model) -> None:
    config = any_model.network.config
    assert [layer.index for layer in any_model.layers] == list(range(config.num_hidden_layers))
    for layer in any_model.layers:
        assert layer.num_heads == config.num_attention_heads
        assert layer.num_kv_heads == config.num_key_value_heads
        assert layer.module.layer_idx == layer.index
    windows = [16, None, 16, None] if "gemma3" in any_model.name else [None] * config.num_hidden_layers
    assert [layer.window for layer in any_model.layers] == windows
    assert [layer.index for layer in any_model.compacted_layers] == [i for i, w in enumerate(windows) if w is None]


def test_the_output_weight_of_a_head_is_its_slice_of_the_projection(any_model: Model) -> None:
    torch.manual_seed(0)
    layer = any_model.layers[0]
    dim = any_model.network.config.head_dim if "qwen2" not in any_model.name else 16
    values = torch.randn(layer.num_heads, dim)
    projection = output_projection(layer.module)
    expected = values.flatten() @ projection.weight.T
    found = torch.einsum("hd,hdo->o", values, layer.output_weight())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_module_without_an_output_projection_is_named() -> None:
    with pytest.raises(ModelError, match="Linear has no output projection named one of o_proj"):
        output_projection(nn.Linear(2, 2))


def test_the_cache_keyword_is_one_that_forward_takes(any_model: Model) -> None:
    keyword = cache_keyword(any_model.network)
    cache = DynamicCache(config=any_model.network.config)
    with torch.no_grad():
        any_model.network(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{keyword: cache})
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_work_pass_the_check(any_model: Model, make_network: Any, dtype: torch.dtype) -> None:
    verify_attention(make_network(any_model.name.split()[-1]).to(dtype))


def test_an_encoder_decoder_is_refused(tokenizer: Any) -> None:
    config = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    network = build("T5", "ForConditionalGeneration", **config, decoder_start_token_id=0)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        Model(network, tokenizer)


def test_a_state_space_model_is_refused(tokenizer: Any) -> None:
    network = build("Mamba", vocab_size=300, hidden_size=32, state_size=4, num_hidden_layers=1)
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        Model(network, tokenizer)


def test_linear_attention_is_refused(tokenizer: Any) -> None:
    config = {**SMALL, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
    config |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2}
    config |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 1}
    with pytest.raises(ModelError, match="Qwen3NextForCausalLM"):
        Model(build("Qwen3Next", **config), tokenizer)


def test_windows_everywhere_are_refused(make_network: Any, tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"MistralForCausalLM: every layer attends to a window of 16 tokens"):
        Model(make_network("mistral", sliding_window=16), tokenizer)


def test_attention_sinks_are_refused(tokenizer: Any) -> None:
    config = {**SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16}
    config |= {"layer_types": ["full_attention", "full_attention"]}
    with pytest.raises(ModelError, match="GptOssForCausalLM"):
        Model(build("GptOss", **config), tokenizer)


def test_capped_scores_are_refused(tokenizer: Any) -> None:
    config = {**SMALL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 64}
    with pytest.raises(ModelError, match="Gemma2ForCausalLM"):
        Model(build("Gemma2", **config), tokenizer)


def test_positions_outside_the_keys_are_refused(tokenizer: Any) -> None:
    """ALiBi adds the distance to the score: a memory without it would give other logits."""
    network = build("Bloom", vocab_size=300, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ModelError, match="BloomForCausalLM"):
        Model(network, tokenizer)


def test_latents_in_the_cache_are_refused(tokenizer: Any) -> None:
    if not hasattr(transformers, "MiniCPM3Config"):
        pytest.skip("this transformers has no MiniCPM3")
    config = {key: value for key, value in SMALL.items() if key != "head_dim"}
    config |= {"num_key_value_heads": 4, "v_head_dim": 12, "qk_rope_head_dim": 8}
    config |= {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
    with pytest.raises(ModelError, match="MiniCPM3ForCausalLM"):
        Model(build("MiniCPM3", **config), tokenizer)


def test_a_model_that_only_seems_to_fit_is_caught_by_its_logits(make_network: Any, tokenizer: Any) -> None:
    """A wrong scale at answering time stands for all that no configuration key tells."""
    network = make_network("llama")
    attention = network.model.layers[1].self_attn
    forward = attention.forward

    def scaled_behind_a_memory(*args: Any, **kwargs: Any) -> Any:
        cache = next((kwargs[name] for name in ("cache", "past_key_values") if kwargs.get(name) is not None), None)
        attention.scaling = 0.25 if type(cache).__name__ != "MemoryCache" else 0.5
        return forward(*args, **kwargs)

    attention.forward = scaled_behind_a_memory
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not compute plain softmax attention.*differ by"):
        Model(network, tokenizer)


def test_a_model_that_fails_behind_a_memory_is_refused_with_the_reason(make_network: Any, tokenizer: Any) -> None:
    network = make_network("llama")

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("attention_mask") is not None:
            raise RuntimeError("no masks here")

    network.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot run behind a memory: RuntimeError: no masks here"):
        Model(network, tokenizer)


def test_describing_changes_nothing(make_network: Any) -> None:
    network = make_network("llama")
    network.set_attn_implementation("eager")
    describe_layers(network)
    assert network.config._attn_implementation == "eager"
