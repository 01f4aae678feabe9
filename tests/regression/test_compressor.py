"""The module: its variants, its parameters, and that it learns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression import TTRCompressor, grid_neighbours, line_neighbours, ttr_compress


def build(*arguments: object, **options: object) -> TTRCompressor:
    torch.manual_seed(0)
    return TTRCompressor(*arguments, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, 2 * 16),
        ({"conv": "1d"}, 2 * 16 + 3 * 16),
        ({"conv": "2d", "kernel_size": 5}, 2 * 16 + 25 * 16),
        ({"strength": "scalar"}, 17),
        ({"strength": 1e-2}, 16),
    ],
)
def test_parameters(options: dict[str, object], trained: int) -> None:
    module = build(16, **options)
    assert sum(p.numel() for p in module.parameters()) == trained
    torch.testing.assert_close(module.penalty(), torch.full_like(module.penalty(), 1e-2), rtol=1e-3, atol=0)
    fresh = build(16, **options)
    fresh.load_state_dict(module.state_dict())
    x = torch.randn(3, 4, 16)
    torch.testing.assert_close(fresh(x), module(x))
    assert module.no_weight_decay() == {name for name, _ in module.named_parameters()} - {"a"}


@pytest.mark.parametrize("strength", [1e-4, 1e-2, 1.0])
def test_a_fixed_penalty_is_that_penalty(strength: float, oracle: Callable[..., Tensor]) -> None:
    module = build(16, strength=strength)
    torch.testing.assert_close(module.penalty(), torch.tensor([strength]), rtol=1e-5, atol=0)
    x = torch.randn(3, 4, 16, dtype=torch.float64)
    rho = torch.tensor(strength - 1e-6).double().expm1().log()
    torch.testing.assert_close(module(x), oracle(x, module.a, rho), rtol=1e-4, atol=1e-4)


def test_the_floor_is_under_the_penalty() -> None:
    module = build(16, floor=0.25)
    with torch.no_grad():
        module.rho.fill_(-100.0)
    assert (module.penalty() >= 0.25).all()


@pytest.mark.parametrize(("conv", "T"), [("1d", 5), ("2d", 9)])
def test_a_fresh_convolution_changes_nothing(conv: str, T: int) -> None:
    x = torch.randn(2, 3, T, 16)
    torch.testing.assert_close(build(16, conv)(x), build(16)(x))
    normalised = {"normalize_targets": True}
    torch.testing.assert_close(build(16, conv, **normalised)(x), build(16, **normalised)(x))


@pytest.mark.parametrize(("conv", "taps"), [("1d", 3), ("2d", 9)])
def test_neighbours_within_blocks_and_through_them(conv: str, taps: int) -> None:
    module = build(16, conv)
    torch.nn.init.normal_(module.kernel)  # type: ignore[arg-type]
    x = torch.randn(6, 4, 16)
    within = module(x)
    torch.testing.assert_close(module(x[:1]), within[:1])
    neighbours = line_neighbours(24, 3) if conv == "1d" else grid_neighbours(4, 6, 3, block=2)
    through = module(x, neighbours=neighbours)
    assert (through - within).abs().max() > 1e-3
    changed = x.clone()
    changed[1] += 1
    assert (module(changed, neighbours=neighbours)[0] - through[0]).abs().max() > 1e-4
    torch.testing.assert_close(module(changed)[0], within[0])


@pytest.mark.parametrize("conv", [None, "1d"])
def test_a_masked_block_is_a_shorter_block(conv: str | None) -> None:
    module = build(16, conv)
    if module.kernel is not None:
        torch.nn.init.normal_(module.kernel)
    x = torch.randn(2, 6, 16)
    mask = torch.arange(6) < torch.tensor([[4], [0]])
    found = module(x.masked_fill(~mask.unsqueeze(-1), float("nan")), mask)
    torch.testing.assert_close(found[0], module(x[0, :4]))
    assert (found[1] == 0).all()


@pytest.mark.parametrize("conv", [None, "1d", "2d"])
@pytest.mark.parametrize("options", [{}, {"normalize_keys": False}, {"normalize_targets": True}, {"strength": 0.1}])
def test_gradcheck(conv: str | None, options: dict[str, object]) -> None:
    module = build(5, conv, **options).double()
    if module.kernel is not None:
        torch.nn.init.normal_(module.kernel)
    names = [name for name, _ in module.named_parameters()]
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(call, (x, *module.parameters()))


def test_it_learns_what_to_regress() -> None:
    """Of four random tokens the one with the largest first channel is wanted: a has to find that channel."""
    torch.manual_seed(0)
    module = TTRCompressor(8)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        x = torch.randn(64, 4, 8)
        wanted = x[torch.arange(64), x[..., 0].argmax(-1)]
        loss = 1 - torch.cosine_similarity(module(x), wanted, dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.6 * sum(losses[:5]) / 5


def test_half_precision_parameters() -> None:
    module = build(32, "1d").bfloat16()
    x = torch.randn(2, 4, 32).bfloat16()
    assert module(x).dtype == torch.bfloat16
    assert module(x).isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be a positive integer"),
        ({"dim": 4, "conv": "3d"}, "conv None"),
        ({"dim": 4, "kernel_size": 2}, "odd"),
        ({"dim": 4, "strength": 0.0}, "above the floor"),
        ({"dim": 4, "strength": "matrix"}, "diagonal"),
        ({"dim": 4, "initial_strength": 0.0}, "positive"),
        ({"dim": 4, "initial_strength": "x"}, "positive"),
        ({"dim": 4, "floor": 0.0}, "floor at least"),
        ({"dim": 4, "floor": float("inf")}, "floor at least"),
        ({"dim": 4, "floor": None}, "floor at least"),
        ({"dim": 4, "strength": True}, "diagonal"),
        ({"dim": 4.0}, "positive integer"),
        ({"dim": "4"}, "positive integer"),
        ({"dim": 4, "form": "triple"}, "no form"),
        ({"dim": 4, "engine": "gpu"}, "no engine"),
    ],
)
def test_refused_settings(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(BlockError, match=message):
        TTRCompressor(**arguments)  # type: ignore[arg-type]


def test_refused_inputs() -> None:
    with pytest.raises(BlockError, match="no square grid"):
        build(8, "2d")(torch.zeros(1, 6, 8))
    with pytest.raises(BlockError, match="this one has none"):
        build(8)(torch.zeros(1, 6, 8), neighbours=line_neighbours(6, 3))


@pytest.mark.parametrize("conv", [None, "1d"])
def test_inputs_are_refused_alike_with_a_convolution_and_without(conv: str | None) -> None:
    module, x = build(8, conv), torch.zeros(2, 6, 8)
    ok = torch.ones(2, 6, dtype=torch.bool)
    for arguments, message in (
        ((torch.zeros(2, 6, 9),), "tokens of width 8"),
        ((torch.zeros(8),), "blocks are"),
        ((x.long(),), "floating point"),
        ((x, ok.float()), "boolean"),
        ((x, ok.long()), "boolean"),
        ((x, ok[:, :5]), "mask must be"),
    ):
        with pytest.raises(BlockError, match=message):
            module(*arguments)


@pytest.mark.parametrize(
    ("neighbours", "message"),
    [
        (torch.full((3, 6), 6), "count from -1"),
        (torch.full((3, 6), -2), "count from -1"),
        (torch.zeros(3, 6), "int64"),
        (torch.zeros(6, dtype=torch.int64), "int64"),
        (torch.zeros(2, 6, dtype=torch.int64), "int64"),
        (torch.zeros(3, 7, dtype=torch.int64), "through all tokens"),
    ],
)
def test_refused_neighbours(neighbours: Tensor, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        build(8, "1d")(torch.zeros(2, 6, 8), neighbours=neighbours)


def test_a_masked_token_spoils_no_gradient() -> None:
    """Whatever is in it, and also where targets are normalised before they are convolved."""
    module = build(16, "1d", normalize_targets=True)
    x = torch.randn(2, 4, 16)
    x[0, 1] = float("nan")
    x.requires_grad_()
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 1] = False
    module(x, mask).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_no_tokens() -> None:
    assert (build(8, "1d")(torch.zeros(3, 0, 8)) == 0).all()


def test_the_function_is_what_it_calls() -> None:
    module = build(16)
    x = torch.randn(3, 4, 16)
    torch.testing.assert_close(module(x), ttr_compress(x, module.a, module.rho), rtol=0, atol=0)
