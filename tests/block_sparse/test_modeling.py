"""The language model: causal, the same with and without a cache or padding, saved, loaded, generating, learning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ttmem.block_sparse import (
    KINDS,
    BlockSparseConfig,
    BlockSparseForCausalLM,
    naive_attention,
)
from ttmem.block_sparse.modeling import CACHE
from ttmem.block_sparse.naive import naive_summaries
from ttmem.errors import BlockError

Make = Callable[..., BlockSparseForCausalLM]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"attention": "full"},
    "sliding": {"attention": "sliding"},
    "sliding aligned": {"attention": "sliding", "align_window": True},
    **{kind: {"compressor": kind} for kind in KINDS},
    "hidden": {"compressor_input": "hidden"},
    "residual": {"compressor_input": "residual", "compressor": "ttr-conv", "summary_bias": "entropy"},
    "mark": {"compressor": "attention", "attention_query": "mark", "summary_bias": "entropy"},
    "mark, hidden": {"compressor": "attention", "attention_query": "mark", "compressor_input": "hidden"},
    "rotary": {"chunk_rotary": True, "summary_bias": "entropy"},
    "rotary, hidden": {"chunk_rotary": True, "compressor_input": "hidden"},
    "aligned, sink": {"align_window": True, "sink": True, "chunks_per_query": 3},
    "window of one": {"window": 1, "chunk_size": 1, "compressor_input": "hidden"},
}
LENGTH = 37


@pytest.fixture(params=VARIANTS)
def lm(request: pytest.FixtureRequest, make_lm: Make) -> BlockSparseForCausalLM:
    return make_lm(**VARIANTS[request.param])


def random_ids(rows: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(pads: tuple[int, ...], length: int = LENGTH) -> tuple[Tensor, Tensor]:
    ids, mask = random_ids(len(pads), length), torch.ones(len(pads), length, dtype=torch.int64)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask


@torch.no_grad()
def in_parts(lm: BlockSparseForCausalLM, ids: Tensor, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    cache, parts = None, []
    for begin, end in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        seen = None if mask is None else mask[:, :end]
        outputs = lm(ids[:, begin:end], attention_mask=seen, cache=cache, use_cache=True)
        cache = getattr(outputs, CACHE)
        parts.append(outputs.logits)
    return torch.cat(parts, dim=1)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_later_tokens_change_nothing_before(lm: BlockSparseForCausalLM) -> None:
    ids = random_ids()
    before = lm(ids).logits
    for cut in (9, 22, 36):
        changed = ids.clone()
        changed[:, cut:] = random_ids(seed=1)[:, cut:]
        close(lm(changed).logits[:, :cut], before[:, :cut])
        close(lm(ids[:, :cut]).logits, before[:, :cut])


@pytest.mark.parametrize("cuts", [list(range(1, LENGTH)), [5, 6, 21], [16, 17, 18, 19, 20], [30]])
def test_decoding_with_a_cache_is_the_full_forward(lm: BlockSparseForCausalLM, cuts: list[int]) -> None:
    ids = random_ids()
    with torch.no_grad():
        expected = lm(ids).logits
    close(in_parts(lm, ids, cuts), expected)


@torch.no_grad()
def test_left_padding_changes_nothing(lm: BlockSparseForCausalLM) -> None:
    pads = (0, 3, 18)
    ids, mask = left_padded(pads)
    padded = lm(ids, attention_mask=mask).logits
    cached = in_parts(lm, ids, [11, *range(20, LENGTH)], mask)
    assert padded.isfinite().all()
    for row, pad in enumerate(pads):
        alone = lm(ids[row : row + 1, pad:]).logits[0]
        close(padded[row, pad:], alone)
        close(cached[row, pad:], alone)


@torch.no_grad()
def test_right_padding_changes_nothing(make_lm: Make) -> None:
    lm, ids = make_lm(), random_ids()
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    close(lm(ids, attention_mask=mask).logits[1, :20], lm(ids[1:, :20]).logits[0])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in ("full", "sliding", "sliding aligned")])
def test_a_layer_is_the_naive_one(variant: str, make_lm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every chunk compressed on its own, and every query by itself."""
    lm = make_lm(**VARIANTS[variant])
    layer, config = lm.model.layers[0], lm.config
    attention = layer.self_attn
    residual = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    x = layer.input_layernorm(residual)
    starts = torch.tensor([0, 7])
    args = (attention._heads(attention.q_proj(x)), attention._heads(attention.k_proj(x)))
    values = attention._heads(attention.v_proj(x))
    streams = attention.streams(x, residual, layer.input_layernorm, *args, values, starts, None)

    tokens = attention._tokens(x, residual, streams.far_keys, None)
    packed = torch.cat([tokens, x.unsqueeze(1).expand(-1, tokens.shape[1], -1, -1)], dim=-1)  # marks travel along

    def summarise(block: Tensor) -> Tensor:
        own, hidden = block.split([tokens.shape[-1], 32], dim=-1)
        vectors, biases = attention.summarise(own[None, :, None], hidden[None, :1, -1], layer.input_layernorm)
        bias = torch.zeros_like(vectors[..., :1]) if biases is None else biases.unsqueeze(-1)
        return torch.cat([vectors, bias], dim=-1)[0, :, 0]

    if config.compressor_input != "keys":
        packed = packed.expand(-1, 1, -1, -1)
    naive = naive_summaries(summarise, packed, starts, config.chunk_size)
    for row, start in enumerate(starts.tolist()):
        count = (LENGTH - start) // config.chunk_size
        close(streams.summaries[row, :, :count], naive[row, :, :count, :-1])
        if streams.biases is not None:
            close(streams.biases[row, :, :count], naive[row, :, :count, -1])

    output = attention(x, residual, layer.input_layernorm, starts)
    expected = attention.o_proj(naive_attention(streams, config.sparsity).transpose(1, 2).flatten(2))
    real = torch.arange(LENGTH) >= starts.unsqueeze(1)
    close(output[real], expected[real])


