"""Every engine and form equals the definition, forward and backward, whatever is asked of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression import cpu, operator, plain, ttr_compress
from ttmem.regression.reference import penalty, primal

Inputs = Callable[..., tuple[Tensor, Tensor, Tensor]]
Oracle = Callable[..., Tensor]

SOLVERS = [{"engine": "plain", "form": "dual"}, {"engine": "plain", "form": "primal"}, {"engine": "cpu"}]
RULES = [{}, {"normalize_keys": False}, {"normalize_targets": True}]


@pytest.fixture(params=SOLVERS, ids=["dual", "primal", "cpu"])
def solver(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param["engine"] == "cpu" and not cpu.available():
        pytest.skip("the CPU kernel cannot be built here")
    return request.param


@pytest.mark.parametrize("rules", RULES, ids=["paper", "raw keys", "normalised targets"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("given_targets", [False, True])
@pytest.mark.parametrize(("T", "d"), [(1, 3), (4, 40), (9, 5), (66, 19)])
def test_answer_and_gradients(
    solver: dict[str, str],
    rules: dict[str, bool],
    masked: bool,
    given_targets: bool,
    T: int,
    d: int,
    make_inputs: Inputs,
    oracle: Oracle,
) -> None:
    torch.manual_seed(0)
    leaves = [t.requires_grad_() for t in make_inputs(3, T, d)]
    mask = torch.rand(3, T) < 0.6 if masked else None
    targets = torch.randn(3, T, dtype=torch.float64, requires_grad=True) if given_targets else None
    found = ttr_compress(*leaves, mask=mask, targets=targets, **rules, **solver)
    expected = oracle(*leaves, mask, targets, **rules)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    wanted = [leaves[0], leaves[2], leaves[1] if targets is None else targets]
    direction = torch.randn_like(found)
    for f, e in zip(*(torch.autograd.grad(h, wanted, direction) for h in (found, expected)), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-6, atol=1e-7)


def test_gradcheck(solver: dict[str, str], make_inputs: Inputs) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(2, 3, 4)]
    mask = torch.tensor([[True, True, True], [False, True, True]])
    assert torch.autograd.gradcheck(lambda *t: ttr_compress(*t, mask=mask, **solver), leaves)


@given(
    T=st.integers(1, 12), d=st.integers(1, 24), blocks=st.integers(1, 4), seed=st.integers(0, 10**6), cut=st.booleans()
)
def test_dual_equals_primal(
    T: int, d: int, blocks: int, seed: int, cut: bool, make_inputs: Inputs, oracle: Oracle
) -> None:
    x, a, rho = make_inputs(blocks, T, d, seed)
    mask = torch.rand(blocks, T, generator=torch.Generator().manual_seed(seed)) < 0.5 if cut else None
    expected = oracle(x, a, rho, mask, form=primal)
    for choice in ({"form": "dual"}, {"form": "primal"}, {}, {"engine": "plain"}):
        torch.testing.assert_close(ttr_compress(x, a, rho, mask=mask, **choice), expected, rtol=1e-7, atol=1e-7)


@given(T=st.integers(1, 10), kept=st.integers(0, 10), seed=st.integers(0, 10**6), order=st.randoms())
def test_a_masked_block_is_a_shorter_block(
    T: int, kept: int, seed: int, order: object, make_inputs: Inputs
) -> None:
    x, a, rho = make_inputs(1, T, 16, seed)
    places = sorted(order.sample(range(T), min(kept, T)))  # type: ignore[attr-defined]
    mask = torch.zeros(1, T, dtype=torch.bool)
    mask[0, places] = True
    garbage = x.masked_fill(~mask.unsqueeze(-1), float("nan"))
    for engine in ("auto", "plain"):
        found = ttr_compress(garbage, a, rho, mask=mask, engine=engine)
        torch.testing.assert_close(found, ttr_compress(x[:, places], a, rho, engine=engine))
        assert found.isfinite().all()


@given(T=st.integers(2, 10), seed=st.integers(0, 10**6))
def test_the_order_of_tokens_does_not_matter(T: int, seed: int, make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(2, T, 16, seed)
    shuffled = x[:, torch.randperm(T, generator=torch.Generator().manual_seed(seed))]
    torch.testing.assert_close(ttr_compress(shuffled, a, rho), ttr_compress(x, a, rho), rtol=1e-9, atol=1e-9)


@given(k=st.integers(2, 40), seed=st.integers(0, 10**6), log_penalty=st.floats(-3, 1))
def test_repeated_tokens_add_less_than_linearly(k: int, seed: int, log_penalty: float, make_inputs: Inputs) -> None:
    """A unit token k times: h = k v / (k + lambda), not k v / (1 + lambda)."""
    x, a, _ = make_inputs(1, 1, 64, seed)
    lam = 10**log_penalty
    rho = torch.tensor(lam, dtype=torch.float64).expm1().log()
    once, often = (ttr_compress(x.expand(1, n, 64), a, rho) for n in (1, k))
    torch.testing.assert_close(often / once, torch.full((1, 64), k * (1 + lam) / (k + lam)).double(), rtol=1e-4, atol=0)
    assert (often / once < k).all()


def test_a_distinct_token_survives_many_copies_of_another(make_inputs: Inputs) -> None:
    """What the answer says along the distinct token's direction; the mean loses it with the number of copies."""
    x, a, _ = make_inputs(1, 2, 256, seed=3)
    rho = torch.tensor(-4.6, dtype=torch.float64)
    background, distinct = x[:, :1], x[:, 1:]
    direction = distinct[0, 0] / distinct[0, 0].norm()
    alone = ttr_compress(distinct, a, rho)[0] @ direction
    block = torch.cat([background.expand(1, 31, 256), distinct], 1)
    kept = ttr_compress(block, a, rho)[0] @ direction
    assert abs(kept / alone - 1) < 0.05
    assert abs((block.mean(1)[0] - background[0, 0] * 31 / 32) @ direction / distinct.norm()) < 0.04


