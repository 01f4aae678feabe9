"""The two windows equal two softmaxes, in every form; so do their gradients, alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention import dual_window
from ttmem.attention.dual_window import dual_window_attention
from ttmem.errors import BlockError

Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
MakeSegments = Callable[[int, int, int], Tensor]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, segments: Tensor | None = None
) -> Tensor:
    """Each query alone, over a list of the keys it sees."""
    batch, heads, tokens, _ = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    answer = torch.zeros(batch, heads, tokens, v.shape[3], dtype=q.dtype)
    for b in range(batch):
        ids = [0] * keys if segments is None else segments[b].tolist()
        for t in range(tokens):
            p = keys - tokens + t
            seen = [j for j in range(max(0, p - window + 1), p + 1) if ids[j] == ids[p] and ids[p] >= 0]
            for h in range(heads if seen else 0):
                weights = (scale * k[b, h // group, seen] @ q[b, h, t]).softmax(0)
                answer[b, h, t] = weights @ v[b, h // group, seen]
    return answer


def gradients(outputs: tuple[Tensor, Tensor], leaves: tuple[Tensor, ...], seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    return torch.autograd.grad(outputs, leaves, directions)


def assert_all_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert (f.double() - e.double()).norm() <= tolerance * max(1.0, float(e.double().norm().detach()))


@pytest.mark.parametrize("engine", ["reference", "merge"])
@pytest.mark.parametrize(
    ("tokens", "keys", "windows"), [(7, 7, (5, 2)), (4, 9, (6, 6)), (1, 8, (20, 1)), (6, 6, (1, 1))]
)
@pytest.mark.parametrize("segmented", [False, True])
def test_each_query_alone(
    engine: Any, tokens: int, keys: int, windows: tuple[int, int], segmented: bool, make_qkv: Make,
    make_segments: MakeSegments,
) -> None:  # fmt: skip
    q, k, v = make_qkv(2, 4, 2, tokens, keys)
    segments = make_segments(2, keys, 1) if segmented else None
    found = dual_window_attention(q, k, v, *windows, scale=0.7, segments=segments, engine=engine)
    for output, window in zip(found, windows, strict=True):
        torch.testing.assert_close(output, one_by_one(q, k, v, window, 0.7, segments))


@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    tokens=st.integers(1, 200),
    cached=st.integers(0, 90),
    windows=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    dims=st.sampled_from([(8, 8), (4, 7)]),
    segmented=st.booleans(),
    wanted=st.sampled_from(["both", "teacher", "student"]),
    seed=st.integers(0, 99),
)
def test_merged_bands_equal_two_passes(
    batch: int, kv_heads: int, group: int, tokens: int, cached: int, windows: tuple[int, int], dims: tuple[int, int],
    segmented: bool, wanted: str, seed: int, make_qkv: Make, make_segments: MakeSegments,
) -> None:  # fmt: skip
    """Also across blocks of 64 and 128 queries, and with one of the outputs unused."""
    keys = tokens + cached
    leaves = make_qkv(batch, kv_heads * group, kv_heads, tokens, keys, *dims, seed=seed)
    segments = make_segments(batch, keys, seed) if segmented else None
    results = []
    for engine in ("merge", "reference"):
        outputs = dual_window_attention(*leaves, max(windows), min(windows), segments=segments, engine=engine)  # type: ignore[arg-type]
        used = {"both": outputs, "teacher": outputs[:1], "student": outputs[1:]}[wanted]
        results.append((*outputs, *gradients(used, leaves)))  # type: ignore[arg-type]
    assert_all_close(*results, tolerance=1e-12)


@pytest.mark.parametrize(
    ("tokens", "keys", "windows"),
    [(6, 6, (4, 2)), (6, 6, (4, 1)), (6, 6, (3, 3)), (6, 6, (9, 4)), (6, 6, (9, 8)), (3, 7, (5, 2)), (70, 70, (40, 9))],
)
@pytest.mark.parametrize("value_dim", [2, 3])
def test_gradcheck(tokens: int, keys: int, windows: tuple[int, int], value_dim: int, make_qkv: Make) -> None:
    """value_dim 2 runs torch's flash kernels, 3 plain torch."""
    leaves = make_qkv(1, 2, 1, tokens, keys, 2, value_dim)
    assert torch.autograd.gradcheck(
        lambda q, k, v: dual_window_attention(q, k, v, *windows, engine="merge"), leaves, fast_mode=tokens > 20
    )


@pytest.mark.parametrize("wanted", ["both", "teacher", "student"])
def test_gradients_that_cancel(wanted: str, make_qkv: Make) -> None:
    """Rows of dO_T = -dO_S leave no gradient of the near values, but one of their scores."""
    leaves = make_qkv(1, 2, 1, 80, dim=8, dtype=torch.float32)
    exact = tuple(t.detach().double().requires_grad_() for t in leaves)
    scales = {"both": (1, -1), "teacher": (1, 0), "student": (0, -1)}[wanted]

    def loss(leaves: tuple[Tensor, ...], engine: Any) -> Tensor:
        teacher, student = dual_window_attention(*leaves, 40, 20, engine=engine)
        return (scales[0] * teacher + scales[1] * student).sum()

    found = torch.autograd.grad(loss(leaves, "merge"), leaves)
    expected = torch.autograd.grad(loss(exact, "reference"), exact)
    assert_all_close(found, expected, tolerance=1e-5)


