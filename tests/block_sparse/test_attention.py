"""The attention for all queries at once equals the one query by query, in values and gradients."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention.branches import branch_attention
from ttmem.block_sparse import Sparsity, Streams, block_sparse_attention, naive_attention
from ttmem.block_sparse import attention as attention_module
from ttmem.block_sparse.attention import fusion_weights, sliding_attention, softmax_branch
from ttmem.errors import BlockError

CASES: dict[str, dict[str, Any]] = {
    "plain": {"length": 23},
    "shorter than the window": {"length": 5},
    "one token": {"length": 1},
    "whole chunks": {"length": 24},
    "window of one": {"length": 14, "window": 1},
    "more wanted than there are": {"length": 23, "top_k": 50},
    "one selected": {"length": 30, "top_k": 1, "window": 3},
    "chunks of one": {"length": 12, "chunk": 1, "top_k": 3},
    "chunk longer than the window": {"length": 26, "chunk": 8, "window": 3},
    "aligned window": {"length": 27, "align_window": True},
    "sink": {"length": 23, "sink": True},
    "no biases": {"length": 23, "biased": False},
    "left padding": {"length": 25, "starts": [0, 9]},
    "left padding, aligned, sink": {"length": 25, "starts": [3, 14], "align_window": True, "sink": True},
    "a row of padding alone": {"length": 12, "starts": [12, 0]},
    "last queries": {"length": 31, "queries": 3},
    "last queries, padded, aligned": {"length": 31, "queries": 3, "starts": [2, 11], "align_window": True},
}


def make_streams(
    length: int,
    queries: int | None = None,
    chunk: int = 4,
    starts: list[int] | None = None,
    biased: bool = True,
    seed: int = 0,
    heads: int = 2,
    group: int = 2,
    **others: Any,
) -> tuple[Streams, Sparsity]:
    """Random streams of two rows. Keys for windows are those of the slots that windows reach."""
    generator = torch.Generator().manual_seed(seed)
    sparsity = Sparsity(chunk, others.pop("top_k", 2), others.pop("window", 6), **others)
    dim, queries = 8, length if queries is None else queries
    near = min(length, queries + sparsity.reach - 1)

    def draw(*shape: int) -> Tensor:
        return (2 * torch.randn(2, *shape, generator=generator)).requires_grad_()

    streams = Streams(
        query=draw(heads * group, queries, dim),
        keys=draw(heads, near, dim),
        values=draw(heads, near, dim),
        far_query=draw(heads * group, queries, dim),
        far_keys=draw(heads, length, dim),
        far_values=draw(heads, length, dim),
        scoring=draw(heads * group, queries, dim),
        summaries=draw(heads, length // chunk, dim),
        biases=draw(heads, length // chunk) if biased else None,
        starts=None if starts is None else torch.tensor(starts),
    )
    return streams, sparsity


def leaves(streams: Streams) -> dict[str, Tensor]:
    named = {f.name: getattr(streams, f.name) for f in fields(streams) if f.name != "starts"}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def without_padding(streams: Streams, output: Tensor) -> Tensor:
    if streams.starts is None:
        return output
    real = streams.slots >= streams.starts.unsqueeze(1)
    return output * real[:, None, :, None]


def check(streams: Streams, sparsity: Sparsity, form: str) -> None:
    expected = naive_attention(streams, sparsity)
    found = block_sparse_attention(streams, sparsity, form)  # type: ignore[arg-type]
    assert found.isfinite().all()
    found = without_padding(streams, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    inputs = list(leaves(streams).values())
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * direction).sum(), inputs, allow_unused=True, materialize_grads=True)
    given_ = torch.autograd.grad((found * direction).sum(), inputs, allow_unused=True, materialize_grads=True)
    for name, one, other in zip(leaves(streams), given_, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("form", ["dense", "gathered", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_naive_one(case: str, form: str) -> None:
    check(*make_streams(**CASES[case]), form)


@given(
    length=st.integers(1, 22),
    chunk=st.integers(1, 6),
    window=st.integers(1, 9),
    top_k=st.integers(1, 8),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    align_window=st.booleans(),
    sink=st.booleans(),
    padding=st.integers(0, 30),
    form=st.sampled_from(["dense", "gathered"]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=12)
def test_any_shape(length: int, padding: int, form: str, **options: Any) -> None:
    check(*make_streams(length, starts=[0, min(padding, length)], **options), form)


@pytest.mark.parametrize("case", ["plain", "left padding, aligned, sink", "last queries"])
def test_blocks_of_queries_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, sparsity = make_streams(**CASES[case])
    whole = block_sparse_attention(streams, sparsity)
    monkeypatch.setattr(attention_module, "block_size", lambda sparsity: 5)
    torch.testing.assert_close(block_sparse_attention(streams, sparsity), whole)
    check(streams, sparsity, "auto")


def test_later_tokens_change_nothing_before() -> None:
    streams, sparsity = make_streams(28)
    changed = {name: tensor.detach().clone() for name, tensor in leaves(streams).items()}
    cut = 17
    for name, tensor in changed.items():
        if name not in ("summaries", "biases"):
            tensor[:, :, cut:] += 5.0
    changed["summaries"][:, :, cut // sparsity.chunk :] += 5.0
    changed["biases"][:, :, cut // sparsity.chunk :] += 5.0
    before = block_sparse_attention(streams, sparsity)[:, :, :cut]
    after = block_sparse_attention(replace(streams, **changed), sparsity)
    torch.testing.assert_close(after[:, :, :cut], before, rtol=0, atol=0)
    assert (after[:, :, cut:] - block_sparse_attention(streams, sparsity)[:, :, cut:]).abs().min() > 0


def test_exact_summaries_make_it_full_attention() -> None:
    """With s_c the chunk's own log-normalizer, all chunks selected and an aligned window, it is one softmax."""
    streams, sparsity = make_streams(21, chunk=4, window=5, top_k=9, align_window=True, group=1, biased=False)
    keys, values, query = streams.far_keys, streams.far_values, streams.far_query
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    for t in range(21):
        last = replace(
            streams,
            query=query[:, :, t : t + 1],
            far_query=query[:, :, t : t + 1],
            keys=keys[:, :, : t + 1],
            values=values[:, :, : t + 1],
            far_keys=keys[:, :, : t + 1],
            far_values=values[:, :, : t + 1],
        )
        count = (t + 1) // 4
        scores = (query[:, :, t : t + 1] @ keys[:, :, : count * 4].mT * 8**-0.5).unflatten(-1, (count, 4))
        log_z = scores.logsumexp(-1)  # [B, H, 1, count]
        exact = replace(
            last, scoring=torch.zeros_like(last.query), summaries=torch.zeros(2, 2, count, 8), biases=log_z[:, :, 0]
        )
        found = block_sparse_attention(exact, sparsity)
        torch.testing.assert_close(found[:, :, 0], expected[:, :, t], rtol=1e-4, atol=1e-5)