@pytest.mark.parametrize("collapsing", [{"normalize_targets": True}, {"normalize_keys": False}])
def test_symmetric_normalisation_collapses_to_a(collapsing: dict[str, bool], make_inputs: Inputs) -> None:
    """With keys and targets both normalised, or neither, a itself solves the regression, whatever the block says."""
    x, a, _ = make_inputs(5, 40, 16)
    rho = torch.tensor(-9.0, dtype=torch.float64)
    collapsed = ttr_compress(x, a, rho, **collapsing)
    torch.testing.assert_close(collapsed, a.expand(5, 16), atol=2e-3, rtol=2e-3)
    paper = ttr_compress(x, a, rho)
    assert (paper - a).norm(dim=-1).min() > 0.5 * a.norm()
    assert torch.pdist(paper).min() > 0.5 * a.norm()


def test_with_few_tokens_it_collapses_to_the_part_of_a_they_span(make_inputs: Inputs) -> None:
    x, a, _ = make_inputs(5, 4, 64)
    rho = torch.tensor(-12.0, dtype=torch.float64)
    spanned = (torch.linalg.pinv(x) @ x) @ a
    torch.testing.assert_close(ttr_compress(x, a, rho, normalize_targets=True), spanned, atol=1e-3, rtol=1e-3)
    assert (ttr_compress(x, a, rho) - spanned).norm(dim=-1).min() > 0.1 * a.norm()


@pytest.mark.parametrize("shape", [(), (1,), (24,)])
def test_one_penalty_or_one_for_each_channel(shape: tuple[int, ...], make_inputs: Inputs, oracle: Oracle) -> None:
    x, a, _ = make_inputs(2, 5, 24)
    rho = torch.full(shape, -1.0, dtype=torch.float64, requires_grad=True)
    found = ttr_compress(x, a, rho, floor=0.25)
    lam = penalty(torch.tensor(-1.0).double(), 0.25)
    torch.testing.assert_close(found, oracle(x, a, lam.sub(1e-6).expm1().log().expand(24)), rtol=1e-6, atol=1e-6)
    found.sum().backward()
    assert rho.grad is not None
    assert rho.grad.shape == shape


