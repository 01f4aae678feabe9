"""Attention over ragged heads equals the same attention padded with entries of bias -inf, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention import ragged
from ttmem.attention.branches import merge_branches
from ttmem.attention.kernels import plain_attention
from ttmem.attention.ragged import memory_attention, plain_memory_attention
from ttmem.memory.layer import LayerMemory

SCALE = 0.35
KEY_DIM = 16


def random_layer(lengths: list[int], value_dim: int = KEY_DIM, biased: bool = True) -> LayerMemory:
    keys = [torch.randn(n, KEY_DIM) for n in lengths]
    values = [torch.randn(n, value_dim) for n in lengths]
    return LayerMemory.from_heads(keys, values, [torch.randn(n) for n in lengths] if biased else None)


def padded(layer: LayerMemory) -> tuple[Tensor, Tensor, Tensor]:
    """(keys, values, biases) [H, longest, .]; what is padded has random content and a bias of -inf."""
    longest, value_dim = max(layer.lengths), layer.values.shape[-1]
    keys, values = torch.randn(layer.num_heads, longest, KEY_DIM), torch.randn(layer.num_heads, longest, value_dim)
    biases = torch.full((layer.num_heads, longest), -torch.inf)
    start = 0
    for head, length in enumerate(layer.lengths):
        keys[head, :length] = layer.keys[start : start + length]
        values[head, :length] = layer.values[start : start + length]
        biases[head, :length] = layer.biases[start : start + length]
        start += length
    return keys, values, biases


def one_softmax(query: Tensor, layer: LayerMemory) -> tuple[Tensor, Tensor]:
    keys, values, biases = padded(layer)
    group = query.shape[1] // layer.num_heads
    keys, values, biases = (t.repeat_interleave(group, dim=0) for t in (keys, values, biases))
    scores = SCALE * query @ keys.transpose(-1, -2) + biases.unsqueeze(-2)
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    batch=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 3),
    value_dim=st.sampled_from([KEY_DIM, 8]),
    biased=st.booleans(),
    needs_grad=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_ragged_equals_padded_with_minus_infinity(
    lengths: list[int], batch: int, group: int, queries: int, value_dim: int, biased: bool, needs_grad: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = random_layer(lengths, value_dim, biased)
    query = torch.randn(batch, len(lengths) * group, queries, KEY_DIM, requires_grad=needs_grad)
    output, log_z = memory_attention(query, layer, SCALE)
    expected_output, expected_log_z = one_softmax(query, layer)
    torch.testing.assert_close(output, expected_output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_z, expected_log_z, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_heads_of_equal_length_take_one_call_with_the_same_result(length: int, biased: bool) -> None:
    torch.manual_seed(0)
    layer = random_layer([length] * 3, biased=biased)
    assert layer.is_uniform
    query = torch.randn(2, 6, 4, KEY_DIM)
    output, log_z = memory_attention(query, layer, SCALE)
    expected_output, expected_log_z = one_softmax(query, layer)
    torch.testing.assert_close(output, expected_output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_z, expected_log_z, atol=1e-5, rtol=1e-5)


def test_an_empty_head_leaves_the_new_tokens_alone() -> None:
    torch.manual_seed(0)
    layer = random_layer([0, 4])
    query, keys, values = torch.randn(2, 4, 3, KEY_DIM), torch.randn(2, 2, 3, KEY_DIM), torch.randn(2, 2, 3, KEY_DIM)
    new = plain_attention(query, keys, values, SCALE, is_causal=True)
    merged = merge_branches(memory_attention(query, layer, SCALE), new)
    assert torch.isfinite(merged.output).all()
    torch.testing.assert_close(merged.output[:, :2], new.output[:, :2])
    assert not torch.allclose(merged.output[:, 2:], new.output[:, 2:])


@pytest.mark.parametrize("lengths", [[3, 0, 6], [4, 4, 4]])
def test_gradients_equal_those_of_one_dense_softmax(lengths: list[int]) -> None:
    """Memory and new tokens in one softmax per head, with autograd through plain indexing."""
    torch.manual_seed(0)
    layer = random_layer(lengths)
    leaves = [layer.keys, layer.values, layer.biases]
    for leaf in leaves:
        leaf.requires_grad_(True)
    group = 2
    query = torch.randn(2, len(lengths) * group, 3, KEY_DIM, requires_grad=True)
    new_keys, new_values = torch.randn(2, len(lengths), 3, KEY_DIM), torch.randn(2, len(lengths), 3, KEY_DIM)
    target = torch.randn(2, len(lengths) * group, 3, KEY_DIM)

    new = plain_attention(query, new_keys, new_values, SCALE, is_causal=True)
    merged = merge_branches(memory_attention(query, layer, SCALE), new)
    found = torch.autograd.grad((merged.output - target).square().sum() + merged.log_z.sum(), [*leaves, query])

    loss = torch.zeros(())
    hidden = torch.full((3, 3), -torch.inf).triu(1)
    for b in range(2):
        for h in range(len(lengths) * group):
            kv = h // group
            own = slice(layer.offsets[kv], layer.offsets[kv + 1])
            from_memory = SCALE * query[b, h] @ layer.keys[own].T + layer.biases[own]
            from_new = SCALE * query[b, h] @ new_keys[b, kv].T + hidden
            scores = torch.cat([from_memory, from_new], dim=-1)
            output = scores.softmax(-1) @ torch.cat([layer.values[own], new_values[b, kv]])
            loss = loss + (output - target[b, h]).square().sum() + scores.logsumexp(-1).sum()
    expected = torch.autograd.grad(loss, [*leaves, query])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("trained", ["values", "biases"])
@pytest.mark.parametrize("lengths", [[3, 5], [4, 4]])
def test_gradients_flow_when_only_one_part_trains(trained: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    layer = random_layer(lengths)
    getattr(layer, trained).requires_grad_(True)
    output, log_z = memory_attention(torch.randn(1, 2, 3, KEY_DIM), layer, SCALE)
    (gradient,) = torch.autograd.grad(output.square().sum() + log_z.sum(), getattr(layer, trained), allow_unused=True)
    assert gradient is not None
    assert gradient.abs().sum() > 0


def test_bf16_queries_and_memory() -> None:
    torch.manual_seed(0)
    layer = random_layer([5, 9])
    query = torch.randn(2, 4, 3, KEY_DIM)
    output, log_z = memory_attention(query.bfloat16(), layer.to(dtype=torch.bfloat16), SCALE)
    expected = memory_attention(query, layer, SCALE)
    assert output.dtype == log_z.dtype == torch.float32
    torch.testing.assert_close(output, expected.output, atol=5e-2, rtol=5e-2)
    torch.testing.assert_close(log_z, expected.log_z, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("form", ["_one_call", "_per_head", "_uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_fused_form_equals_the_plain_one(form: str, dtype: torch.dtype) -> None:
    """Long enough that the kernel works in several blocks, of which a head sees none, some or all."""
    torch.manual_seed(0)
    lengths = [700, 700, 700] if form == "_uniform" else [3, 1200, 640]
    layer = random_layer(lengths).to(dtype=dtype)
    folded = torch.randn(3, 2, KEY_DIM).to(dtype)
    output, log_z = getattr(ragged, form)(folded, layer, SCALE)
    expected = plain_memory_attention(folded, layer, SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output, expected.output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(log_z, expected.log_z, atol=tolerance, rtol=tolerance)


def test_the_form_taken_depends_on_the_number_of_products_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, query = random_layer([5, 2, 9]), torch.randn(2, 6, 3, KEY_DIM)
    one = memory_attention(query, layer, SCALE)
    monkeypatch.setattr(ragged, "ONE_CALL_ELEMENTS", 0)
    each = memory_attention(query, layer, SCALE)
    torch.testing.assert_close(one, each, atol=1e-5, rtol=1e-5)
