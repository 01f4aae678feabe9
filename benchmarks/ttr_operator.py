"""The TTR operator against mean pooling, attention pooling and the MLP merger, with memory traffic as the limit.

    python benchmarks/ttr_operator.py [--tokens 4 9 64] [--dims 1024 2048] [--dtype float32] [--megabytes 128]
        [--rounds 15] [--device cpu]

Forward, and forward with backward, of each compressor on the same blocks, one after the other in each round. A figure
is the median over rounds with its quartiles; ratios are of the rounds' pairs. `gigabytes_per_second` is the least
traffic that the pass needs (tokens read and answers written; backward: answers' gradients read, tokens read again,
tokens' gradients written) over its time, beside what this machine reads and copies in the same run. The MLP merger is
bound by its arithmetic, so it runs on fewer blocks and its times are scaled by the number of blocks; its hidden width
is T d as in vision-language models, or 4096 where T d is above `--widest`: it would not fit the memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import record
from torch import Tensor, nn

from ttmem.regression import AttentionPooling, MeanPooling, MLPMerger, TTRCompressor

SEED = 0
MLP_BLOCKS = 256
NARROW = 4096


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def passes(module: nn.Module, x: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed: the forward pass alone, and with the backward pass to tokens and parameters."""
    leaf = x.detach().requires_grad_()
    wanted = [leaf, *module.parameters()]
    direction = torch.randn(x.shape[0], x.shape[-1], device=x.device).to(x.dtype)

    def forward() -> Tensor:
        with torch.no_grad():
            return module(x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(leaf), wanted, direction)

    return {"forward": forward, "forward_backward": both}


def traffic(which: str, x: Tensor) -> int:
    """Bytes that have to move."""
    tokens, answers = x.numel() * x.element_size(), x.shape[0] * x.shape[-1] * x.element_size()
    return tokens + answers if which == "forward" else 3 * tokens + 2 * answers


def bandwidth(x: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of reading once (a sum) and of copying (a read and a write)."""
    flat, target = x.flatten(), torch.empty_like(x.flatten())
    size = flat.numel() * flat.element_size() / 1e9
    reading, copying = [], []
    for _ in range(rounds + 1):
        reading.append(size / seconds(lambda: flat.sum(dtype=torch.float32), x.device))
        copying.append(2 * size / seconds(lambda: target.copy_(flat), x.device))
    return {"read": spread(reading[1:]), "copy": spread(copying[1:])}


def measure(T: int, d: int, arguments: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(SEED)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    size = torch.empty((), dtype=dtype).element_size()
    blocks = max(1, arguments.megabytes * 2**20 // (T * d * size))
    x = torch.randn(blocks, T, d, device=device).to(dtype)
    hidden = T * d if T * d <= arguments.widest else NARROW
    few = min(blocks, MLP_BLOCKS)
    systems = {
        "mean": (MeanPooling(), x),
        "attention": (AttentionPooling(d), x),
        "ttr": (TTRCompressor(d), x),
        "ttr plain torch": (TTRCompressor(d, engine="plain"), x),
        "mlp": (MLPMerger(d, T, hidden), x[:few]),
    }
    # The operator's parameters stay fp32, whatever the tokens are.
    runs = {
        name: passes((module if "ttr" in name else module.to(dtype)).to(device), own)
        for name, (module, own) in systems.items()
    }
    taken: dict[tuple[str, str], list[float]] = {(name, which): [] for name in runs for which in runs[name]}
    for round_ in range(arguments.rounds + 1):
        for name, which in taken:
            if name in ("mlp", "ttr plain torch") and round_ > arguments.slow_rounds:
                continue
            elapsed = seconds(runs[name][which], device) * blocks / systems[name][1].shape[0]
            if round_:  # the first is for warming up
                taken[name, which].append(elapsed)
    figures: dict[str, object] = {"tokens": T, "dim": d, "blocks": blocks, "mlp_hidden": hidden, "mlp_blocks": few}
    for which in ("forward", "forward_backward"):
        moved = traffic(which, x)
        figures[which] = {
            "bytes": moved,
            "microseconds_per_block": {
                name: spread([1e6 * s / blocks for s in taken[name, which]]) for name in runs
            },
            "time_relative_to_mean": relative(taken, which, "mean"),
            "time_relative_to_mlp": relative(taken, which, "mlp"),
            "gigabytes_per_second": {
                name: spread([moved / s / 1e9 for s in taken[name, which]]) for name in runs if name != "mlp"
            },
        }
    figures["bandwidth"] = bandwidth(x, arguments.rounds)
    return figures


def relative(taken: dict[tuple[str, str], list[float]], which: str, other: str) -> dict[str, dict[str, float]]:
    """Of the rounds that both took part in."""
    base = taken[other, which]
    return {
        name: spread([s / b for s, b in zip(values, base, strict=False)])
        for (name, pass_), values in taken.items()
        if pass_ == which and name != other
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 9, 64])
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--megabytes", type=int, default=128, help="of tokens; more than the last cache holds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=5, help="of the MLP merger and of plain torch")
    parser.add_argument("--widest", type=int, default=18432, help="T d up to which the MLP merger is that wide")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="ttr_operator", help="of the file of results")
    arguments = parser.parse_args()
    figures = [measure(T, d, arguments) for d in arguments.dims for T in arguments.tokens]
    settings = {name: value for name, value in vars(arguments).items() if name != "name"}
    record(arguments.name, {"settings": settings, "figures": figures}, seed=SEED)


if __name__ == "__main__":
    main()
