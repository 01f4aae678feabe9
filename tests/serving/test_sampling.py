"""Draws follow their distribution, the nucleus is the definition's, a seed is a seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem.serving.sampling import Sampler, Sampling, choose, nucleus


def plain_nucleus(probabilities: list[float], top_p: float) -> set[int]:
    """The definition: the most likely tokens, taken until their mass is at least top_p."""
    kept, mass = set(), 0.0
    for token in sorted(range(len(probabilities)), key=lambda i: -probabilities[i]):
        if mass >= top_p:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


@given(weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=600, unique=True), top_p=st.floats(0.01, 1.0))
def test_nucleus(weights: list[int], top_p: float) -> None:
    total = sum(weights)
    probabilities = [weight / total for weight in weights]
    _, tokens = nucleus(torch.tensor(probabilities, dtype=torch.float64), top_p)
    found, wanted = set(tokens.tolist()), plain_nucleus(probabilities, top_p)
    assert len(found ^ wanted) <= 1  # a sum may round across top_p


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.8)])
def test_frequencies(temperature: float, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    wanted = (logits / temperature).softmax(0)
    wanted = torch.where(torch.tensor([i in plain_nucleus(wanted.tolist(), top_p) for i in range(5)]), wanted, 0.0)
    wanted /= wanted.sum()
    sampler = Sampler(Sampling(temperature, top_p, seed=3))
    draws = torch.tensor([sampler.draw(logits) for _ in range(4000)])
    torch.testing.assert_close(draws.bincount(minlength=5) / 4000, wanted, atol=0.03, rtol=0)


def test_seeds() -> None:
    logits = torch.zeros(50)
    draws = [[Sampler(Sampling(1.0, 1.0, seed)).draw(logits) for _ in range(1)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    free = {Sampler(Sampling(1.0)).draw(torch.zeros(10**6)) for _ in range(5)}
    assert len(free) > 1
    Sampler(Sampling(1.0, 1.0, -(2**63)))


def test_greedy_and_what_is_no_number() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [torch.nan, 0.0, 1.0], [torch.inf, 0.0, 1.0], [-torch.inf, 0.0, 1.0]])
    greedy = Sampler(Sampling())
    assert choose(logits, [greedy] * 4) == [1, None, None, 2]
    assert choose(logits[:1], [Sampler(Sampling(1e-9, seed=1))]) == [1]