def test_leading_dimensions_and_strides(solver: dict[str, str], make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(6, 4, 16)
    expected = ttr_compress(x, a, rho, **solver)
    torch.testing.assert_close(ttr_compress(x.view(2, 3, 4, 16), a, rho, **solver), expected.view(2, 3, 16))
    torch.testing.assert_close(ttr_compress(x[0], a, rho, **solver), expected[0])
    for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT, x.repeat(1, 1, 2)[..., :16]):
        assert not strided.is_contiguous()
        leaf = strided.detach().requires_grad_()
        found = ttr_compress(leaf, a, rho, **solver)
        torch.testing.assert_close(found, expected)
        plain_leaf = x.clone().requires_grad_()
        ttr_compress(plain_leaf, a, rho, **solver).square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(leaf.grad, plain_leaf.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("T", [4, 64])
def test_half_precision_is_rounded_at_the_end_only(
    solver: dict[str, str], dtype: torch.dtype, T: int, make_inputs: Inputs, oracle: Oracle
) -> None:
    x, a, rho = make_inputs(3, T, 96, dtype=torch.float32)
    x = x.to(dtype).requires_grad_()
    leaves = [x, a.requires_grad_(), rho.requires_grad_()]
    found = ttr_compress(*leaves, **solver)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = oracle(*exact)
    assert found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert (found - expected).abs().max() <= (rounding + 1e-4) * expected.abs().max()
    direction = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    gradients = (torch.autograd.grad(h, t, direction.to(h.dtype)) for h, t in ((found, leaves), (expected, exact)))
    for f, e in zip(*gradients, strict=True):
        assert (f - e).abs().max() <= (rounding + 1e-3) * e.abs().max()


@pytest.mark.parametrize("rho", [-4.6, -30.0])
def test_near_duplicates_in_bf16(solver: dict[str, str], rho: float, oracle: Oracle) -> None:
    """64 tokens that differ in their last bits, the case that breaks a Gram matrix in bf16; penalties 1e-2 and 1e-6."""
    torch.manual_seed(0)
    x = (torch.randn(4, 1, 256) + 0.01 * torch.randn(4, 64, 256)).bfloat16().requires_grad_()
    a, rho_ = torch.randn(256), torch.tensor(rho)
    found = ttr_compress(x, a, rho_, **solver)
    assert found.isfinite().all()
    (gradient,) = torch.autograd.grad(found.float().square().sum(), x)
    assert gradient.isfinite().all()
    if rho == -4.6:
        expected = oracle(x.detach(), a, rho_)
        assert (found - expected).norm() < 0.01 * expected.norm()


def test_zeros_give_zeros_and_finite_gradients(solver: dict[str, str], make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(3, 4, 16, dtype=torch.float32)
    x[0, 1] = 0
    x[1] = 0
    leaves = [x.requires_grad_(), a.requires_grad_(), rho.requires_grad_()]
    found = ttr_compress(*leaves, **solver)
    assert (found[1] == 0).all()
    torch.testing.assert_close(found[0], ttr_compress(x[0, [0, 2, 3]], a, rho, **solver))
    found.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
    assert (leaves[0].grad[1] == 0).all()  # type: ignore[index]


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e20, 1e30])
def test_norms_of_any_size(solver: dict[str, str], scale: float, make_inputs: Inputs, oracle: Oracle) -> None:
    """One token of another size than the rest; its square does not fit fp32."""
    x, a, rho = make_inputs(2, 5, 24, dtype=torch.float32)
    x[:, 2] *= scale
    leaves = [x.requires_grad_(), a.requires_grad_(), rho.requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found, expected = ttr_compress(*leaves, **solver), oracle(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())
    direction = torch.randn(2, 24)
    gradients = (torch.autograd.grad(h, t, direction.to(h.dtype)) for h, t in ((found, leaves), (expected, exact)))
    for f, e in zip(*gradients, strict=True):
        assert f.isfinite().all()
        assert (f - e).norm() <= 1e-3 * e.norm()


def test_no_tokens_give_zeros(solver: dict[str, str]) -> None:
    a = torch.randn(16, requires_grad=True)
    found = ttr_compress(torch.zeros(3, 0, 16), a, torch.zeros(16), **solver)
    assert (found == torch.zeros(3, 16)).all()
    found.sum().backward()
    assert (a.grad == 0).all()  # type: ignore[union-attr]
    assert ttr_compress(torch.zeros(0, 4, 16), a, torch.zeros(16), **solver).shape == (0, 16)
    masked = ttr_compress(torch.ones(3, 4, 16), a, torch.zeros(16), mask=torch.zeros(3, 4, dtype=torch.bool), **solver)
    assert (masked == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tokens_that_are_not_finite(solver: dict[str, str], value: float, make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(4, 5, 16, dtype=torch.float32)
    sound = ttr_compress(x, a, rho, **solver)
    x[2, 1, 3] = value
    with pytest.raises(BlockError, match=r"block 2 .*not finite"):
        ttr_compress(x, a, rho, **solver)
    x.requires_grad_()
    unchecked = ttr_compress(x, a, rho, check=False, **solver)
    (gradient,) = torch.autograd.grad(unchecked.sum(), x)
    for found in (unchecked, gradient):
        assert not found[2].isfinite().all()
        assert found[[0, 1, 3]].isfinite().all()
    torch.testing.assert_close(unchecked[[0, 1, 3]], sound[[0, 1, 3]])


def test_a_second_derivative_is_refused_and_never_zero(solver: dict[str, str], make_inputs: Inputs) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(2, 4, 16)]
    h = ttr_compress(*leaves, **solver)
    with pytest.raises(BlockError, match="once"):
        torch.autograd.grad(h.sum(), leaves, create_graph=True)
    with pytest.raises(BlockError, match="once"):
        torch.autograd.functional.jvp(lambda x: ttr_compress(x, *leaves[1:], **solver), leaves[0], leaves[0])


def test_raw_keys_too_large_to_be_squared_are_refused(solver: dict[str, str], make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(3, 4, 16, dtype=torch.float32)
    x[1, 0] *= 1e30
    with pytest.raises(BlockError, match=r"block 1 .*normalize_keys=False"):
        ttr_compress(x, a, rho, normalize_keys=False, **solver)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(16)}, "blocks are"),
        ({"x": torch.zeros(2, 4, 16, dtype=torch.int64)}, "floating point"),
        ({"x": torch.zeros(2, 4, 0)}, "d > 0"),
        ({"a": torch.zeros(15)}, "a must"),
        ({"rho": torch.zeros(2)}, "rho must"),
        ({"floor": 0.0}, "at least 1e-06"),
        ({"floor": float("nan")}, "floor"),
        ({"mask": torch.ones(2, 4)}, "boolean"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, "mask must be"),
        ({"targets": torch.ones(3, 2, 4)}, "targets must be"),
        ({"form": "triple"}, "no form"),
        ({"engine": "abacus"}, "no engine"),
        ({"engine": "cpu", "form": "primal"}, "dual form"),
    ],
)
def test_refusals(change: dict[str, object], message: str) -> None:
    arguments = {"x": torch.zeros(2, 4, 16), "a": torch.zeros(16), "rho": torch.zeros(16), **change}
    with pytest.raises(BlockError, match=message):
        ttr_compress(**arguments)  # type: ignore[arg-type]


