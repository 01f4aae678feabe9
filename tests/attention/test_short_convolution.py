"""The convolution on chunks equals torch's over each chunk alone, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention import short_convolution as module
from ttmem.attention.short_convolution import short_convolution, short_convolution_reference
from ttmem.errors import BlockError


def chunk_by_chunk(x: Tensor, weight: Tensor) -> Tensor:
    """torch's causal depthwise convolution, a chunk at a time, features first."""
    kernel, features = weight.shape[1], weight.shape[0]
    answer = torch.zeros_like(x)
    for batch in range(x.shape[0]):
        for chunk in range(x.shape[1]):
            padded = F.pad(x[batch, chunk].T[None], (kernel - 1, 0))
            answer[batch, chunk] = F.conv1d(padded, weight[:, None], groups=features)[0].T
    return answer


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 4), st.integers(1, 40), st.integers(1, 9)),
    kernel=st.integers(1, 6),
    tile=st.sampled_from([1, 30, 2**17]),
    seed=st.integers(0, 99),
)
def test_the_definition_and_its_gradients(shape: tuple[int, int, int, int], kernel: int, tile: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, direction = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    weight = torch.randn(shape[-1], kernel, generator=generator, dtype=torch.float64).requires_grad_()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TILE", tile)
        for form in (short_convolution, short_convolution_reference, chunk_by_chunk):
            y = form(x, weight)
            results.append((y, *torch.autograd.grad(y, (x, weight), direction)))
    for found in results[:2]:
        torch.testing.assert_close(found, results[2])


def test_identity_and_shift() -> None:
    """The last tap meets the token itself, the one before it the token before; chunks do not see each other."""
    x = torch.arange(12.0).view(1, 2, 3, 2)
    identity, shift = torch.zeros(2, 2, 5)
    identity[:, -1] = shift[:, -2] = 1
    assert torch.equal(short_convolution(x, identity), x)
    shifted = short_convolution(x, shift)
    assert torch.equal(shifted[:, :, 1:], x[:, :, :-1])
    assert (shifted[:, :, 0] == 0).all()


def test_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 7, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(short_convolution, (x, weight))
    assert torch.autograd.gradcheck(lambda w: short_convolution(x.detach(), w), (weight,))
    assert torch.autograd.gradcheck(lambda x: short_convolution(x, weight.detach()), (x,))


def test_half_precision_and_other_layouts() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 3, 8).bfloat16().transpose(1, 2).requires_grad_()
    weight = torch.randn(8, 5).bfloat16().requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    found, expected = short_convolution(x, weight), short_convolution_reference(*exact)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() < 0.01 * expected.norm()
    gradients = torch.autograd.grad(found.sum(), (x, weight)), torch.autograd.grad(expected.sum(), exact)
    for f, e in zip(*gradients, strict=True):
        assert (f.double() - e).norm() < 0.01 * e.norm()


def test_no_chunks() -> None:
    assert short_convolution(torch.zeros(2, 0, 4, 3), torch.zeros(3, 5)).shape == (2, 0, 4, 3)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(4), torch.zeros(4, 5)),
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(4, 5)),
        (torch.zeros(2, 4), torch.zeros(3, 5)),
        (torch.zeros(2, 4), torch.zeros(4, 0)),
        (torch.zeros(2, 4), torch.zeros(4)),
        (torch.zeros(2, 4), torch.zeros(4, 5, dtype=torch.float64)),
    ],
)
def test_refusals(x: Tensor, weight: Tensor) -> None:
    with pytest.raises(BlockError):
        short_convolution(x, weight)
