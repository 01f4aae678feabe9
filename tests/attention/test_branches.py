"""The branch merge, query folding and bias folding, against one softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention.branches import (
    Branch,
    branch_attention,
    fold_bias,
    fold_ones,
    fold_queries,
    merge_branches,
    merge_outputs,
    unfold_queries,
)

SCALE = 0.31


def loop_softmax(scores: list[list[float]], values: list[list[float]]) -> tuple[list[list[float]], list[float]]:
    """Outputs and log-normalizers in Python's doubles; a score of -inf is masked. Every row must see something."""
    outputs, log_zs = [], []
    for row in scores:
        top = max(row)
        weights = [math.exp(score - top) for score in row]
        total = sum(weights)
        log_zs.append(top + math.log(total))
        channels = zip(*values, strict=True)
        outputs.append([sum(w * v for w, v in zip(weights, channel, strict=True)) / total for channel in channels])
    return outputs, log_zs


def loop_scores(query: Tensor, keys: Tensor, scale: float) -> list[list[float]]:
    return [[scale * sum(a * b for a, b in zip(q, k, strict=True)) for k in keys.tolist()] for q in query.tolist()]


@given(
    queries=st.integers(1, 4),
    memory_entries=st.integers(1, 6),
    new_entries=st.integers(1, 5),
    value_dim=st.sampled_from([3, 8]),
    seed=st.integers(0, 10**6),
)
def test_merged_branches_are_one_softmax_with_biases_on_the_memory_only(
    queries: int, memory_entries: int, new_entries: int, value_dim: int, seed: int
) -> None:
    torch.manual_seed(seed)
    query = torch.randn(queries, 8) * 2
    memory_keys, new_keys = torch.randn(memory_entries, 8), torch.randn(new_entries, 8)
    memory_values, new_values = torch.randn(memory_entries, value_dim), torch.randn(new_entries, value_dim)
    bias = torch.randn(memory_entries)
    visible = torch.rand(queries, new_entries) < 0.6

    memory = branch_attention(query, memory_keys, memory_values, SCALE, bias)
    new = branch_attention(query, new_keys, new_values, SCALE, mask=visible)
    output, log_z = merge_branches(memory, new)

    of_memory, of_new = loop_scores(query, memory_keys, SCALE), loop_scores(query, new_keys, SCALE)
    for row, sees in zip(of_new, visible.tolist(), strict=True):
        row[:] = [score if seen else -math.inf for score, seen in zip(row, sees, strict=True)]
    scores = [
        [score + b for score, b in zip(row, bias.tolist(), strict=True)] + other
        for row, other in zip(of_memory, of_new, strict=True)
    ]
    expected_output, expected_log_z = loop_softmax(scores, torch.cat([memory_values, new_values]).tolist())
    torch.testing.assert_close(output, torch.tensor(expected_output), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_z, torch.tensor(expected_log_z), atol=1e-5, rtol=1e-5)


def test_a_fully_masked_row_has_no_weight_and_no_nan() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    mask = torch.tensor([[True] * 5, [False] * 5, [True, False, True, False, True]])
    memory = branch_attention(query, keys, values, SCALE)
    masked = branch_attention(query, keys, values, SCALE, mask=mask)
    output, log_z = merge_branches(memory, masked)
    assert torch.isfinite(output).all()
    assert torch.isfinite(masked.output).all()
    torch.testing.assert_close(output[1], memory.output[1])
    torch.testing.assert_close(log_z[1], memory.log_z[1])


def test_two_fully_masked_branches_do_not_give_nan() -> None:
    query, keys, values = torch.randn(2, 4), torch.randn(5, 4), torch.randn(5, 4)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    branch = branch_attention(query, keys, values, SCALE, mask=nothing)
    assert torch.isfinite(merge_branches(branch, branch).output).all()


def test_a_branch_without_mass_leaves_the_other_as_it_is_also_backwards() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4), torch.randn(5, 4)
    new = branch_attention(query, keys, values, SCALE)
    nothing = Branch(torch.zeros(3, 4), torch.full((3,), -torch.inf))
    merged = merge_branches(nothing, new)
    torch.testing.assert_close(merged.output, new.output)
    torch.testing.assert_close(merged.log_z, new.log_z)
    (gradient,) = torch.autograd.grad(merged.output.square().sum() + merged.log_z.sum(), query)
    again = branch_attention(query, keys, values, SCALE)
    (expected,) = torch.autograd.grad(again.output.square().sum() + again.log_z.sum(), query)
    torch.testing.assert_close(gradient, expected)


