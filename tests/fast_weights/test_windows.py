"""Attention with two windows, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem.fast_weights import windows
from ttmem.fast_weights.naive import attention
from ttmem.fast_weights.windows import dual_window_attention, window_attention


def qkv(T: int, S: int, kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(T + S)

    def random(heads: int, n: int) -> torch.Tensor:
        return torch.randn(2, heads, n, 8, dtype=torch.float64, generator=generator)

    return random(4, T), random(kv_heads, S), random(kv_heads, S)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    groups, held = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    q = torch.nn.functional.pad(q, (0, 0, held, 0))
    return torch.stack([attention(*row, window)[:, held:] for row in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("pair", [(None, 3), (9, 4), (4, 1), (40, 40), (5, 5), (200, 100)])
@pytest.mark.parametrize("sizes", [(13, 13), (1, 13), (6, 13), (1, 1)])
def test_both_windows_are_the_definition(pair: tuple[int | None, int], sizes: tuple[int, int]) -> None:
    q, k, v = qkv(*sizes)
    for found, window in zip(dual_window_attention(q, k, v, *pair), pair, strict=True):
        torch.testing.assert_close(found, expected(q, k, v, window))


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_of_queries(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "BLOCK", 3)
    q, k, v = qkv(11, 14)
    torch.testing.assert_close(window_attention(q, k, v, window), expected(q, k, v, window))


def test_a_query_sees_its_own_segment() -> None:
    q, k, v = qkv(10, 10)
    found = window_attention(q, k, v, 5, segments=torch.tensor([[0] * 4 + [5] * 6, [0] * 10]))
    torch.testing.assert_close(found[1:], expected(q, k, v, 5)[1:])
    torch.testing.assert_close(found[:1, :, :4], expected(q[:1, :, :4], k[:1, :, :4], v[:1, :, :4], 5))
    torch.testing.assert_close(found[:1, :, 4:], expected(q[:1, :, 4:], k[:1, :, 4:], v[:1, :, 4:], 5))


def test_negative_segments_are_seen_by_nobody() -> None:
    q, k, v = qkv(3, 8)
    found = window_attention(q, k, v, 7, segments=torch.tensor([[-1] * 4 + [0] * 4, [0] * 8]))
    torch.testing.assert_close(found[:1], expected(q[:1], k[:1, :, 4:], v[:1, :, 4:], 7))
    torch.testing.assert_close(found[1:], expected(q[1:], k[1:], v[1:], 7))


@pytest.mark.parametrize("given", ["whole", "padded", "packed"])
@pytest.mark.parametrize("teacher", [24, None])
def test_the_fused_form_in_a_model(make_fast: Any, make_ids: Any, teacher: int | None, given: str) -> None:
    """Logits and gradients of a model that shares the windows' work are those of one that makes two passes."""
    found = []
    for engine in ("plain", "fused"):
        model = make_fast(dual_engine=engine, teacher_window=teacher, student_window=9).train()
        ids = make_ids(2, 80)
        kwargs: dict[str, Any] = {}
        if given == "padded":
            kwargs["attention_mask"] = torch.ones_like(ids)
            kwargs["attention_mask"][0, :13] = 0
        if given == "packed":
            kwargs["position_ids"] = torch.cat([torch.arange(50), torch.arange(30)]).expand(2, -1)
        logits = model(ids, **kwargs).logits
        seen = kwargs.get("attention_mask", torch.ones_like(ids)).bool()
        loss = logits[seen].square().mean()
        loss.backward()
        found.append((logits[seen], [p.grad for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-6, atol=1e-8)