def test_form_by_shape() -> None:
    choose = operator.choose_solver
    assert choose(torch.zeros(1, 15, 16), "auto", "plain") is operator.PLAIN_DUAL
    assert choose(torch.zeros(1, 16, 16), "auto", "plain") is operator.PLAIN_PRIMAL
    assert choose(torch.zeros(1, 300, 16), "auto", "auto") is operator.PLAIN_PRIMAL
    if cpu.available():
        assert choose(torch.zeros(1, 64, 64), "auto", "auto") is operator.CPU
        assert choose(torch.zeros(1, 64, 64), "primal", "auto") is operator.PLAIN_PRIMAL


def test_a_failed_factorisation_is_done_again_in_double() -> None:
    """A Gram matrix that in fp32 is rounded to an indefinite one."""

    def semidefinite(rows: Tensor) -> Tensor:
        matrix = rows @ rows.mT
        if matrix.dtype == torch.float32:
            matrix[1] -= 2 * torch.eye(3)
        return matrix

    rows = 1e-3 * torch.randn(2, 3, 8)
    factor = plain.factor_of(semidefinite, rows)
    torch.testing.assert_close(factor @ factor.mT, torch.eye(3) + rows @ rows.mT, atol=1e-5, rtol=1e-5)


def test_autocast_does_not_reach_inside(solver: dict[str, str], make_inputs: Inputs) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(2, 6, 32, dtype=torch.float32)]
    expected = ttr_compress(*leaves, **solver)
    with torch.autocast("cpu", torch.bfloat16):
        found = ttr_compress(*leaves, **solver)
        gradients = torch.autograd.grad(found.sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for f, e in zip(gradients, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(f, e, rtol=0, atol=0)


def test_inference_keeps_nothing(solver: dict[str, str], make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(2, 6, 32)
    expected = ttr_compress(x, a.clone().requires_grad_(), rho, **solver).detach()
    with torch.inference_mode():
        torch.testing.assert_close(ttr_compress(x, a, rho, **solver), expected)
    with torch.no_grad():
        assert not ttr_compress(x, a.requires_grad_(), rho, **solver).requires_grad
