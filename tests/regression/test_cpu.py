"""The CPU kernel: built once, equal on any number of threads, and replaced by plain torch where it cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression import cpu, operator, ttr_compress

Inputs = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.fixture
def kernel() -> None:
    if not cpu.available():
        pytest.skip("the CPU kernel cannot be built here")


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "_build", lambda: (None, "no compiler"))
    cpu.available.cache_clear()
    yield
    cpu.available.cache_clear()


def test_without_a_compiler_plain_torch_does_it(no_kernel: None, make_inputs: Inputs) -> None:
    inputs = make_inputs(2, 4, 16)
    with pytest.warns(UserWarning, match="no compiler"):
        found = ttr_compress(*inputs)
    torch.testing.assert_close(found, ttr_compress(*inputs, engine="plain"), rtol=0, atol=0)
    assert operator.choose_solver(inputs[0], "auto", "auto") is operator.PLAIN_DUAL
    with pytest.raises(BlockError, match="no compiler"):
        ttr_compress(*inputs, engine="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("T", "d"), [(4, 64), (9, 70), (64, 33)])
def test_any_number_of_threads_gives_the_same(
    kernel: None, dtype: torch.dtype, T: int, d: int, make_inputs: Inputs
) -> None:
    leaves = [t.requires_grad_() for t in make_inputs(600, T, d, dtype=dtype)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            h = ttr_compress(*leaves, engine="cpu")
            results.append((h, *torch.autograd.grad(h.float().square().sum(), leaves)))
    finally:
        torch.set_num_threads(before)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("T", range(1, 14))
def test_every_remainder_of_tiles_and_vectors(kernel: None, T: int, make_inputs: Inputs) -> None:
    for d in (T, 7, 8, 9, 31, 32, 33):
        leaves = [t.requires_grad_() for t in make_inputs(2, T, d, dtype=torch.float32)]
        results = []
        for engine in ("cpu", "plain"):
            h = ttr_compress(*leaves, engine=engine, form="dual")
            results.append((h, *torch.autograd.grad(h.sum(), leaves)))
        for fast, slow in zip(*results, strict=True):
            torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4 * slow.abs().max().item())


def test_bf16_is_rounded_to_the_nearest_even(kernel: None) -> None:
    """A single token with penalty 1: h = a.x / 2 along the token, exactly representable in fp32."""
    x = torch.zeros(256, 1, 8, dtype=torch.bfloat16)
    x[:, 0, 0] = torch.linspace(1, 300, 256).bfloat16()
    a = torch.tensor([1.00390625] + [0.0] * 7)
    rho = torch.tensor(1.0).expm1().log()
    found = ttr_compress(x, a, rho, engine="cpu")
    exact = ttr_compress(x.float(), a, rho, engine="cpu")
    assert torch.equal(found, exact.bfloat16())


def test_compiled_models_call_it_as_it_is(kernel: None, make_inputs: Inputs) -> None:
    x, a, rho = make_inputs(2, 4, 16, dtype=torch.float32)
    compiled = torch.compile(lambda x: 2 * ttr_compress(x * 1.0, a, rho), backend="eager")
    torch.testing.assert_close(compiled(x), 2 * ttr_compress(x, a, rho))


def test_equal_tokens_under_the_least_penalty(kernel: None) -> None:
    """fp32 rounds this Gram matrix, 1e6 everywhere, to an indefinite one: plain pivots would grow without bound."""
    torch.manual_seed(0)
    x = torch.randn(8, 1, 32) + 1e-4 * torch.randn(8, 64, 32)
    leaves = [t.requires_grad_() for t in (x, torch.randn(32), torch.tensor(-50.0))]
    found = ttr_compress(*leaves, engine="cpu")
    exact = ttr_compress(*(t.detach().double() for t in leaves), engine="plain", form="primal")
    assert (found - exact).norm() < 0.2 * exact.norm()
    for gradient in torch.autograd.grad(found.sum(), leaves):
        assert gradient.isfinite().all()


def test_a_process_killed_while_building_stops_no_other(tmp_path: Path) -> None:
    """torch's own loader would wait for its lock for ever."""
    if not cpu.available():
        pytest.skip("the CPU kernel cannot be built here")
    script = "import torch; from ttmem.regression import cpu; print(cpu.available())"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    killed = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.rglob("lock")) and time.monotonic() < deadline and killed.poll() is None:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    assert list(tmp_path.rglob("lock"))
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert said.stdout.strip() == "True"
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".so"]
