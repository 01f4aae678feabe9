"""Optimizers by name: who updates what, and Muon against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ttmem.errors import BudgetError
from ttmem.training.optimizers import (
    ADAM_SIZE,
    MOMENTUM,
    OPTIMIZERS,
    Muon,
    is_hidden_matrix,
    make_optimizers,
    moment_bytes,
    orthogonalize,
    torch_muon,
)


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_orthogonalized_matrices_keep_their_singular_vectors(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(3, *shape, generator=generator)
    found = orthogonalize(matrices)
    for matrix, result in zip(matrices, found, strict=True):
        u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        inner = u.T @ result @ vt.T  # the same singular vectors make this diagonal
        strong = s / s.norm() > 0.01
        assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-4
        assert ((inner.diagonal()[strong] - 1.0).abs() < 0.35).all()


def test_muon_step_is_the_orthogonalized_momentum() -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(4, 6, generator=generator))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    expected, momentum = parameter.detach().clone(), torch.zeros(4, 6)
    for _ in range(3):
        gradient = torch.randn(4, 6, generator=generator)
        parameter.grad = gradient.clone()
        optimizer.step()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        update = orthogonalize((MOMENTUM * momentum + (1 - MOMENTUM) * gradient).unsqueeze(0))[0]
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * ADAM_SIZE * 6**0.5 * update
    torch.testing.assert_close(parameter.detach(), expected)


def steps_of(make: Any, gradients: list[list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """How far each of three matrices is after each gradient in turn, and the momenta at the end."""
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in [(8, 8), (6, 20), (20, 6)]]
    parameters = [nn.Parameter(tensor.clone()) for tensor in start]
    optimizer = make(parameters)
    for several in gradients:
        for parameter, gradient in zip(parameters, several, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    moved = [parameter.detach() - tensor for parameter, tensor in zip(parameters, start, strict=True)]
    return moved, [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]


def test_muon_is_torchs() -> None:
    """The same momenta, and updates as equal as bf16 leaves them; a setting that differs would be seen."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(8, 8), (6, 20), (20, 6)]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(5)]

    def apart(make: Any, other: Any) -> float:
        pairs = zip(steps_of(make, gradients)[0], steps_of(other, gradients)[0], strict=True)
        return max(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs)

    def ours(dtype: torch.dtype | None) -> Any:
        return lambda parameters: Muon(parameters, 0.1, 0.5, dtype)

    def theirs(parameters: list[nn.Parameter]) -> Any:
        return torch_muon(parameters, 0.1, 0.5)

    def without(**changes: Any) -> Any:
        settings = {"lr": 0.1, "weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw", **changes}
        return lambda parameters: torch.optim.Muon(parameters, **settings)

    for mine, their in zip(steps_of(ours(None), gradients)[1], steps_of(theirs, gradients)[1], strict=True):
        torch.testing.assert_close(mine, their)
    assert apart(ours(torch.bfloat16), theirs) < 0.02
    assert apart(ours(None), theirs) < 0.02
    assert apart(ours(torch.bfloat16), ours(None)) < 0.02
    for other in ({"nesterov": False}, {"adjust_lr_fn": "original"}, {"ns_steps": 4}, {"weight_decay": 0.4}):
        assert apart(without(**other), theirs) > 0.03, other


def test_muon_and_adamw_move_a_matrix_by_about_as_much() -> None:
    parameter = nn.Parameter(torch.zeros(32, 48))
    parameter.grad = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
    Muon([parameter], lr=1.0).step()
    assert parameter.detach().square().mean().sqrt().item() == pytest.approx(ADAM_SIZE, rel=0.25)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay(name: str, make_network: Any) -> None:
    parameters = dict(make_network().named_parameters())
    optimizers = make_optimizers(name, parameters, lr=1e-3, weight_decay=0.1)
    decay = {id(p): group["weight_decay"] for o in optimizers for group in o.param_groups for p in group["params"]}
    counted = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(counted) == len(decay) == len(parameters)
    for key, parameter in parameters.items():
        hidden = "proj" in key
        assert decay[id(parameter)] == (0.1 if hidden else 0.0), key
    by_muon = {id(p) for o in optimizers if isinstance(o, Muon) for group in o.param_groups for p in group["params"]}
    hidden_ids = {id(p) for key, p in parameters.items() if "proj" in key}
    assert by_muon == (hidden_ids if name == "muon" else set())


def test_taps_and_scales_are_no_hidden_matrices() -> None:
    """They are [taps, channels]: Muon would mix channels, and decay would undo the copy that convolutions start as."""
    from ttmem.fast_weights import TTCDConfig, TTCDModel
    from ttmem.fast_weights.recipes import RECIPES
    from ttmem.regression import TTRCompressor

    found = {"kernel": TTRCompressor(8, "1d").kernel}
    for rule in ("ttcd", "in_place", "lact", "deltanet", "gated_deltanet"):
        network = TTCDModel(TTCDConfig(**{**RECIPES["cpu"].model, "rule": rule}))
        flat = {key: p for key, p in network.named_parameters() if p.ndim == 2 and not key.endswith("weight")}
        found |= {f"{rule} {key}": p for key, p in flat.items() if not key.endswith("projection")}
        assert [key for key in flat if key.endswith("projection") and not is_hidden_matrix(key, flat[key])] == []
    assert len(found) > 10
    assert [key for key, parameter in found.items() if is_hidden_matrix(key, parameter)] == []  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bytes_of_the_moments_are_those_after_a_step(name: str, make_network: Any) -> None:
    parameters = dict(make_network().named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    total = 0
    for optimizer in make_optimizers(name, parameters, lr=1e-3, weight_decay=0.1):
        optimizer.step()
        total += sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    assert moment_bytes(name, parameters) == total
    numbers = sum(parameter.numel() for parameter in parameters.values())
    assert total <= 8 * numbers + 4 * len(parameters)
    assert (name == "muon") == (total < 7 * numbers)


def test_unknown_optimizer() -> None:
    with pytest.raises(BudgetError, match="'sgd' is not one of adamw, muon"):
        make_optimizers("sgd", {}, 1e-3, 0.0)