@torch.no_grad()
def test_references_are_what_they_are_called(make_lm: Make) -> None:
    """A window as long as the text is full attention, for all three."""
    ids = random_ids()
    full = make_lm(attention="full")
    wide = make_lm(attention="sliding", window=64)
    wide.load_state_dict(full.state_dict())
    close(wide(ids).logits, full(ids).logits)
    sparse = make_lm(window=64)
    sparse.load_state_dict(full.state_dict(), strict=False)
    close(sparse(ids).logits, full(ids).logits)
    narrow = make_lm(attention="sliding", window=6)
    narrow.load_state_dict(full.state_dict())
    assert (narrow(ids).logits - full(ids).logits).abs().max() > 0.1


def test_save_and_load(lm: BlockSparseForCausalLM, tmp_path: Path) -> None:
    lm.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), BlockSparseConfig)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is BlockSparseForCausalLM
    ours, theirs = lm.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        close(loaded(random_ids()).logits, lm(random_ids()).logits)


def test_tied_embeddings_survive(make_lm: Make, tmp_path: Path) -> None:
    lm = make_lm(tie_word_embeddings=True)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    close(loaded(random_ids()).logits, lm(random_ids()).logits)


def test_generate(lm: BlockSparseForCausalLM) -> None:
    pads = (0, 9)
    ids, mask = left_padded(pads)
    found = lm.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    for row, pad in enumerate(pads):
        alone = ids[row : row + 1, pad:]
        for _ in range(10):
            with torch.no_grad():
                alone = torch.cat([alone, lm(alone).logits[:, -1:].argmax(-1)], dim=1)
        assert found[row, pad:].tolist() == alone[0].tolist()


def test_beams(lm: BlockSparseForCausalLM) -> None:
    ids, mask = left_padded((0, 5), 21)
    cached = lm.generate(ids, attention_mask=mask, max_new_tokens=7, num_beams=3, do_sample=False)
    plain = lm.generate(ids, attention_mask=mask, max_new_tokens=7, num_beams=3, do_sample=False, use_cache=False)
    assert cached.tolist() == plain.tolist()


@torch.no_grad()
def test_tokens_are_dropped_from_the_cache(make_lm: Make) -> None:
    lm, ids = make_lm(), random_ids()
    cache = getattr(lm(ids, use_cache=True), CACHE)
    cache.crop(-14)
    other = torch.cat([ids[:, :-14], random_ids(seed=3)[:, :20]], dim=1)
    close(lm(other[:, LENGTH - 14 :], cache=cache).logits, lm(other).logits[:, LENGTH - 14 :])
    hidden = make_lm(compressor_input="hidden")
    cache = getattr(hidden(ids, use_cache=True), CACHE)
    with pytest.raises(BlockError, match="cannot drop tokens"):
        cache.crop(-1)


@torch.no_grad()
def test_outputs(make_lm: Make) -> None:
    lm, ids = make_lm(), random_ids()
    outputs = lm(ids, labels=ids, output_hidden_states=True, logits_to_keep=0)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    assert len(outputs.hidden_states) == 3
    close(lm(ids, logits_to_keep=1).logits, outputs.logits[:, -1:])
    embedded = lm(inputs_embeds=lm.get_input_embeddings()(ids)).logits
    close(embedded, outputs.logits)
    assert getattr(lm(ids, use_cache=False), CACHE) is None


def test_checkpointed_gradients(make_lm: Make) -> None:
    lm, ids = make_lm(compressor_input="residual").train(), random_ids()
    lm(ids, labels=ids).loss.backward()
    wanted = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    assert wanted.keys() == {name for name, _ in lm.named_parameters()}
    lm.zero_grad()
    getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)()
    lm(ids, labels=ids).loss.backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch.no_grad()
