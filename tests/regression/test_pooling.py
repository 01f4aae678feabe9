"""The baselines, each against its definition, behind the operator's interface."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ttmem.errors import BlockError
from ttmem.regression import AttentionPooling, ConcatProjection, MeanPooling, MLPMerger, TTRCompressor

DIM, TOKENS = 12, 4


@pytest.fixture(params=["mean", "attention", "concat", "mlp", "ttr", "ttr-conv"])
def compressor(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return {
        "mean": lambda: MeanPooling(),
        "attention": lambda: AttentionPooling(DIM),
        "concat": lambda: ConcatProjection(DIM, TOKENS),
        "mlp": lambda: MLPMerger(DIM, TOKENS),
        "ttr": lambda: TTRCompressor(DIM),
        "ttr-conv": lambda: TTRCompressor(DIM, "1d"),
    }[request.param]()


def test_one_interface(compressor: nn.Module) -> None:
    x = torch.randn(2, 3, TOKENS, DIM, requires_grad=True)
    found = compressor(x)
    assert found.shape == (2, 3, DIM)
    torch.testing.assert_close(compressor(x[0]), found[0])
    torch.testing.assert_close(compressor(x, torch.ones(2, 3, TOKENS, dtype=torch.bool)), found)
    found.sum().backward()
    assert all(p.grad is not None for p in (x, *compressor.parameters()))
    assert compressor.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_what_is_masked_is_not_read(compressor: nn.Module) -> None:
    x = torch.randn(3, TOKENS, DIM)
    mask = torch.tensor([[True, False, True, True], [False, False, True, False], [False] * 4])
    hidden = x.masked_fill(~mask.unsqueeze(-1), float("nan")).requires_grad_()
    found = compressor(hidden, mask)
    assert found.isfinite().all()
    torch.testing.assert_close(found, compressor(x, mask))
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in (hidden, *compressor.parameters()))


@pytest.mark.parametrize("kind", ["mean", "attention"])
def test_masked_pooling_is_pooling_of_the_rest(kind: str) -> None:
    torch.manual_seed(0)
    pooling = MeanPooling() if kind == "mean" else AttentionPooling(DIM)
    x, mask = torch.randn(1, 5, DIM), torch.tensor([[True, False, True, True, False]])
    torch.testing.assert_close(pooling(x, mask), pooling(x[:, [0, 2, 3]]))
    assert (pooling(x, torch.zeros(1, 5, dtype=torch.bool)) == 0).all()
    assert (pooling(x[:, :0]) == 0).all()


def test_definitions() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, DIM)
    attention, concat, mlp = AttentionPooling(DIM), ConcatProjection(DIM, TOKENS, 7), MLPMerger(DIM, TOKENS, 20, 7)
    weights = torch.softmax(x @ attention.query / DIM**0.5, -1)
    torch.testing.assert_close(attention(x), torch.einsum("bt,btd->bd", weights, x))
    own = torch.randn(2, DIM)
    weights = torch.softmax(torch.einsum("btd,bd->bt", x, own) / DIM**0.5, -1)
    torch.testing.assert_close(attention(x, query=own), torch.einsum("bt,btd->bd", weights, x))
    torch.testing.assert_close(concat(x), x.reshape(2, -1) @ concat.projection.weight.T)
    torch.testing.assert_close(mlp(x), mlp.down(nn.functional.gelu(mlp.up(x.reshape(2, -1)))))
    assert mlp.up.weight.shape == (20, TOKENS * DIM)
    assert MLPMerger(DIM, TOKENS).up.weight.shape == (TOKENS * DIM, TOKENS * DIM)


@pytest.mark.parametrize("kind", [ConcatProjection, MLPMerger])
def test_another_number_of_tokens_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(BlockError, match="blocks of 4 tokens, not 5"):
        kind(DIM, TOKENS)(torch.zeros(1, 5, DIM))


def test_a_mask_is_broadcast(compressor: nn.Module) -> None:
    x = torch.randn(3, TOKENS, DIM)
    for mask in (torch.tensor([[True], [False], [True]]), torch.tensor([True, False, True, True])):
        torch.testing.assert_close(compressor(x, mask), compressor(x, mask.expand(3, TOKENS)))
