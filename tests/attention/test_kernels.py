"""The fused attention equals the plain one, and the plain one equals one softmax per query head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention.branches import Branch
from ttmem.attention.kernels import fast_attention, plain_attention

SCALE = 0.4


def per_head(query: Tensor, keys: Tensor, values: Tensor, additive: Tensor) -> Branch:
    """One head at a time; additive [B, H*G, Q, n]."""
    group = query.shape[1] // keys.shape[1]
    outputs, log_zs = torch.zeros(*query.shape[:3], values.shape[-1]), torch.zeros(query.shape[:3])
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            scores = SCALE * query[b, h].float() @ keys[b, h // group].float().T + additive[b, h]
            outputs[b, h] = scores.softmax(-1) @ values[b, h // group].float()
            log_zs[b, h] = scores.logsumexp(-1)
    return Branch(outputs, log_zs)


def random_inputs(
    batch: int, heads: int, group: int, queries: int, entries: int, dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, heads * group, queries, dim),
        torch.randn(batch, heads, entries, dim),
        torch.randn(batch, heads, entries, dim),
    )


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    queries=st.integers(1, 5),
    entries=st.integers(1, 40),
    biased=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_fast_and_plain_equal_one_softmax_per_head(
    batch: int, heads: int, group: int, queries: int, entries: int, biased: bool, masked: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    query, keys, values = random_inputs(batch, heads, group, queries, entries)
    bias = torch.randn(batch, 1, queries, entries) if biased else None
    mask = None
    additive = torch.zeros(batch, heads * group, queries, entries)
    if bias is not None:
        additive = additive + bias
    if masked:
        mask = torch.rand(batch, 1, queries, entries) < 0.7
        mask[..., 0] = True
        additive = additive.masked_fill(~mask, -torch.inf)
    expected = per_head(query, keys, values, additive)
    for attention in (fast_attention, plain_attention):
        found = attention(query, keys, values, SCALE, bias, mask)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 33])
@pytest.mark.parametrize("attention", [fast_attention, plain_attention])
def test_causal(attention: object, length: int) -> None:
    torch.manual_seed(0)
    query, keys, values = random_inputs(2, 2, 3, length, length)
    additive = torch.full((length, length), -torch.inf).triu(1).expand(2, 6, -1, -1)
    found = attention(query, keys, values, SCALE, is_causal=True)  # type: ignore[operator]
    torch.testing.assert_close(found, per_head(query, keys, values, additive), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(9,), (1, 9), (3, 1, 1, 9), (3, 6, 4, 9)])
def test_a_bias_of_any_broadcastable_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    query, keys, values = random_inputs(3, 2, 3, 4, 9)
    bias = torch.randn(shape)
    expected = per_head(query, keys, values, bias.expand(3, 6, 4, 9))
    torch.testing.assert_close(fast_attention(query, keys, values, SCALE, bias), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 9), (3, 1, 4, 9), (3, 6, 4, 9)])
def test_a_mask_of_any_broadcastable_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    query, keys, values = random_inputs(3, 2, 3, 4, 9)
    mask = torch.rand(shape) < 0.6
    mask[..., 2] = True
    additive = torch.zeros(3, 6, 4, 9).masked_fill(~mask.expand(3, 6, 4, 9), -torch.inf)
    for attention in (fast_attention, plain_attention):
        found = attention(query, keys, values, SCALE, mask=mask)
        torch.testing.assert_close(found, per_head(query, keys, values, additive), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [fast_attention, plain_attention])
def test_fully_masked_rows_have_a_finite_output_and_vanishing_mass(attention: object) -> None:
    torch.manual_seed(0)
    query, keys, values = random_inputs(2, 2, 1, 3, 6)
    mask = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    mask[1, :, 1] = False
    output, log_z = attention(query, keys, values, SCALE, mask=mask)  # type: ignore[operator]
    assert torch.isfinite(output).all()
    assert (log_z[1, :, 1] < -1e30).all()
    assert (log_z[0] > -100).all()


def test_values_of_another_width() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 5, 16)
    values = torch.randn(2, 2, 5, 24)
    found = fast_attention(query, keys, values, SCALE)
    torch.testing.assert_close(found, per_head(query, keys, values, torch.zeros(2, 4, 3, 5)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wanted", ["query", "keys", "values"])
def test_gradients_flow_whichever_input_wants_one(wanted: str) -> None:
    torch.manual_seed(0)
    inputs = dict(zip(("query", "keys", "values"), random_inputs(1, 2, 2, 3, 5), strict=True))
    inputs[wanted].requires_grad_(True)
    output, log_z = fast_attention(**inputs, scale=SCALE)
    (found,) = torch.autograd.grad(output.square().sum() + log_z.sum(), inputs[wanted], allow_unused=True)
    expected = per_head(*inputs.values(), torch.zeros(1, 4, 3, 5))
    loss = expected.output.square().sum() + expected.log_z.sum()
    torch.testing.assert_close(found, torch.autograd.grad(loss, inputs[wanted])[0], atol=1e-5, rtol=1e-4)


def test_bf16_is_as_close_as_bf16_allows() -> None:
    torch.manual_seed(0)
    query, keys, values = (t.bfloat16() for t in random_inputs(2, 2, 2, 3, 50))
    bias = torch.randn(50)
    mask = torch.rand(2, 1, 3, 50) < 0.8
    found = fast_attention(query, keys, values, SCALE, bias, mask)
    expected = plain_attention(query, keys, values, SCALE, bias, mask)
    assert found.output.dtype == found.log_z.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
