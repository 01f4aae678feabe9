"""Optimizers by name: who updates what, and Muon against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ttmem.errors import BudgetError
from ttmem.training.optimizers import ADAM_SIZE, MOMENTUM, OPTIMIZERS, Muon, make_optimizers, orthogonalize


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


def test_unknown_optimizer() -> None:
    with pytest.raises(BudgetError, match="'sgd' is not one of adamw, muon"):
        make_optimizers("sgd", {}, 1e-3, 0.0)
