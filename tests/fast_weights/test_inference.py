"""Whatever the split, the padding, the packing or the batch: a text's logits are those of one forward over it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from ttmem.errors import BudgetError, MemoryMismatchError, ModelError
from ttmem.fast_weights import FastWeightCache, TTCDForCausalLM, scan, state_bytes, ttcd
from ttmem.fast_weights.scan import make_plan
from ttmem.models.layers import cache_keyword

LENGTH = 31
FEW = settings(max_examples=8)  # for each of eleven models
WAYS = ("ttcd", "in_place", "lact", "deltanet", "gated_deltanet", "window")


@pytest.fixture(scope="module")
def models(make_fast: Any) -> dict[str, TTCDForCausalLM]:
    return {
        **{rule: make_fast(rule) for rule in WAYS},
        "full teacher": make_fast(teacher_window=None, windows=None),
        "no convolution": make_fast(conv_kernel=0),
        "hidden target": make_fast("in_place", target="hidden"),
        "muon": make_fast("lact", lact_muon=True),
        "long chunks": make_fast(chunk_size=100),
    }


@pytest.fixture(scope="module")
def alone(models: dict[str, TTCDForCausalLM], make_ids: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        return {name: model(make_ids(3, LENGTH), use_cache=False).logits for name, model in models.items()}


@pytest.fixture(
    scope="module", params=[*WAYS, "full teacher", "no convolution", "hidden target", "muon", "long chunks"]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cuts(count: int, parts: list[int]) -> list[int]:
    """Piece sizes that make up `count`, from wishes."""
    sizes: list[int] = []
    while (left := count - sum(sizes)) > 0:
        sizes.append(min(parts[len(sizes) % len(parts)], left))
    return sizes


def padded(ids: Tensor, lengths: list[int], left: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the first `lengths` tokens with `left` padding before them, and their mask."""
    width = max(n + p for n, p in zip(lengths, left, strict=True))
    batch, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, (n, p) in enumerate(zip(lengths, left, strict=True)):
        batch[row, p : p + n], mask[row, p : p + n] = ids[row, :n], 1
    return batch, mask


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@FEW
@given(parts=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_any_split(name: str, models: Any, alone: Any, make_ids: Any, parts: list[int]) -> None:
    state, found = models[name].new_state(), []
    with torch.no_grad():
        for piece in make_ids(3, LENGTH).split(cuts(LENGTH, parts), dim=1):
            found.append(models[name](piece, cache=state).logits)
    close(torch.cat(found, dim=1), alone[name])
    assert state.get_seq_length() == LENGTH


@FEW
@given(
    parts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    lengths=st.tuples(*[st.integers(0, LENGTH)] * 3),
    left=st.tuples(*[st.integers(0, 6)] * 3),
    whole_mask=st.booleans(),
)
def test_any_padding_and_any_split(
    name: str, models: Any, alone: Any, make_ids: Any, parts: Any, lengths: Any, left: Any, whole_mask: bool
) -> None:
    ids, mask = padded(make_ids(3, LENGTH), lengths, left)
    if ids.shape[1] == 0:
        return
    state, found, done = models[name].new_state(), [], 0
    with torch.no_grad():
        for piece in ids.split(cuts(ids.shape[1], parts), dim=1):
            begin = 0 if whole_mask else done
            done += piece.shape[1]
            found.append(models[name](piece, attention_mask=mask[:, begin:done], cache=state).logits)
        at_once = models[name](ids, attention_mask=mask, use_cache=False).logits
    for logits in (torch.cat(found, dim=1), at_once):
        for row, n in enumerate(lengths):
            close(logits[row][mask[row].bool()], alone[name][row, :n])


@FEW
@given(
    documents=st.lists(st.tuples(st.integers(0, 2), st.integers(1, LENGTH)), min_size=1, max_size=5),
    behind=st.integers(0, 3),
    before=st.integers(0, 3),
)
def test_packed_documents(
    name: str, models: Any, alone: Any, make_ids: Any, documents: Any, behind: int, before: int
) -> None:
    """Also beside a row with one document only, and with padding at either end."""
    ids = make_ids(3, LENGTH)
    row = torch.cat([ids[which, :n] for which, n in documents])
    positions = torch.cat([torch.arange(n) for _, n in documents])
    row, positions = (torch.nn.functional.pad(x, (before, behind)).unsqueeze(0) for x in (row, positions))
    mask = torch.nn.functional.pad(torch.ones(1, row.shape[1] - before - behind), (before, behind))
    beside = torch.zeros_like(row)
    beside[0, :LENGTH] = ids[0, : row.shape[1]]
    counted = torch.arange(row.shape[1]).unsqueeze(0)
    with torch.no_grad():
        logits = models[name](
            torch.cat([row, beside]),
            position_ids=torch.cat([positions, counted]),
            attention_mask=torch.cat([mask, torch.ones_like(mask)]),
            use_cache=False,
        ).logits
    at = before
    for which, n in documents:
        close(logits[0, at : at + n], alone[name][which, :n])
        at += n
    n = min(LENGTH, row.shape[1])
    close(logits[1, :n], alone[name][0, :n])


@pytest.mark.parametrize("rule", ["ttcd", "in_place", "window"])
def test_the_last_document_of_a_packed_row_goes_on(rule: str, models: Any, alone: Any, make_ids: Any) -> None:
    ids = make_ids(3, LENGTH)
    row = torch.cat([ids[0, :13], ids[1, :17]]).unsqueeze(0)
    positions = torch.cat([torch.arange(13), torch.arange(17)]).unsqueeze(0)
    state = models[rule].new_state()
    with torch.no_grad():
        models[rule](row[:, :9], position_ids=positions[:, :9], cache=state)
        models[rule](row[:, 9:], position_ids=positions[:, 9:], cache=state)
        close(models[rule](ids[1:2, 17:], cache=state).logits, alone[rule][1:2, 17:])
        models[rule](ids[2:, :6], position_ids=torch.arange(6).unsqueeze(0), cache=state)  # and then a new one
        close(models[rule](ids[2:, 6:], cache=state).logits, alone[rule][2:, 6:])


def test_a_prompt_shorter_than_a_chunk_runs_the_same_network(models: Any, alone: Any, make_ids: Any) -> None:
    """Convolutions included, with a cache and without."""
    ids = make_ids(3, LENGTH)[:, :3]
    with torch.no_grad():
        close(models["ttcd"](ids).logits, alone["ttcd"][:, :3])
        close(models["ttcd"](ids, use_cache=False).logits, alone["ttcd"][:, :3])


def test_what_was_written_is_used_when_decoding(models: Any, alone: Any, make_ids: Any) -> None:
    """A decode step without the written dW would be far off."""
    ids, model = make_ids(3, LENGTH), models["ttcd"]
    state = model.new_state()
    with torch.no_grad():
        model(ids[:, :-1], cache=state)
        for layer in state.layers:
            layer.tensors.pop("memory", None)
        forgotten = model(ids[:, -1:], cache=state).logits
    assert (forgotten[:, -1] - alone["ttcd"][:, -1]).abs().max() > 1e-3


def test_generate_equals_running_the_whole_text_each_time(any_fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids, mask = padded(make_ids(3, 12), [12, 3, 7], [0, 9, 5])
    found = any_fast.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    for row, n in enumerate((12, 3, 7)):
        text = make_ids(3, 12)[row : row + 1, :n]
        for _ in range(9):
            with torch.no_grad():
                text = torch.cat([text, any_fast(text, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert found[row, 12:].tolist() == text[0, n:].tolist()


def test_beams_equal_those_without_a_cache(any_fast: TTCDForCausalLM, make_ids: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    with_cache = any_fast.generate(make_ids(2, 8), **options)
    assert torch.equal(with_cache, any_fast.generate(make_ids(2, 8), use_cache=False, **options))


def test_generate_goes_on_from_a_state(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(1, 20)
    state = fast.read(ids[:, :13], piece=4)
    once = fast.generate(ids, max_new_tokens=6, do_sample=False)
    found = fast.generate(
        ids[:, 13:],
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        **{cache_keyword(fast): state},
    )
    assert found[0, 7:].tolist() == once[0, 20:].tolist()


def test_one_state_for_many_rows(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(3, 20)
    ids[:, :13] = ids[0, :13]
    state = fast.read(ids[:1, :13])
    with torch.no_grad():
        close(fast(ids[:, 13:], cache=state).logits, fast(ids, use_cache=False).logits[:, 13:])
        with pytest.raises(MemoryMismatchError, match="3 rows, and the batch has 2"):
            fast(ids[:2], cache=state)


@pytest.mark.parametrize("read", [0, 10, 13])
def test_no_new_token(any_fast: TTCDForCausalLM, make_ids: Any, read: int) -> None:
    """It changes nothing: in the middle of a chunk, at its end, and before anything is read."""
    ids, state = make_ids(2, 20), any_fast.new_state()
    with torch.no_grad():
        assert any_fast(ids[:, :0], use_cache=False).logits.shape == (2, 0, 60)
        if read:
            any_fast(ids[:, :read], cache=state)
        assert any_fast(ids[:, :0], cache=state).logits.shape == (2, 0, 60)
        found = any_fast(ids[:, read:], cache=state).logits
        close(found, any_fast(ids, use_cache=False).logits[:, read:])


def test_reset_and_copy(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(1, 20)
    state = fast.read(ids[:, :13])
    kept = state.copy()
    with torch.no_grad():
        first = fast(ids[:, 13:], cache=state).logits
        close(fast(ids[:, 13:], cache=kept).logits, first)
        state.reset()
        assert state.num_bytes() == 0
        assert state.get_seq_length() == 0
        close(fast(ids, cache=state).logits[:, 13:], first)


def test_what_cannot_be_done(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(1, 20)
    state = fast.read(ids)
    with pytest.raises(MemoryMismatchError, match="cannot be taken back"):
        state.crop(-2)
    with pytest.raises(MemoryMismatchError, match="cannot be taken back"):
        state.layers[0].crop(-2)
    assert not state.is_croppable
    with pytest.raises(MemoryMismatchError, match="cannot be taken back"):
        fast.generate(
            ids,
            prompt_lookup_num_tokens=2,
            max_new_tokens=4,
            do_sample=False,
            **{cache_keyword(fast): fast.new_state()},
        )
    with pytest.raises(ModelError, match="DynamicCache holds no fast weights"):
        fast(ids, cache=DynamicCache(config=fast.config))
    with pytest.raises(ModelError, match="2 layers, and the model has 3"):
        fast(ids, cache=FastWeightCache(2))


def test_a_state_in_another_model_says_so(make_network: Any) -> None:
    llama = make_network("llama")
    with pytest.raises(MemoryMismatchError, match="this model has none"):
        llama(torch.ones(1, 4, dtype=torch.long), **{cache_keyword(llama): FastWeightCache(3)})


@pytest.mark.parametrize("rule", WAYS)
def test_the_state_is_bounded(models: Any, make_ids: Any, rule: str) -> None:
    """By what the configuration says, which a text that ends just before a chunk does reach."""
    model = models[rule]
    bound = state_bytes(model.config, batch=2, itemsize=8)
    sizes = {}
    for length in (3, 8, 39, 84):
        state = model.read(make_ids(2, length))
        sizes[length] = state.num_bytes()
        assert sizes[length] <= bound
        held = sum(t.untyped_storage().nbytes() for layer in state.layers for t in layer.tensors.values())
        assert held <= sizes[length] * 9 / 8  # nothing keeps the whole text alive
    assert sizes[39] == sizes[84] == bound


def test_the_bound_of_full_attention_needs_a_length(models: Any, make_ids: Any) -> None:
    model = models["full teacher"]
    with pytest.raises(BudgetError, match="say for how many tokens"):
        state_bytes(model.config)
    assert model.read(make_ids(1, 39)).num_bytes() == state_bytes(model.config, itemsize=8, tokens=39)


def test_no_gradient_is_kept(fast: TTCDForCausalLM, make_ids: Any) -> None:
    state = fast.new_state()
    fast(make_ids(1, 20), cache=state)
    assert not any(tensor.requires_grad for layer in state.layers for tensor in layer.tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(make_fast: Any, make_ids: Any, dtype: torch.dtype) -> None:
    model = make_fast(dtype=dtype)
    ids = make_ids(2, LENGTH)
    with torch.no_grad():
        full, state = model(ids, use_cache=False).logits, model.new_state()
        found = torch.cat([model(piece, cache=state).logits for piece in ids.split(4, dim=1)], dim=1)
    assert full.dtype == dtype
    error = (found - full).abs().max() / full.abs().max()
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


@settings(max_examples=15)
@given(
    parts=st.lists(st.integers(1, 19), min_size=1, max_size=4),
    lengths=st.tuples(*[st.integers(0, LENGTH)] * 3),
    left=st.tuples(*[st.integers(0, 6)] * 3),
    cut=st.integers(1, LENGTH - 1),
)
@pytest.mark.parametrize("rule", ["ttcd", "in_place"])
def test_the_same_in_many_blocks(
    rule: str, models: Any, alone: Any, make_ids: Any, parts: Any, lengths: Any, left: Any, cut: int
) -> None:
    """These models are so small that a text is one block of the scan; here every chunk is one."""
    model, ids = models[rule], make_ids(3, LENGTH)
    batch, mask = padded(ids, lengths, left)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(scan, "MIN_BLOCK", 1)
        patch.setattr(ttcd, "make_plan", lambda layout, chunk, held, *_, **__: make_plan(layout, chunk, held, 1, 1))
        state, found = model.new_state(), []
        for piece, real in zip(*(x.split(cuts(batch.shape[1], parts) or 1, dim=1) for x in (batch, mask)), strict=True):
            found.append(model(piece, attention_mask=real, cache=state).logits)
        for row, n in enumerate(lengths if batch.shape[1] else ()):
            close(torch.cat(found, dim=1)[row][mask[row].bool()], alone[rule][row, :n])
        packed = torch.cat([ids[0, :cut], ids[1], ids[2, :cut]]).unsqueeze(0)
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH), torch.arange(cut)]).unsqueeze(0)
        state, found = model.new_state(), []
        sizes = cuts(packed.shape[1], parts)
        for piece, places in zip(packed.split(sizes, dim=1), positions.split(sizes, dim=1), strict=True):
            found.append(model(piece, position_ids=places, cache=state).logits)
        at_once = model(packed, position_ids=positions, use_cache=False).logits
    for logits in (torch.cat(found, dim=1), at_once):
        close(logits[0, :cut], alone[rule][0, :cut])
        close(logits[0, cut : cut + LENGTH], alone[rule][1])
        close(logits[0, cut + LENGTH :], alone[rule][2, :cut])
