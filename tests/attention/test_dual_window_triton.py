"""The fused kernels equal two plain passes: on a GPU where there is one, else in Triton's interpreter.

The interpreter has to be asked for before anything imports triton, so those tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ttmem.attention import dual_window
from ttmem.attention.dual_window import dual_window_attention
from ttmem.errors import BlockError

Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
MakeSegments = Callable[[int, int, int], Tensor]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="triton is not installed: pip install triton")


@pytest.mark.slow
def test_in_the_interpreter(run_interpreted: Callable[[str], None]) -> None:
    run_interpreted(__file__)


def agree(
    leaves: tuple[Tensor, ...], windows: tuple[int, int], segments: Tensor | None, wanted: str, tolerance: float
) -> None:
    """Answers and gradients beside the reference's in double."""
    here = [t.detach().to(DEVICE).requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    there = None if segments is None else segments.to(DEVICE)
    results = []
    for inputs, ids, engine in ((here, there, "triton"), (exact, segments, "reference")):
        outputs = dual_window_attention(*inputs, *windows, segments=ids, engine=engine)  # type: ignore[arg-type, misc]
        used = {"both": outputs, "teacher": outputs[:1], "student": outputs[1:]}[wanted]
        generator = torch.Generator().manual_seed(1)
        directions = [torch.randn(o.shape, generator=generator).to(o) for o in used]
        results.append((*outputs, *torch.autograd.grad(used, inputs, directions)))
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        assert (found.cpu().double() - expected).norm() <= tolerance * max(1.0, float(expected.norm().detach()))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("tokens", "keys", "windows"),
    [
        (70, 70, (9, 4)),  # within a block
        (70, 70, (1, 1)),
        (100, 130, (70, 33)),  # both edges within blocks, none of them whole; a cache
        (130, 130, (128, 64)),  # edges at blocks' borders
        (80, 80, (500, 70)),  # beyond the first key
        (40, 40, (39, 39)),
        (1, 90, (70, 3)),  # a decode step
    ],
)
def test_windows(tokens: int, keys: int, windows: tuple[int, int], make_qkv: Make) -> None:
    agree(make_qkv(1, 1, 1, tokens, keys, 16, dtype=torch.float32), windows, None, "both", 3e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("wanted", ["teacher", "student"])
def test_one_of_the_gradients(wanted: str, make_qkv: Make) -> None:
    agree(make_qkv(1, 1, 1, 50, 60, 16, dtype=torch.float32), (40, 20), None, wanted, 3e-5)


@pytest.mark.kernels
def test_groups_widths_and_layouts(make_qkv: Make) -> None:
    """Heads that share keys, widths that are no powers of two and differ, tokens before heads."""
    leaves = make_qkv(2, 4, 2, 40, 45, 9, 20, dtype=torch.float32)
    turned = tuple(t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in leaves)
    agree(turned, (30, 13), None, "both", 3e-5)


@pytest.mark.kernels
def test_segments(make_qkv: Make, make_segments: MakeSegments) -> None:
    agree(make_qkv(2, 2, 1, 60, 80, 16, dtype=torch.float32), (50, 20), make_segments(2, 80, 3), "both", 3e-5)


@pytest.mark.kernels
def test_half_precision(make_qkv: Make) -> None:
    """bf16 only on a GPU: products of it are wrong in the interpreter."""
    agree(make_qkv(1, 1, 1, 150, dim=16, dtype=torch.float16), (140, 70), None, "both", 5e-3)
    if DEVICE == "cuda":
        agree(make_qkv(1, 4, 2, 1000, dim=128, dtype=torch.bfloat16), (700, 300), None, "both", 2e-2)


@pytest.mark.kernels
def test_many_blocks(make_qkv: Make) -> None:
    """Blocks that no edge cuts, in both bands."""
    agree(make_qkv(1, 1, 1, 260, dim=16, dtype=torch.float32), (230, 120), None, "both", 3e-5)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_scores_that_leave_the_student_no_mass() -> None:
    q = torch.full((1, 1, 30, 16), 3.0)
    k = torch.linspace(10, -10, 30).view(1, 1, 30, 1).expand(1, 1, 30, 16)
    agree((q, k.contiguous(), torch.randn(1, 1, 30, 16)), (20, 3), None, "both", 1e-4)


def test_refusals() -> None:
    for q in (torch.zeros(1, 1, 4, 8, dtype=torch.float64), torch.zeros(1, 1, 4, 300)):
        with pytest.raises(BlockError, match="engine='merge'"):
            dual_window_attention(q, q, q, 2, 1, engine="triton")


def test_chosen_for_gpus_only() -> None:
    from ttmem.attention import dual_window_triton

    x = torch.zeros(1, 1, 4, 16, device=DEVICE)
    chosen: Any = dual_window.choose_solver(x, x, "auto")
    assert (chosen.forward is dual_window_triton.forward) == (DEVICE == "cuda")


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ttmem.attention import dual_window_triton as K
from ttmem.attention.dual_window_problem import Problem

x = torch.zeros(1, 1, 64, {width}, dtype=torch.{dtype})
backward = {kernel!r} != "_forward"
kernel = getattr(K, {kernel!r})
constants = K._constants(Problem(x, x, x, 32, 16, 1.0, None), K.backward_blocks if backward else K.forward_blocks)
warps = constants.pop("num_warps")
constants |= {{"FAR": True}} if backward else {{}}
numbers = "*fp32" if x.dtype == torch.float32 else "*bf16"
signature = dict.fromkeys(kernel.arg_names, "i32") | {{"scale": "fp32", "segments": "*i64"}}
for name in kernel.arg_names:
    if name in ("q", "k", "v", "near", "far", "teacher", "student") or name.endswith("_to"):
        signature[name] = numbers
    elif name.endswith(("_z", "_term")):
        signature[name] = "*fp32"
signature |= dict.fromkeys(constants, "constexpr")
source = ASTSource(kernel, signature=signature, constexprs=constants)
compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={{"num_warps": warps}})
assert compiled.metadata.shared <= 99 * 1024, compiled.metadata.shared
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_forward", "_key_gradients", "_query_gradients"])
@pytest.mark.parametrize(("width", "dtype"), [(128, "bfloat16"), (64, "float32")])
def test_compiles_for_a_gpu_within_its_shared_memory(kernel: str, width: int, dtype: str) -> None:
    """Compiling needs no GPU, and finds what the interpreter does not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE.format(kernel=kernel, width=width, dtype=dtype)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
