"""The engine for CPUs: `cpu_kernel.cpp`, built once per machine by torch's extension loader. Dual form.

Where it cannot be built (no compiler, no ninja, a cache folder that cannot be written), the plain engine does the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
import warnings
from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression.problem import Gradients, Problem, Solution, compute_dtype, refuse_block

SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp")
MAX_TOKENS = 256
"""Beyond it, a BLAS product is faster than this kernel's Gram matrix."""
NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}
CHUNKS = 512
"""Gradients of a and lambda are summed in at most this many parts, so that sums do not depend on the threads."""


class _Shape(ctypes.Structure):
    """`Problem` of cpu_kernel.cpp."""

    _fields_ = [
        (name, c_int64)
        for name in (
            "blocks",
            "tokens",
            "dim",
            "block_stride",
            "row_stride",
            "normalize_keys",
            "normalize_targets",
            "threads",
            "chunk",
        )
    ]


@functools.cache
def _build() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none.

    Each process that finds none builds its own in a folder of its own, and moves it to its place when it is whole.
    torch's loader, left to itself, waits forever for a process that was killed while it built.
    """
    try:
        from torch.utils import cpp_extension

        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
        root.mkdir(parents=True, exist_ok=True)
        library = root / f"{_name()}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=root, prefix="ttmem_regression_") as folder:
                built = cpp_extension.load(
                    name=_name(),
                    sources=[str(SOURCE)],
                    extra_cflags=list(FLAGS),
                    extra_ldflags=["-fopenmp"],
                    build_directory=folder,
                    is_python_module=False,
                )
                os.replace(built, library)
        return ctypes.CDLL(str(library)), ""
    except Exception as error:  # compilers and loaders fail in many ways, and all mean the same here
        return None, str(error).strip().split("\n", 1)[0]


def _name() -> str:
    """Of the source, its flags and the processor: code for one must not be found by another that shares the folder."""
    told = "\n".join([SOURCE.read_text(), *FLAGS, torch.__version__, _processor()])
    return f"ttmem_regression_{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *features[:2]])


@functools.cache
def available() -> bool:
    """Whether the kernel is there; builds it at the first call, and warns once if that fails."""
    library, reason = _build()
    if library is None:
        warnings.warn(f"the CPU kernel could not be built, plain torch is used instead: {reason}", stacklevel=2)
    return library is not None


def _library() -> ctypes.CDLL:
    library, reason = _build()
    if library is None:
        raise BlockError(
            f"the CPU kernel could not be built: {reason}. Install a C++ compiler and ninja, or use engine='plain'."
        )
    return library


def forward(problem: Problem) -> Solution:
    """Raises BlockError for a token that is not finite, and where the kernel cannot be built."""
    x = _readable(problem.x)
    blocks, tokens, dim = x.shape
    h = torch.empty(blocks, dim, dtype=x.dtype)
    kept = blocks if problem.keep else 0
    v, alpha = (torch.empty(kept, tokens, dtype=compute_dtype(x.dtype)) for _ in range(2))
    factor = torch.empty(kept, tokens, tokens, dtype=compute_dtype(x.dtype))
    shape, w = _shape(problem, x), 1 / problem.lam
    bad = _function("forward", x)(
        ctypes.byref(shape),
        *_pointers(x, problem.a, w, problem.targets, problem.mask, h),
        *(_pointers(v, alpha, factor) if problem.keep else (None, None, None)),
    )
    if bad < blocks and problem.check:
        raise refuse_block(bad)
    return Solution(h.to(problem.x.dtype), v, alpha, factor)


def backward(problem: Problem, solution: Solution, gradient: Tensor) -> Gradients:
    x = _readable(problem.x)
    shape, w, gradient = _shape(problem, x), 1 / problem.lam, gradient.to(x.dtype).contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype)
    da, dlam = torch.zeros(2, -(-x.shape[0] // shape.chunk), x.shape[-1], dtype=compute_dtype(x.dtype))
    dtargets = None if problem.targets is None else torch.empty_like(problem.targets)
    _function("backward", x)(
        ctypes.byref(shape),
        *_pointers(x, problem.a, w, problem.mask, gradient),
        *_pointers(solution.v, solution.alpha, solution.factor, dx, da, dlam, dtargets),
    )
    return Gradients(dx.to(problem.x.dtype), da.sum(0), dlam.sum(0), dtargets)


def _readable(x: Tensor) -> Tensor:
    """x as the kernel can read it: of a dtype it knows, with rows that are contiguous."""
    if x.dtype not in NAMES:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def _function(name: str, x: Tensor) -> ctypes._NamedFuncPointer:
    function = getattr(_library(), f"ttr_{name}_{NAMES[x.dtype]}")
    function.restype = c_int64 if name == "forward" else None
    return function


def _shape(problem: Problem, x: Tensor) -> _Shape:
    blocks, tokens, dim = x.shape
    rules = problem.rules
    small = blocks * tokens * dim < 65536
    return _Shape(
        blocks,
        tokens,
        dim,
        x.stride(0),
        x.stride(1),
        rules.normalize_keys,
        rules.normalize_targets,
        1 if small else torch.get_num_threads(),
        -(-blocks // CHUNKS),
    )


def _pointers(*tensors: Tensor | None) -> list[c_void_p | None]:
    """The caller keeps the tensors alive."""
    return [None if tensor is None else c_void_p(tensor.data_ptr()) for tensor in tensors]