def test_merging_is_symmetric_and_associative() -> None:
    torch.manual_seed(1)
    query = torch.randn(4, 6)
    a, b, c = (branch_attention(query, torch.randn(n, 6), torch.randn(n, 5), SCALE) for n in (2, 7, 3))
    left = merge_branches(merge_branches(a, b), c)
    right = merge_branches(b, merge_branches(c, a))
    torch.testing.assert_close(left.output, right.output, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(left.log_z, right.log_z, atol=1e-5, rtol=1e-5)


def test_outputs_can_be_merged_without_the_normalizer() -> None:
    torch.manual_seed(6)
    query = torch.randn(4, 6) * 3
    a, b = (branch_attention(query, torch.randn(n, 6), torch.randn(n, 5), SCALE) for n in (2, 7))
    torch.testing.assert_close(merge_outputs(a, b), merge_branches(a, b).output)


def test_large_scores_do_not_overflow() -> None:
    query = torch.full((1, 4), 30.0)
    keys, values = torch.stack([torch.full((4,), 30.0), torch.full((4,), -30.0)]), torch.eye(2)
    one, other = (branch_attention(query, order, values, 1.0) for order in (keys, keys.flip(0)))
    merged = merge_branches(one, other)
    torch.testing.assert_close(merged.output, torch.tensor([[0.5, 0.5]]), atol=1e-3, rtol=0)
    torch.testing.assert_close(merged.log_z, torch.tensor([3600 + math.log(2)]))


def test_half_precision_inputs_are_scored_in_fp32() -> None:
    torch.manual_seed(2)
    query, keys, values = (torch.randn(n, 16).bfloat16() for n in (3, 9, 9))
    branch = branch_attention(query, keys, values, SCALE)
    expected = branch_attention(query.float(), keys.float(), values.float(), SCALE)
    assert branch.output.dtype == branch.log_z.dtype == torch.float32
    torch.testing.assert_close(branch, expected)


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(1, 4),
    dim=st.integers(1, 5),
)
def test_folding_queries_keeps_each_with_its_head_and_unfolding_undoes_it(
    batch: int, heads: int, group: int, length: int, dim: int
) -> None:
    query = torch.arange(batch * heads * group * length * dim, dtype=torch.float32)
    query = query.view(batch, heads * group, length, dim)
    folded = fold_queries(query, heads)
    assert folded.shape == (heads, batch * group * length, dim)
    for head in range(heads):
        own = query[:, head * group : (head + 1) * group].reshape(-1, dim)
        assert sorted(folded[head].tolist()) == sorted(own.tolist())
    output, log_z = unfold_queries(Branch(folded, folded[..., 0]), batch, length)
    assert torch.equal(output, query)
    assert torch.equal(log_z, query[..., 0])


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_folded_bias_gives_the_biased_scores(multiple: int) -> None:
    torch.manual_seed(3)
    query, keys, bias = torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.randn(2, 7) * 3
    wide_keys = fold_bias(keys, bias, SCALE, multiple)
    wide_query = fold_ones(query, wide_keys.shape[-1])
    assert wide_keys.shape[-1] == wide_query.shape[-1] == (13 if multiple == 1 else 16)
    scores = SCALE * (wide_query @ wide_keys.transpose(-1, -2))
    expected = SCALE * (query @ keys.transpose(-1, -2)) + bias.unsqueeze(-2)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_gradients_pass_through_a_folded_bias() -> None:
    torch.manual_seed(4)
    query, values = torch.randn(5, 8), torch.randn(6, 8)
    keys, bias = torch.randn(6, 8, requires_grad=True), torch.randn(6, requires_grad=True)
    wide = fold_bias(keys, bias, SCALE)
    folded = branch_attention(fold_ones(query, wide.shape[-1]), wide, values, SCALE)
    plain = branch_attention(query, keys, values, SCALE, bias)
    found = torch.autograd.grad(folded.output.square().sum() + folded.log_z.sum(), (keys, bias))
    expected = torch.autograd.grad(plain.output.square().sum() + plain.log_z.sum(), (keys, bias))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_channels_are_closer_than_one_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    keys, bias = torch.zeros(500, 6, dtype=dtype), torch.randn(500) * 3
    query = torch.zeros(1, 6, dtype=dtype)
    wide_keys = fold_bias(keys, bias, SCALE)
    wide_query = fold_ones(query, wide_keys.shape[-1])
    assert wide_keys.dtype == wide_query.dtype == dtype
    two = SCALE * (wide_query.float() @ wide_keys.float().T)[0]
    one = SCALE * (bias / SCALE).to(dtype).float()
    error_of_two, error_of_one = (two - bias).abs().max(), (one - bias).abs().max()
    assert error_of_two < 0.05 * error_of_one
