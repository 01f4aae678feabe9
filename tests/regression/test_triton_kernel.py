"""The Triton kernels equal the definition: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be asked for before anything imports triton, so those tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression import operator, ttr_compress

Inputs = Callable[..., tuple[Tensor, Tensor, Tensor]]
Oracle = Callable[..., Tensor]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pytest.importorskip("triton", reason="triton is not installed: pip install triton")


@pytest.mark.slow
def test_in_the_interpreter(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted(__file__)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().to(DEVICE).requires_grad_() for t in tensors]


@pytest.mark.kernels
@pytest.mark.parametrize("rules", [{}, {"normalize_keys": False}, {"normalize_targets": True}])
@pytest.mark.parametrize(("T", "d", "masked", "given"), [(4, 40, False, False), (17, 70, True, True)])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_answer_and_gradients(
    rules: dict[str, bool], T: int, d: int, masked: bool, given: bool, make_inputs: Inputs, oracle: Oracle
) -> None:
    x, a, rho = make_inputs(3, T, d, dtype=torch.float32)
    x[0, 0] = 0
    if not rules:
        x[1, -1] *= 1e25
    mask = torch.rand(3, T, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None
    targets = torch.linspace(-1, 1, 3 * T).view(3, T) if given else None
    leaves = on_device(x, rho, a if targets is None else targets)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    direction = torch.randn(3, d, generator=torch.Generator().manual_seed(0))

    def split(third: Tensor) -> dict[str, Tensor]:
        return {"a": third, "targets": None} if targets is None else {"a": a.to(third), "targets": third}  # type: ignore[dict-item]

    found = ttr_compress(
        leaves[0], rho=leaves[1], mask=None if mask is None else mask.to(DEVICE), engine="triton",
        **split(leaves[2]), **rules,
    )  # fmt: skip
    expected = oracle(exact[0], rho=exact[1], mask=mask, **split(exact[2]), **rules)
    assert (found.cpu() - expected).norm() < 1e-4 * expected.norm()
    f_grads = torch.autograd.grad(found, leaves, direction.to(DEVICE))
    for f, e in zip(f_grads, torch.autograd.grad(expected, exact, direction.double()), strict=True):
        assert (f.cpu() - e).norm() < 1e-3 * e.norm()


@pytest.mark.kernels
def test_64_tokens_nearly_equal_in_half_precision(oracle: Oracle) -> None:
    torch.manual_seed(0)
    x = (torch.randn(1, 1, 96) + 0.01 * torch.randn(1, 64, 96)).bfloat16()
    a, rho = torch.randn(96), torch.tensor(-4.6)
    found = ttr_compress(*on_device(x, a, rho), engine="triton").cpu()
    expected = oracle(x, a, rho)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.kernels
def test_a_tiny_penalty_stays_finite() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 32).expand(1, 32, 32) + 1e-4 * torch.randn(1, 32, 32)
    leaves = on_device(x, torch.randn(32), torch.tensor(-50.0))
    found = ttr_compress(*leaves, engine="triton")
    assert found.isfinite().all()
    for gradient in torch.autograd.grad(found.sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.kernels
def test_refusals(make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(3, 4, 16, dtype=torch.float32)
    with pytest.raises(BlockError, match="double"):
        ttr_compress(*on_device(x.double(), a, rho), engine="triton")
    with pytest.raises(BlockError, match="64 tokens"):
        ttr_compress(*on_device(torch.zeros(1, 65, 16), a, rho), engine="triton")
    x[1, 2, 3] = float("nan")
    with pytest.raises(BlockError, match="block 1"):
        ttr_compress(*on_device(x, a, rho), engine="triton", check=True)
    others = ttr_compress(*on_device(x, a, rho), engine="triton", check=False)[[0, 2]]
    assert others.isfinite().all()


def test_chosen_for_gpus_only() -> None:
    from ttmem.regression import triton_kernel

    chosen = operator.choose_solver(torch.zeros(1, 4, 16, device=DEVICE), "auto", "auto")
    assert (chosen.forward is triton_kernel.forward) == (DEVICE == "cuda")


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ttmem.regression import triton_kernel as K
from ttmem.regression.problem import Problem

x = torch.zeros(1, {T}, 1024)
constants = K._constants(Problem(x, x[0, 0], x[0, 0]), x)
warps = constants.pop("num_warps")
for kernel, extra in ((K._forward, {{"KEEP": True}}), (K._backward, {{}})):
    constexprs = {{**constants, **extra}}
    signature = {{}}
    for name in kernel.arg_names:
        small = name in ("block_stride", "row_stride", "d", "blocks", "chunk")
        signature[name] = "i32" if small else "*u8" if name == "mask" else "*bf16" if name in "x h dx" else "*fp32"
    signature |= dict.fromkeys(constexprs, "constexpr")
    source = ASTSource(kernel, signature=signature, constexprs=constexprs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={{"num_warps": warps}})
    assert compiled.metadata.shared <= 99 * 1024, compiled.metadata.shared
"""


@pytest.mark.slow
@pytest.mark.parametrize("T", [4, 64])
def test_compiles_for_a_gpu_within_its_shared_memory(T: int) -> None:
    """Compiling needs no GPU, and finds what the interpreter does not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE.format(T=T)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
