"""Dual-window attention against two passes, and the short convolution against torch's.

    python benchmarks/dual_window.py [--tokens 4096] [--windows 1024 512] [--dim 64] [--heads 4] [--kv-heads 4]
        [--threads 1 2] [--rounds 9] [--dtype float32] [--device cpu] [--clock wall]

Student windows are half the teacher's. Forward, and forward with backward, of

- dual: `dual_window_attention`;
- masked passes: two calls of `scaled_dot_product_attention`, each with its window as a mask of all keys, made before;
- blocked passes: two passes through one window each, a block of queries at a time, in the same kernels as dual;
- teacher alone: one of these two, the least that dual could cost;
- fused passes (GPU): two calls of the fused kernel with equal windows, which is one pass each.

All run one after the other in each round. A figure is the median over rounds with its quartiles; ratios are of the
rounds' pairs. `time_saved` is 1 - dual / other: of the masked and the blocked passes the target is .15 or more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import record
from torch import Tensor

from ttmem.attention.bands import Band, add_band_gradients, band_attention
from ttmem.attention.dual_window import dual_window_attention
from ttmem.attention.dual_window_problem import Gradients, Problem, RowGradient
from ttmem.attention.dual_window_reference import visible_keys
from ttmem.attention.short_convolution import short_convolution

SEED = 0
TARGET = 0.15
Form = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
CONVOLUTIONS = ((4, 1024, 2730), (2, 2048, 2560), (8, 256, 1024), (128, 16, 256))
"""Chunks, tokens in a chunk, features: of the from-scratch and the continual recipes, and of small models."""


class OneWindow(torch.autograd.Function):
    """A single window in the same blocks and kernels as the dual form: the strongest two passes there are here."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        output, log_z = band_attention(_single(q, k, v, window), Band(0, window))
        ctx.save_for_backward(q, k, v, output, log_z)
        ctx.window = window
        return output.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_z = ctx.saved_tensors
        gradient = gradient.to(output.dtype)
        gradients = Gradients(*(torch.zeros_like(t, dtype=output.dtype) for t in (q, k, v)))
        row = RowGradient(gradient, (gradient * output).sum(-1))
        add_band_gradients(_single(q, k, v, ctx.window), Band(0, ctx.window), log_z, row, gradients)
        return *(t.to(q.dtype) for t in gradients), None


def _single(q: Tensor, k: Tensor, v: Tensor, window: int) -> Problem:
    return Problem(q, k, v, window, window, q.shape[-1] ** -0.5, None)


def forms(tokens: int, teacher: int, student: int, device: torch.device) -> dict[str, Form]:
    windows = (teacher, student)
    masks = [visible_keys(tokens, tokens, 0, window, None, device) for window in windows]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        grouped = q.shape[1] != k.shape[1]
        return tuple(F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=grouped) for m in masks)

    def alone(q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(OneWindow.apply(q, k, v, window) for window in windows)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(dual_window_attention(q, k, v, window, window)[0] for window in windows)

    found: dict[str, Form] = {
        "dual": lambda q, k, v: dual_window_attention(q, k, v, teacher, student),
        "masked passes": masked,
        "blocked passes": partial(alone, windows=windows),
        "teacher alone": partial(alone, windows=windows[:1]),
    }
    if device.type == "cuda":
        found["fused passes"] = fused
    return found


def seconds(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def compare(runs: dict[str, Callable[[], object]], base: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of each run, and how much time `base` saves on each other."""
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    device = torch.device(arguments.device)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(arguments.rounds + 1):
        for name, run in runs.items():
            elapsed = 1e3 * seconds(run, device, clock)
            if round_:  # the first is for warming up
                taken[name].append(elapsed)
    saved = {
        name: spread([1 - b / o for b, o in zip(taken[base], values, strict=True)])
        for name, values in taken.items()
        if name != base
    }
    return {"milliseconds": {name: spread(values) for name, values in taken.items()}, "time_saved": saved}


def passes(form: Callable[..., tuple[Tensor, ...]], leaves: list[Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed: the forward pass alone, and with the backward pass from all outputs to all inputs."""
    with torch.no_grad():
        directions = [torch.randn_like(output) for output in form(*leaves)]

    def forward() -> object:
        with torch.no_grad():
            return form(*leaves)

    return {
        "forward": forward,
        "forward_backward": lambda: torch.autograd.grad(form(*leaves), leaves, directions),
    }


def measure(teacher: int, threads: int, arguments: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(SEED)
    torch.set_num_threads(threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    student, tokens = teacher // 2, arguments.tokens
    leaves = [
        torch.randn(arguments.batch, heads, tokens, arguments.dim, device=device).to(dtype).requires_grad_()
        for heads in (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    ]
    timed = {name: passes(form, leaves) for name, form in forms(tokens, teacher, student, device).items()}
    figures: dict[str, object] = {"teacher_window": teacher, "student_window": student, "threads": threads}
    for which in ("forward", "forward_backward"):
        figures[which] = compare({name: runs[which] for name, runs in timed.items()}, "dual", arguments)
    return figures


def convolutions(
    chunks: int, chunk: int, features: int, threads: int, arguments: argparse.Namespace
) -> dict[str, object]:
    torch.manual_seed(SEED)
    torch.set_num_threads(threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    x = torch.randn(1, chunks, chunk, features, device=device).to(dtype).requires_grad_()
    weight = torch.randn(features, 5, device=device).to(dtype).requires_grad_()

    def conv1d(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """The usual way: channels before time, and back."""
        channels = F.pad(x.flatten(0, 1).mT, (weight.shape[1] - 1, 0))
        found = F.conv1d(channels, weight.unsqueeze(1), groups=features)
        return (found.mT.reshape(x.shape),)

    timed = {
        "chunked": passes(lambda x, weight: (short_convolution(x, weight),), [x, weight]),
        "conv1d": passes(conv1d, [x, weight]),
    }
    figures: dict[str, object] = {"chunks": chunks, "chunk": chunk, "features": features, "threads": threads}
    for which in ("forward", "forward_backward"):
        figures[which] = compare({name: runs[which] for name, runs in timed.items()}, "chunked", arguments)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--windows", type=int, nargs="+", default=[1024, 512], help="of the teacher")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall", choices=["wall", "process"], help="process: for a shared machine")
    parser.add_argument("--no-convolution", action="store_true")
    parser.add_argument("--name", default="dual_window", help="of the file of results")
    arguments = parser.parse_args()
    figures: dict[str, list[dict[str, object]]] = {"attention": [], "convolution": []}
    for threads in arguments.threads:
        figures["attention"] += [measure(window, threads, arguments) for window in arguments.windows]
        if not arguments.no_convolution:
            figures["convolution"] += [convolutions(*shape, threads, arguments) for shape in CONVOLUTIONS]
    settings = {name: value for name, value in vars(arguments).items() if name != "name"}
    record(arguments.name, {"settings": settings, "target": TARGET, "figures": figures}, seed=SEED)


if __name__ == "__main__":
    main()
