"""Decode speed: the steps are real ones, at the right positions."""

from __future__ import annotations

from typing import Any

import torch

from ttmem import Model
from ttmem.evaluation.speed import PROMPT, decode_seconds, decode_speed


def test_steps_follow_the_document_one_by_one(any_model: Model, make_full: Any) -> None:
    full = make_full(any_model)
    seen: list[list[list[int]]] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["position_ids"].tolist())

    handle = any_model.network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        seconds = decode_seconds(any_model, full, tokens=3, batch=2)
    finally:
        handle.remove()
    n, length = full.document_length, len(any_model.encode(PROMPT))
    assert seconds > 0
    assert seen[0] == [list(range(n, n + length))] * 2
    assert seen[1:] == [[[n + length + step]] * 2 for step in range(3)]


def test_speeds_of_several_memories(model: Model, make_full: Any) -> None:
    full = make_full(model)
    speeds = decode_speed(model, {"a": full, "b": full.to(dtype=torch.float32)}, rounds=1)
    assert set(speeds) == {"a", "b"}
    assert all(speed > 0 for speed in speeds.values())
