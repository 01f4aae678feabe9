"""What fast weights cost: reading a prompt, and decoding behind it, against the context's length.

    python benchmarks/fast_weights_cost.py [--systems window full in_place ttcd ...] [--contexts 1024 2048 4096 8192]
        [--hidden 192] [--window 512] [--rounds 7] [--minutes 5] [--threads 1] [--dtype float32] [--device cpu]

All systems are models of one shape with random weights; what they cost does not depend on what they have learned.
"ttcd" attends through both windows at once, "ttcd_two_passes" attends twice. Per round, every system reads every
context into a state, piece by piece, and decodes a few tokens behind it, one system right after the other; ratios are
those of a round's pairs, figures the median over rounds with quartiles. --minutes ends the rounds early, after two at
least.

A decode step is timed as the median of the steps, and once where it completes a chunk and the fast weights change.
State bytes are those really held behind the context, beside the bound of `state_bytes`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common import record
from dual_window import seconds, spread

from ttmem.fast_weights import FastWeightCache, TTCDForCausalLM, state_bytes
from ttmem.fast_weights.recipes import SYSTEMS, make_config
from ttmem.progress import ConsoleProgress

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{system: (system, {}) for system in SYSTEMS},
    "ttcd_two_passes": ("ttcd", {"dual_engine": "plain"}),
}
REFERENCES = ("window", "in_place")
"""Systems that the others' prefill is compared with: sliding-window attention and In-Place TTT."""
WARM_UP = 64
LEAD = 8
"""Steps before the one that completes a chunk."""


@dataclass
class Costs:
    """Seconds of one system behind one context, a number per round; the state's bytes."""

    prefill: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    chunk_end: list[float] = field(default_factory=list)
    state: int = 0


def shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's size: windows and chunk in the recipes' proportions."""
    return {
        "vocab_size": 512,
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate or 8 * arguments.hidden // 3,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.heads,
        "max_position_embeddings": 2 * max(arguments.contexts),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "fast_layers": list(range(0, arguments.layers, arguments.every)),
        "windows": arguments.window,
        "teacher_window": arguments.window,
        "student_window": arguments.window // 2,
        "chunk_size": arguments.window // 2,
        "lact_heads": arguments.heads,
    }


def build(name: str, arguments: argparse.Namespace) -> TTCDForCausalLM:
    system, changes = VARIANTS[name]
    torch.manual_seed(arguments.seed)
    network = TTCDForCausalLM(make_config(shape(arguments), system, changes))
    return network.to(arguments.device, getattr(torch, arguments.dtype)).eval()


@torch.inference_mode()
def measure(network: TTCDForCausalLM, context: int, arguments: argparse.Namespace, costs: Costs) -> None:
    """One round: read `context` tokens, all but the last few steps of a chunk, then decode over its end."""
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    device, chunk = torch.device(arguments.device), arguments.window // 2
    generator = torch.Generator().manual_seed(arguments.seed)
    length = max(1, context // chunk * chunk - LEAD)
    ids = torch.randint(0, 512, (1, length + arguments.steps), generator=generator).to(device)
    state: FastWeightCache = network.new_state()
    taken = seconds(lambda: network.read(ids[:, :length], state, arguments.piece), device, clock)
    costs.prefill.append(taken / length)
    costs.state = state.num_bytes()
    steps = [
        seconds(lambda at=at: network(input_ids=ids[:, at : at + 1], cache=state), device, clock)  # type: ignore[misc]
        for at in range(length, length + arguments.steps)
    ]
    costs.chunk_end.append(steps[LEAD - 1])
    costs.step.append(statistics.median(steps))


def summary(costs: dict[str, dict[int, Costs]], arguments: argparse.Namespace) -> dict[str, Any]:
    """By system and context."""
    itemsize = getattr(torch, arguments.dtype).itemsize
    rows: dict[str, Any] = {}
    for name, by_context in costs.items():
        config = make_config(shape(arguments), *VARIANTS[name])
        first = by_context[min(by_context)]
        rows[name] = {}
        for context, own in by_context.items():
            row: dict[str, Any] = {
                "prefill_tokens_per_second": spread([1.0 / s for s in own.prefill]),
                "decode_ms": spread([1e3 * s for s in own.step]),
                "decode_ms_at_chunk_end": spread([1e3 * s for s in own.chunk_end]),
                "decode_relative_to_shortest": spread(_ratios(own.step, first.step)),
                "state_bytes": own.state,
                "state_bytes_bound": state_bytes(config, itemsize=itemsize, tokens=context + arguments.steps),
            }
            for reference in REFERENCES:
                if reference in costs and reference != name:
                    other = costs[reference][context]
                    row[f"prefill_time_relative_to_{reference}"] = spread(_ratios(own.prefill, other.prefill))
            rows[name][str(context)] = row
    return rows


def _ratios(these: list[float], those: list[float]) -> list[float]:
    return [a / b for a, b in zip(these, those, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--every", type=int, default=2, help="a fast layer every so many layers")
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--window", type=int, default=512, help="of the teacher; the student's and the chunk are half")
    parser.add_argument("--piece", type=int, default=2048, help="tokens read at once")
    parser.add_argument("--steps", type=int, default=24, help="decode steps behind each context")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=5.0, help="no new round after so much time")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall", choices=["wall", "process"], help="process: for a shared machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fast_weights_cost", help="of the file of results")
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.steps < LEAD:
        parser.error(f"quartiles need 2 rounds, and the end of a chunk {LEAD} steps")
    torch.set_num_threads(arguments.threads)
    networks = {name: build(name, arguments) for name in arguments.systems}
    costs = {name: {context: Costs() for context in arguments.contexts} for name in networks}
    start, rounds = time.perf_counter(), 0
    with ConsoleProgress().stage("rounds", arguments.rounds) as advance:
        for network in networks.values():
            network.read(torch.zeros(1, WARM_UP, dtype=torch.long, device=arguments.device))
        while rounds < 2 or (rounds < arguments.rounds and time.perf_counter() - start < 60 * arguments.minutes):
            for context in arguments.contexts:
                for name, network in networks.items():
                    measure(network, context, arguments, costs[name][context])
            rounds += 1
            advance(1)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("name", "seed")}
    figures = {
        "settings": {**settings, "rounds": rounds},
        "parameters": {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()},
        "costs": summary(costs, arguments),
    }
    record(arguments.name, figures, arguments.seed)


if __name__ == "__main__":
    main()