def test_a_row_whose_combined_gradient_is_zero() -> None:
    """The near keys' combined gradient is exactly zero in every row, and the term that is left is not."""
    from ttmem.attention.bands import _flash_backward, _plain_backward

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    mask = torch.zeros(1, 1, 6, 6)
    log_z = (0.5 * q @ k.mT).logsumexp(-1)
    term = torch.randn(1, 2, 6, 1)
    arguments = (torch.zeros_like(q), term, log_z, q, k, v, 0.5, mask)
    assert_all_close(_flash_backward(*arguments), _plain_backward(*arguments), tolerance=1e-5)
    nothing = (arguments[0], torch.zeros_like(term), *arguments[2:])
    assert all((gradient == 0).all() for gradient in _flash_backward(*nothing))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12])
def test_gradients_of_any_size(size: float, make_qkv: Make) -> None:
    leaves = make_qkv(1, 2, 2, 50, dim=8, dtype=torch.float32)
    outputs = dual_window_attention(*leaves, 30, 11, engine="merge")
    directions = [torch.randn_like(o) for o in outputs]
    usual = torch.autograd.grad(outputs, leaves, directions, retain_graph=True)
    scaled = torch.autograd.grad(outputs, leaves, [size * d for d in directions])
    assert_all_close(tuple(g / size for g in scaled), usual, tolerance=1e-5)


def test_scores_that_leave_the_student_no_mass(make_qkv: Make) -> None:
    """Z_S / Z_T underflows: far keys fit e^400 times better than near ones."""
    q, k, v = make_qkv(1, 1, 1, 30, dim=4, dtype=torch.float32)
    with torch.no_grad():
        q.fill_(10)
        k.copy_(torch.linspace(10, -10, 30).view(1, 1, 30, 1).expand_as(k))
    exact = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
    found = dual_window_attention(q, k, v, 20, 3, engine="merge")
    expected = dual_window_attention(*exact, 20, 3, engine="reference")
    assert_all_close(found, expected, tolerance=1e-5)
    assert_all_close(gradients(found, (q, k, v)), gradients(expected, exact), tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, make_qkv: Make) -> None:
    leaves = make_qkv(1, 4, 2, 90, 100, dim=16, dtype=dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in leaves)
    segments = torch.zeros(1, 100, dtype=torch.int32)
    segments[:, :20] = -1
    segments[:, 50:] = 1
    found = dual_window_attention(*leaves, 40, 20, segments=segments, engine="merge")
    expected = dual_window_attention(*exact, 40, 20, segments=segments, engine="reference")
    assert found[0].dtype == found[1].dtype == dtype
    results = (*found, *gradients(found, leaves)), (*expected, *gradients(expected, exact))
    for f, e in zip(*results, strict=True):
        assert f.isfinite().all()
        assert (f.double() - e).norm() < 0.01 * e.norm()


