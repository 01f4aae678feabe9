"""Short convolutions that start anew at every chunk."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem.fast_weights.convolution import centred_convolution, chunk_convolution
from ttmem.fast_weights.naive import convolve


@given(st.integers(1, 17), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_it_is_the_formula(T: int, C: int, taps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, T, 3, dtype=torch.float64, generator=generator)
    kernel = torch.randn(taps, 3, dtype=torch.float64, generator=generator)
    found = chunk_convolution(x, kernel, torch.arange(T).unsqueeze(0) % C)
    torch.testing.assert_close(found, torch.stack([convolve(row, kernel, C) for row in x]))


def test_its_gradient() -> None:
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    kernel = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    place = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [3, 0, 0, 1, 2, 3, 4]])
    torch.autograd.gradcheck(lambda a, b: chunk_convolution(a, b, place), (x, kernel))


def test_the_centred_one_stays_within_its_chunk() -> None:
    T, C = 11, 4
    x, kernel = torch.randn(1, T, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    place = torch.arange(T).unsqueeze(0) % C
    expected = torch.zeros_like(x)
    for t in range(T):
        for j in range(-2, 3):
            if 0 <= t + j < T and (t + j) // C == t // C:
                expected[0, t] += kernel[2 + j] * x[0, t + j]
    torch.testing.assert_close(centred_convolution(x, kernel, place, C - place), expected)
