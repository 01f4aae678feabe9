"""Compressors of chunks: shapes, the entropies of their weights, and that each trains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ttmem.block_sparse import KINDS, ChunkCompressor
from ttmem.block_sparse.compressors import entropy_of
from ttmem.errors import BlockError
from ttmem.regression import AttentionPooling, TTRCompressor


@pytest.mark.parametrize("kind", KINDS)
def test_every_stream_has_its_own(kind: str) -> None:
    torch.manual_seed(0)
    compressor = ChunkCompressor(kind, 2, 8, 4)
    blocks = torch.randn(3, 2, 5, 4, 8)
    vectors, biases = compressor(blocks)
    assert vectors.shape == (3, 2, 5, 8)
    assert biases is None
    for stream, module in enumerate(compressor.compress):
        for c in range(5):
            torch.testing.assert_close(vectors[:, stream, c], module(blocks[:, stream, c]), rtol=1e-4, atol=1e-5)


def test_entropy_of_attention_bounds_the_log_normalizer() -> None:
    """sum_t p_t q.k_t + H(p) <= log sum_t exp(q.k_t), and equals it where the chunk's query is q."""
    torch.manual_seed(0)
    compressor = ChunkCompressor("attention", 1, 8, 4, entropy=True)
    module = compressor.compress[0]
    assert isinstance(module, AttentionPooling)
    blocks = torch.randn(2, 1, 3, 4, 8)
    vectors, biases = compressor(blocks)
    assert biases is not None

    def gap(q: torch.Tensor) -> torch.Tensor:
        return (blocks @ q * 8**-0.5).logsumexp(-1) - (vectors @ q * 8**-0.5 + biases)

    torch.testing.assert_close(gap(module.query), torch.zeros(2, 1, 3), rtol=0, atol=1e-5)
    assert (gap(torch.randn(8)) > 0).all()


def test_entropies_of_the_others() -> None:
    torch.manual_seed(0)
    blocks = torch.randn(2, 1, 3, 4, 8)
    _, biases = ChunkCompressor("mean", 1, 8, 4, entropy=True)(blocks)
    torch.testing.assert_close(biases, torch.full((2, 1, 3), math.log(4)))
    assert KINDS["concat"].weights is None
    torch.testing.assert_close(entropy_of(torch.tensor([1.0, 0.0])), torch.tensor(0.0))


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv"])
def test_entropy_of_a_regression_is_that_of_its_dual_weights(kind: str) -> None:
    torch.manual_seed(0)
    compressor = ChunkCompressor(kind, 1, 8, 4, entropy=True)
    module = compressor.compress[0]
    assert isinstance(module, TTRCompressor)
    if module.kernel is not None:
        nn.init.normal_(module.kernel)
    x = torch.randn(4, 8)
    _, biases = compressor(x.view(1, 1, 1, 4, 8))
    context = x
    if module.kernel is not None:
        padded = nn.functional.pad(x, (0, 0, 1, 1))
        context = sum(module.kernel[j] * padded[j : j + 4] for j in range(3))  # type: ignore[assignment]
    keys, v = nn.functional.normalize(x, dim=-1).double(), (context @ module.a).double()
    alpha = torch.linalg.solve(torch.eye(4) + keys / module.penalty().double() @ keys.T, v).abs()
    p = alpha / alpha.sum()
    assert biases is not None
    torch.testing.assert_close(biases[0, 0, 0].double(), -(p * p.log()).sum(), rtol=1e-3, atol=1e-4)
    biases.sum().backward()
    assert module.a.grad is not None
    assert module.a.grad.isfinite().all()


def test_queries_from_marks() -> None:
    torch.manual_seed(0)
    compressor = ChunkCompressor("attention", 2, 8, 4, entropy=True, mark=6)
    assert [name for name, _ in compressor.named_parameters()] == ["mark.weight"]
    blocks, marks = torch.randn(1, 2, 3, 4, 8), torch.randn(1, 3, 6)
    vectors, _ = compressor(blocks, marks)
    query = (compressor.mark.weight @ marks[0, 1])[8:]  # type: ignore[union-attr]
    p = (blocks[0, 1, 1] @ query * 8**-0.5).softmax(0)
    torch.testing.assert_close(vectors[0, 1, 1], p @ blocks[0, 1, 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mean"])
def test_each_compressor_has_something_to_learn(kind: str) -> None:
    """Which of four random tokens has the largest first channel: the mean cannot say, the others come closer to it."""
    torch.manual_seed(0)
    compressor = ChunkCompressor(kind, 1, 8, 4)
    optimizer = torch.optim.Adam(compressor.parameters(), lr=0.03)
    losses = []
    for _ in range(200):
        x = torch.randn(64, 1, 1, 4, 8)
        wanted = x[:, 0, 0][torch.arange(64), x[:, 0, 0, :, 0].argmax(-1)]
        loss = 1 - torch.cosine_similarity(compressor(x)[0][:, 0, 0], wanted, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.85 * sum(losses[:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["attention", "ttr", "ttr-conv"])
def test_autocast_does_not_round_an_entropy(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compressor = ChunkCompressor(kind, 1, 16, 8, entropy=True)
    blocks = torch.randn(1, 1, 32, 8, 16).to(dtype)
    _, exact = compressor(blocks.float())
    with torch.autocast("cpu", torch.bfloat16):
        vectors, biases = compressor(blocks)
    assert exact is not None
    assert biases is not None
    assert vectors.dtype == dtype
    torch.testing.assert_close(biases, exact, rtol=0, atol=1e-4)


def test_refused_compressors() -> None:
    for arguments, message in (
        (("median", 1, 8, 4), "no compressor 'median'"),
        (("concat", 1, 8, 4, True), "no weights"),
        (("ttr", 1, 8, 4, False, 32), "no query"),
    ):
        with pytest.raises(BlockError, match=message):
            ChunkCompressor(*arguments)
    with pytest.raises(BlockError, match=r"\[B, 2, C, S, d\]"):
        ChunkCompressor("mean", 2, 8, 4)(torch.zeros(1, 3, 5, 4, 8))