def test_packed_documents_equal_documents_alone(make_qkv: Make) -> None:
    lengths, padding = (30, 5, 80), 9
    q, k, v = make_qkv(1, 4, 2, sum(lengths) + 2 * padding)
    ids = [-1] * padding + [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    packed = dual_window_attention(q, k, v, 25, 7, segments=torch.tensor([ids]), engine="merge")
    start = padding
    for length in lengths:
        here = slice(start, start + length)
        alone = dual_window_attention(q[:, :, here], k[:, :, here], v[:, :, here], 25, 7, engine="merge")
        assert_all_close(tuple(p[:, :, here] for p in packed), alone, tolerance=1e-13)
        start += length
    for output in packed:
        assert (output[:, :, :padding] == 0).all()
        assert (output[:, :, -padding:] == 0).all()


def test_padding_has_no_gradient(make_qkv: Make) -> None:
    leaves = make_qkv(1, 2, 1, 20, dtype=torch.float32)
    segments = torch.tensor([[-1] * 6 + [3] * 14])
    for gradient in gradients(dual_window_attention(*leaves, 9, 4, segments=segments, engine="merge"), leaves):
        assert (gradient[:, :, :6] == 0).all()
        assert gradient[:, :, 6:].abs().sum() > 0


@given(
    split=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    windows=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_a_cache_gives_what_one_pass_gives(split: list[int], windows: tuple[int, int], make_qkv: Make) -> None:
    """Queries in parts, each behind the keys of the parts before."""
    q, k, v = make_qkv(1, 2, 1, sum(split))
    teacher, student = max(windows), min(windows)
    whole = dual_window_attention(q, k, v, teacher, student, engine="merge")
    done, parts = 0, []
    for length in split:
        first = max(0, done - teacher + 1)  # a cache need hold no more than the window reaches
        here, seen = slice(done, done + length), slice(first, done + length)
        part = q[:, :, here], k[:, :, seen], v[:, :, seen]
        parts.append(dual_window_attention(*part, teacher, student, engine="merge"))
        done += length
    assert_all_close(tuple(torch.cat(outputs, 2) for outputs in zip(*parts, strict=True)), whole, tolerance=1e-13)


def test_equal_windows_give_two_tensors(make_qkv: Make) -> None:
    with torch.no_grad():
        teacher, student = dual_window_attention(*make_qkv(), 5, 5, engine="merge")
        assert torch.equal(teacher, student)
        teacher.zero_()
    assert student.abs().sum() > 0


def test_tokens_may_come_before_heads(make_qkv: Make) -> None:
    """As projections leave them, and with a last dimension that is not contiguous."""
    q, k, v = make_qkv(2, 4, 2, 70)
    expected = dual_window_attention(q, k, v, 33, 12, engine="reference")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert_all_close(dual_window_attention(*turned, 33, 12, engine="merge"), expected, tolerance=1e-13)  # type: ignore[misc]
    turned = [t.mT.contiguous().mT for t in (q, k, v)]
    assert_all_close(dual_window_attention(*turned, 33, 12, engine="merge"), expected, tolerance=1e-13)  # type: ignore[misc]


def test_no_queries(make_qkv: Make) -> None:
    q, k, v = make_qkv(2, 4, 2, 6)
    for output in dual_window_attention(q[:, :, :0], k, v, 3, 2):
        assert output.shape == (2, 4, 0, 4)
    for output in dual_window_attention(q[:0], k[:0], v[:0], 3, 2):
        assert output.shape == (0, 4, 6, 4)


def test_gradients_of_nothing_and_of_gradients(make_qkv: Make) -> None:
    q, k, v = make_qkv()
    teacher, student = dual_window_attention(q, k.detach(), v.detach(), 4, 2, engine="merge")
    assert teacher.requires_grad
    assert student.requires_grad
    (gradient,) = torch.autograd.grad(teacher.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_the_engine_on_a_cpu() -> None:
    x = torch.zeros(1, 1, 1, 4)
    assert dual_window.choose_solver(x, x, "reference") is None
    assert dual_window.choose_solver(x, x, "auto") == (dual_window.merge_forward, dual_window.merge_backward)
    with pytest.raises(BlockError, match="no engine 'fast'"):
        dual_window.choose_solver(x, x, "fast")  # type: ignore[arg-type]


def test_triton_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "ttmem.attention.dual_window_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BlockError, match="pip install triton"):
        dual_window.choose_solver(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), "triton")


def change(**changes: Any) -> dict[str, Any]:
    sound = {
        "q": torch.zeros(2, 4, 6, 8),
        "k": torch.zeros(2, 2, 6, 8),
        "v": torch.zeros(2, 2, 6, 8),
        "teacher_window": 4,
        "student_window": 2,
    }
    return {**sound, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_window": 5}, r"4 \(teacher\) and 5 \(student\)"),
        ({"student_window": 0}, "at least 1"),
        ({"teacher_window": 0, "student_window": 0}, "at least 1"),
        ({"teacher_window": -1}, "at most the teacher's"),
        ({"teacher_window": None}, "whole numbers"),
        ({"student_window": None}, "whole numbers"),
        ({"teacher_window": 4.0}, "whole numbers"),
        ({"student_window": "2"}, "whole numbers"),
        ({"k": torch.zeros(2, 3, 6, 8), "v": torch.zeros(2, 3, 6, 8)}, "4 query heads do not divide"),
        ({"k": torch.zeros(2, 2, 5, 8), "v": torch.zeros(2, 2, 5, 8)}, "5 keys for 6 queries"),
        ({"k": torch.zeros(2, 2, 7, 8)}, "must agree"),
        ({"k": torch.zeros(2, 2, 6, 9)}, "must agree"),
        ({"k": torch.zeros(1, 2, 6, 8), "v": torch.zeros(1, 2, 6, 8)}, "must agree"),
        ({"q": torch.zeros(4, 6, 8)}, r"are \[batch, heads, tokens, width\]"),
        ({"q": torch.zeros(2, 4, 6, 8, dtype=torch.int64)}, "floating point"),
        ({"v": torch.zeros(2, 2, 6, 8, dtype=torch.float64)}, "differ in dtype"),
        ({"segments": torch.zeros(2, 5, dtype=torch.int64)}, r"\[2, 6\]"),
        ({"segments": torch.zeros(2, 6)}, "integers"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BlockError, match=message):
        dual_window_attention(**change(**changes))


def test_what_is_sound_is_taken() -> None:
    """The refusals above differ from this in one point each."""
    assert dual_window_attention(**change())[0].shape == (2, 4, 6, 8)