def test_a_group_selects_together_what_one_of_its_heads_needs_most() -> None:
    streams, sparsity = make_streams(32, top_k=1, queries=1, heads=1, group=2, biased=False)
    summaries = torch.zeros_like(streams.summaries)
    summaries[:, :, 2, 0] = 50.0  # the first head's
    summaries[:, :, 4, 1] = 8.0  # the second head's, with a smaller share
    scoring = torch.zeros_like(streams.scoring)
    scoring[:, 0, :, 0] = 1.0
    scoring[:, 1, :, 1] = 1.0
    streams = replace(streams, summaries=summaries, scoring=scoring)
    grown = streams.far_values.detach().clone()
    grown[:, :, 8:12] += 7.0
    change = block_sparse_attention(replace(streams, far_values=grown), sparsity) - block_sparse_attention(
        streams, sparsity
    )
    assert (change.abs().amax((0, 2, 3)) > 1e-3).all()  # both heads read chunk 2
    grown = streams.far_values.detach().clone()
    grown[:, :, 16:20] += 7.0
    same = block_sparse_attention(replace(streams, far_values=grown), sparsity)
    torch.testing.assert_close(same, block_sparse_attention(streams, sparsity), rtol=0, atol=0)


@pytest.mark.parametrize("sink", [False, True])
def test_fusion_weights(sink: bool) -> None:
    scores, log_z = torch.tensor([[0.0, 1.0]]), torch.tensor([2.0])
    entries = [0.0, 1.0, 2.0] + ([0.0] if sink else [])
    expected = torch.tensor([entries]).softmax(-1)[:, :3]
    torch.testing.assert_close(fusion_weights(scores, log_z, sink), expected)
    assert (fusion_weights(scores, log_z, sink).sum() < 1 - 1e-3) == sink


def test_scores_learn_and_indices_do_not() -> None:
    """The gradient of a summary that is not selected is zero; of one that is, it is not."""
    streams, sparsity = make_streams(23, top_k=1, queries=1, heads=1, group=1, biased=False)
    (gradient,) = torch.autograd.grad(block_sparse_attention(streams, sparsity).square().sum(), [streams.summaries])
    moved = gradient.abs().amax((1, 3)) > 0
    assert (moved.sum(1) == 1).all()


def test_the_log_normalizer_is_read_off_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 7, 5, generator=generator, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 7, 7, generator=generator) > 0.5
    mask[..., 0] = True
    expected = branch_attention(query, keys, values, 2.0, mask=mask)
    found = softmax_branch((2.0 * query @ keys.mT).masked_fill(~mask, torch.finfo(torch.float32).min), values)
    torch.testing.assert_close(tuple(found), tuple(expected))
    directions = tuple(torch.randn(part.shape, generator=generator) for part in expected)
    one = torch.autograd.grad(tuple(found), [query, keys, values], directions)
    other = torch.autograd.grad(tuple(expected), [query, keys, values], directions)
    torch.testing.assert_close(one, other)


def test_sliding_is_a_masked_softmax() -> None:
    streams, _ = make_streams(40)
    sparsity = Sparsity(4, 1, 7)
    i, j = torch.arange(40).unsqueeze(1), torch.arange(40)
    mask = (j <= i) & (j > i - 7)
    query, keys, values = streams.far_query, streams.far_keys, streams.far_values
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    torch.testing.assert_close(sliding_attention(query, keys, values, sparsity), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("values", [{"chunk": 0}, {"top_k": -1}, {"window": 0}, {"window": 2.0}, {"chunk": True}])
def test_refused_sparsities(values: dict[str, Any]) -> None:
    with pytest.raises(BlockError, match=f"sparsity's {next(iter(values))}"):
        Sparsity(**values)


def test_refused_attention() -> None:
    streams, sparsity = make_streams(length=23)
    with pytest.raises(BlockError, match="no form 'gather'"):
        block_sparse_attention(streams, sparsity, "gather")  # type: ignore[arg-type]
    with pytest.raises(BlockError, match="summaries"):
        block_sparse_attention(replace(streams, summaries=streams.summaries[:, :, :1]), sparsity)
