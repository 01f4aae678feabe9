"""The scan over chunks: against the formulas, in every way of cutting it, with its gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.fast_weights import scan
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.naive import read
from ttmem.fast_weights.scan import make_plan, scan_memory, scan_state

D, F = 3, 4


def random(B: int, T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, T, n, dtype=torch.float64, generator=generator) for n in (F, F, D))  # type: ignore[return-value]


def documents(lengths: list[int], T: int) -> Tensor:
    """Where each token's document begins, for documents one after the other."""
    first = [start for start, n in zip([sum(lengths[:i]) for i in range(len(lengths))], lengths, strict=True)
             for _ in range(n)]  # fmt: skip
    return torch.tensor(first[:T])


def formula(z: Tensor, keys: Tensor, values: Tensor, C: int) -> Tensor:
    """One document, by `naive.read` with W_0 = 0."""
    updates = [values[i * C : (i + 1) * C].mT @ keys[i * C : (i + 1) * C] for i in range(z.shape[0] // C)]
    return read(torch.zeros(D, F, dtype=z.dtype), updates, z, C)


def masked(z: Tensor, keys: Tensor, values: Tensor, first: Tensor, C: int) -> Tensor:
    """One row of documents, as one masked product."""
    t = torch.arange(z.shape[0])
    begin = t - (t - first) % C
    mask = (t >= first.unsqueeze(1)) & (t < begin.unsqueeze(1))
    return ((z @ keys.mT) * mask) @ values


@pytest.fixture(params=[1, 6, 256])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of one chunk each, of a few, and one block."""
    monkeypatch.setattr(scan, "MIN_BLOCK", request.param)
    return int(request.param)


@pytest.mark.parametrize("C", [1, 3, 4, 50])
@pytest.mark.parametrize("T", [1, 4, 23])
def test_one_document_per_row(T: int, C: int, block: int) -> None:
    z, keys, values = random(2, T)
    found = scan_memory(z, keys, values, make_plan(Layout(2, T, z.device), C, 0, D, F))
    expected = [formula(*row, C) for row in zip(z, keys, values, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("C", [1, 3, 5])
def test_packed_documents(C: int, block: int) -> None:
    z, keys, values = random(3, 29)
    first = torch.stack([documents(lengths, 29) for lengths in ([29], [2, 1, 9, 17], [11, 11, 7])])
    layout = Layout(3, 29, z.device, first=first, packed=True)
    found = scan_memory(z, keys, values, make_plan(layout, C, 0, D, F))
    expected = [masked(*row, C) for row in zip(z, keys, values, first, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))
    parts = [slice(0, 2), slice(2, 3), slice(3, 12), slice(12, 29)]
    alone = torch.cat([formula(z[1, part], keys[1, part], values[1, part], C) for part in parts])
    torch.testing.assert_close(found[1], alone)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_gradient(packed: bool, inclusive: bool, block: int) -> None:
    T, C = 14, 3
    z, keys, values = (x.requires_grad_() for x in random(2, T))
    first = torch.stack([documents([5, 9], T), documents([1, 2, 11], T)]) if packed else None
    plan = make_plan(Layout(2, T, z.device, first=first, packed=packed), C, 0, D, F, inclusive)
    torch.autograd.gradcheck(lambda *x: scan_memory(*x, plan), (z, keys, values))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 6), st.sampled_from([1, 256]))
def test_behind_a_state(parts: list[int], C: int, smallest: int) -> None:
    """Piece after piece, with the keys of the unfinished chunk handed on, as the layers do."""
    T = sum(parts)
    z, keys, values = random(2, T)
    expected = torch.stack([formula(*row, C) for row in zip(z, keys, values, strict=True)])
    out, memory, done = [], None, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "MIN_BLOCK", smallest)
        for n in parts:
            held = done % C
            layout = Layout(2, n, z.device, counts=done)
            plan = make_plan(layout, C, held, D, F)
            part = slice(done - held, done + n)
            end = n - (done + n) % C
            read_now, memory = scan_state(z[:, done : done + n], keys[:, part], values[:, part], plan, memory, end)
            out.append(read_now)
            done += n
    torch.testing.assert_close(torch.cat(out, dim=1), expected)


def test_an_inclusive_scan_reads_the_own_chunk() -> None:
    z, keys, values = random(1, 6)
    found = scan_memory(z, keys, values, make_plan(Layout(1, 6, z.device), 3, 0, D, F, inclusive=True))
    whole = z[0] @ (values[0, :3].mT @ keys[0, :3]).mT
    torch.testing.assert_close(found[0, :3], whole[:3])


def test_products_are_summed_up_in_fp32() -> None:
    z, keys, values = (x.to(torch.bfloat16) for x in random(1, 700))
    plan = make_plan(Layout(1, 700, z.device), 7, 0, D, F)
    _, memory = scan_state(z, keys, values, plan, None, 700)
    assert memory is not None
    assert memory.dtype == torch.float32
