"""Whether a fast implementation may stand in for a plain one, at three levels: kernel, next token, task.

Fast weights go on from what they have written, so rounding can grow from chunk to chunk. A kernel is therefore checked
alone, in the distributions of the next token of a model that runs it, and in that model's answers (TTCD, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Operator = Callable[..., Tensor | tuple[Tensor, ...]]
QUANTILE = 0.99


@dataclass(frozen=True)
class Error:
    """Of one result against the same in fp64: the largest, and the root mean square, relative to the result's own."""

    largest: float
    typical: float

    @classmethod
    def of(cls, found: Tensor, exact: Tensor) -> Error:
        size = exact.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        difference = found.double() - exact
        return cls(float(difference.abs().max() / size), float(difference.square().mean().sqrt() / size))


@dataclass(frozen=True)
class KernelErrors:
    """Of one output or gradient: the fast form and the plain one in the same dtype, each against the plain one in fp64.

    equal: the part of the numbers in which the fast form and the plain one agree to the bit.
    """

    fast: Error
    plain: Error
    equal: float

    @property
    def factor(self) -> float:
        """How many times as large as the plain form's the fast one's typical error is; below 1 it is more exact."""
        if self.plain.typical == 0.0:
            return 0.0 if self.fast.typical == 0.0 else math.inf
        return self.fast.typical / self.plain.typical


def kernel_errors(
    fast: Operator,
    plain: Operator,
    inputs: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
) -> list[KernelErrors]:
    """The first level, with `inputs` rounded to `dtype`: of every output, then of every input's gradient.

    fast, plain: the same function of the inputs, to one tensor or a tuple of them; plain takes fp64 too. Gradients are
    those of the outputs' products with fixed random numbers.
    """
    leaves = [tensor.detach().to(dtype) for tensor in inputs]
    exact = _results(plain, [leaf.double() for leaf in leaves], gradients, dtype)
    of_fast, of_plain = (_results(form, leaves, gradients, dtype) for form in (fast, plain))
    return [
        KernelErrors(Error.of(own, true), Error.of(other, true), float((own == other).double().mean()))
        for own, other, true in zip(of_fast, of_plain, exact, strict=True)
    ]


def _results(form: Operator, leaves: Sequence[Tensor], gradients: bool, dtype: torch.dtype) -> list[Tensor]:
    leaves = [leaf.clone().requires_grad_(gradients) for leaf in leaves]
    found = form(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    if not gradients:
        return outputs
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(out.shape, generator=generator).to(dtype).to(out) for out in outputs]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, directions)]


@dataclass(frozen=True)
class DistributionChange:
    """Over positions: KL divergence (nats) and total variation of the next token's distribution, median and 99th
    percentile, and the part of positions whose most likely token differs."""

    kl_median: float
    kl_high: float
    variation_median: float
    variation_high: float
    flips: float


def distribution_change(plain: Tensor, fast: Tensor) -> DistributionChange:
    """The second level: logits [.., V] of a model that runs the plain form, and of the same model with the fast one."""
    p, q = (logits.detach().double().flatten(0, -2).log_softmax(-1) for logits in (plain, fast))
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    variation = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    flips = (p.argmax(-1) != q.argmax(-1)).double().mean()
    return DistributionChange(
        float(kl.median()),
        float(kl.quantile(QUANTILE)),
        float(variation.median()),
        float(variation.quantile(QUANTILE)),
        float(flips),
    )


@dataclass(frozen=True)
class TaskChange:
    """Parts of a task's examples: right with the plain form, right with the fast one, answered differently."""

    plain: float
    fast: float
    changed: float


def task_change(plain: Sequence[object], fast: Sequence[object], right: Sequence[object]) -> TaskChange:
    """The third level: both models' answers to the same examples, and the right ones."""
    if not len(plain) == len(fast) == len(right) > 0:
        raise ValueError(f"{len(plain)} and {len(fast)} answers to {len(right)} examples")
    count = len(right)
    return TaskChange(
        sum(a == b for a, b in zip(plain, right, strict=True)) / count,
        sum(a == b for a, b in zip(fast, right, strict=True)) / count,
        sum(a != b for a, b in zip(plain, fast, strict=True)) / count,
    )
