"""Decode speed: tokens per second behind a memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from ttmem.memory import Memory
from ttmem.models import Model

PROMPT = "\n\nQuestion: What is this?\nAnswer:"


def decode_seconds(model: Model, memory: Memory, tokens: int = 16, batch: int = 1) -> float:
    """Median seconds of one greedy decode step behind `memory`, over `tokens` steps after a short prompt."""
    return step_seconds(model, memory.cache(), memory.document_length, tokens, batch)


@torch.inference_mode()
def step_seconds(model: Model, cache: Any, position: int, tokens: int = 16, batch: int = 1) -> float:
    """`decode_seconds` behind any transformers cache, whose next token has `position`."""
    ids = torch.tensor([model.encode(PROMPT)] * batch, device=model.device)
    seconds = []
    for _ in range(tokens + 1):
        positions = torch.arange(position, position + ids.shape[1], device=model.device).expand(batch, -1)
        start = time.perf_counter()
        logits = model.forward(ids, cache, position_ids=positions, logits_to_keep=1).logits
        position += ids.shape[1]
        ids = logits[:, -1:].argmax(-1)
        ids.cpu()  # wait for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def decode_speed(model: Model, memories: dict[str, Memory], rounds: int = 3) -> dict[str, float]:
    """Tokens per second of each memory: medians over interleaved rounds, so that drift hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in memories}
    for _ in range(rounds):
        for name, memory in memories.items():
            seconds[name].append(decode_seconds(model, memory))
    return {name: 1.0 / statistics.median(values) for name, values in seconds.items()}