def test_half_precision(make_lm: Make) -> None:
    lm = make_lm().bfloat16()
    found, expected = lm(random_ids()).logits, make_lm()(random_ids()).logits
    assert found.dtype == torch.bfloat16
    assert torch.corrcoef(torch.stack([found.float().flatten(), expected.flatten()]))[0, 1] > 0.9


def test_the_default_is_the_recipe() -> None:
    with torch.device("meta"):
        lm = BlockSparseForCausalLM(BlockSparseConfig())
    assert 340e6 < sum(p.numel() for p in lm.parameters()) < 350e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressor": "median"}, "compressor is 'median'; it must be one of mean, concat, attention"),
        ({"attention": "flash"}, "block_sparse, full, sliding"),
        ({"compressor_input": "values"}, "keys, hidden, residual"),
        ({"summary_bias": "norm"}, "none, entropy"),
        ({"compressor": "concat", "summary_bias": "entropy"}, "no weights over tokens"),
        ({"attention_query": "mark"}, "has no query"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 7}, "even"),
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5"),
        ({"chunks_per_query": 0}, "chunks_per_query"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"window": True}, "window is True"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"compressor_settings": {"strength": "matrix"}}, "strength must be"),
        ({"compressor_settings": {"width": 3}}, "does not take the settings"),
        ({"compressor": "mean", "compressor_settings": {"strength": 1.0}}, "does not take the settings"),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str, make_lm: Make) -> None:
    with pytest.raises(BlockError, match=message):
        make_lm(**changes)


def test_refused_inputs(make_lm: Make) -> None:
    from transformers import DynamicCache

    lm, ids = make_lm(), random_ids()
    with pytest.raises(BlockError, match="BlockSparseCache"):
        lm(ids, cache=DynamicCache())
    with pytest.raises(BlockError, match="between tokens"):
        lm(ids, attention_mask=torch.tensor([[1, 0] + [1] * 35] * 2))
    cache = getattr(lm(ids, use_cache=True), CACHE)
    with pytest.raises(BlockError, match="elsewhere"):
        lm(ids[:, :1], cache=cache, attention_mask=torch.tensor([[0] + [1] * LENGTH] * 2))
    with pytest.raises(ValueError, match="one of"):
        lm(ids, inputs_embeds=lm.get_input_embeddings()(ids))


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv", "attention", "mean", "concat"])
@pytest.mark.parametrize("before", [{"attention": "full"}, {"compressor": "mean"}])
def test_what_a_checkpoint_lacks_gets_first_values(
    kind: str, before: dict[str, str], make_lm: Make, tmp_path: Path
) -> None:
    make_lm(**before).save_pretrained(tmp_path)
    torch.manual_seed(1)
    lm = BlockSparseForCausalLM.from_pretrained(tmp_path, attention="block_sparse", compressor=kind)
    for layer in lm.model.layers:
        for name, value in layer.self_attn.compressor.named_parameters():
            assert value.abs().max() < 10, name
            if name.endswith("rho"):
                torch.testing.assert_close(torch.nn.functional.softplus(value), torch.full_like(value, 0.01))
            elif name.endswith("kernel"):
                assert (value == torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1)).all()
            else:
                assert value.std() > 0.05, name
    torch.testing.assert_close(lm.model.embed_tokens.weight, make_lm(**before).model.embed_tokens.weight)


def test_a_layer_of_which_something_is_there_keeps_it(make_lm: Make, tmp_path: Path) -> None:
    lm = make_lm(compressor="ttr")
    with torch.no_grad():
        for layer in lm.model.layers:
            for module in layer.self_attn.compressor.compress:
                module.a.fill_(7.0)
                module.rho.fill_(3.0)
    lm.save_pretrained(tmp_path)
    found = BlockSparseForCausalLM.from_pretrained(tmp_path, compressor="ttr-conv")
    for layer in found.model.layers:
        for module in layer.self_attn.compressor.compress:
            assert (module.a == 7.0).all()
            assert (module.rho == 3.0).all()
            assert (module.kernel == torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1)).all()


@pytest.mark.parametrize("strength", ["scalar", 0.5])
def test_settings_of_the_operator_are_those_of_the_model(
    strength: str | float, make_lm: Make, tmp_path: Path
) -> None:
    lm = make_lm(compressor_settings={"strength": strength, "normalize_keys": False})
    module = lm.model.layers[0].self_attn.compressor.compress[0]
    assert (module.strength, module.normalize_keys, module.rho.shape) == (strength, False, (1,))
    lm.save_pretrained(tmp_path)
    ids = random_ids()
    torch.testing.assert_close(BlockSparseForCausalLM.from_pretrained(tmp_path)(ids).logits, lm(ids).logits)


def test_logits_of_chosen_tokens(make_lm: Make) -> None:
    lm, ids = make_lm(), random_ids()
    logits = lm(ids).logits
    torch.testing.assert_close(lm(ids, logits_to_keep=3).logits, logits[:, -3:])
    torch.testing.assert_close(lm(ids, logits_to_keep=torch.tensor([4, 9])).logits, logits[:, [4, 9]])
