"""The memory file: what is written is what is read, and a write is all or nothing."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from ttmem import Memory, MemoryFileError, Model
from ttmem.memory import MemoryInfo, file
from ttmem.memory.layer import LayerMemory, WindowMemory

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_memory(lengths: list[list[int]], dtype: torch.dtype = torch.float32, window: bool = False) -> Memory:
    """One layer for each list of lengths (none: unbiased), with a window layer in front on request."""
    torch.manual_seed(0)
    layers: list[LayerMemory | WindowMemory] = []
    if window:
        layers.append(WindowMemory(torch.randn(2, 5, 8).to(dtype), torch.randn(2, 5, 8).to(dtype), 6))
    for i, heads in enumerate(lengths):
        keys = [torch.randn(n, 8).to(dtype) for n in heads]
        values = [torch.randn(n, 4).to(dtype) for n in heads]
        layers.append(LayerMemory.from_heads(keys, values, [torch.randn(n) for n in heads] if i % 2 == 0 else None))
    info = MemoryInfo(
        method="latent",
        model={"name": "m", "architecture": "A", "fingerprint": "f", "tokenizer": "t"},
        document={"name": "Ünïcode — 東京.txt", "sha256": "0" * 64, "tokens": 40},
        budget={"tokens": 3, "ratio": 40 / 3},
        settings={"fit_lr": 3e-3, "nested": {"a": [1, 2.5, None, True]}},
        seed=2**40,
        versions={"ttmem": "1"},
        fidelity={"kl": 0.1234567890123456789, "top1": 0.5, "prompts": 24},
        created="2026-01-01T00:00:00+00:00",
    )
    return Memory(layers, 40, info, torch.arange(40))


def assert_same(found: Memory, expected: Memory, document: bool = True) -> None:
    assert found.document_length == expected.document_length
    assert asdict(found.info) == asdict(expected.info)
    assert len(found.layers) == len(expected.layers)
    for a, b in zip(found.layers, expected.layers, strict=True):
        assert type(a) is type(b)
        assert a.keys.dtype == b.keys.dtype
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        if isinstance(a, LayerMemory) and isinstance(b, LayerMemory):
            assert (a.lengths, a.offsets, a.unbiased) == (b.lengths, b.offsets, b.unbiased)
            assert a.biases.dtype == torch.float32
            assert torch.equal(a.biases, b.biases)
        if isinstance(a, WindowMemory) and isinstance(b, WindowMemory):
            assert a.window == b.window
    if document:
        assert found.tokens is not None
        assert expected.tokens is not None
        assert found.tokens.dtype == torch.long
        assert torch.equal(found.tokens, expected.tokens)
    else:
        assert found.tokens is None


@pytest.mark.parametrize("document", [True, False])
@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path: Path, dtype: torch.dtype, window: bool, document: bool) -> None:
    memory = make_memory([[3, 0, 2], [4, 4, 4]], dtype, window)
    memory.save(tmp_path / "a.ttmem", keep_document=document)
    assert_same(Memory.load(tmp_path / "a.ttmem"), memory, document)


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=3).filter(any), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    window=st.booleans(),
)
def test_round_trip_of_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], dtype: torch.dtype, window: bool
) -> None:
    path = tmp_path_factory.mktemp("round") / "a.ttmem"
    memory = make_memory(lengths, dtype, window)
    memory.save(path)
    assert_same(Memory.load(path), memory)


def test_a_real_memory_answers_the_same_after_a_round_trip(any_model: Model, make_full: Any, tmp_path: Path) -> None:
    memory = make_full(any_model)
    memory.save(tmp_path / "a.ttmem")
    loaded = Memory.load(tmp_path / "a.ttmem")
    loaded.check_model(any_model)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        first, second = (any_model.forward(ids, m.cache()).logits for m in (memory, loaded))
    assert torch.equal(first, second)


def test_the_file_is_plain_safetensors_with_json(tmp_path: Path) -> None:
    """No pickle anywhere: the library that only reads tensors reads everything."""
    make_memory([[3, 2]], window=True).save(tmp_path / "a.ttmem")
    with safe_open(tmp_path / "a.ttmem", framework="pt") as opened:
        header = json.loads(opened.metadata()["ttmem"])
        names = set(opened.keys())
    assert header["format_version"] == file.FORMAT_VERSION
    assert {layer["kind"] for layer in header["layers"]} == {"window", "compacted"}
    assert names == {
        *(f"layers.0.{part}" for part in ("keys", "values")),
        *(f"layers.1.{part}" for part in ("keys", "values", "biases")),
        "document.tokens",
    }
    raw = (tmp_path / "a.ttmem").read_bytes()
    assert b"pickle" not in raw
    assert int.from_bytes(raw[:8], "little") < len(raw)


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    memory = make_memory([[3, 2], [1, 5]], window=True)
    memory.save(tmp_path / "a.ttmem")
    memory.save(tmp_path / "b.ttmem")
    Memory.load(tmp_path / "a.ttmem").save(tmp_path / "c.ttmem")
    assert (tmp_path / "a.ttmem").read_bytes() == (tmp_path / "b.ttmem").read_bytes()
    assert (tmp_path / "a.ttmem").read_bytes() == (tmp_path / "c.ttmem").read_bytes()


def test_saving_over_a_file_replaces_it_with_the_usual_rights(tmp_path: Path) -> None:
    path = tmp_path / "a.ttmem"
    path.write_text("something else")
    make_memory([[3, 2]]).save(path)
    assert_same(Memory.load(path), make_memory([[3, 2]]))
    plain = tmp_path / "plain"
    plain.write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ttmem", "plain"]


@pytest.mark.parametrize("failing", ["os.replace", "save_file", "os.fsync"])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("broken"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "a.ttmem"
    make_memory([[3, 2]]).save(path)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        if failing == "save_file":
            Path(args[1]).write_bytes(b"half of it")
        raise error

    if failing == "save_file":
        monkeypatch.setattr(file, "save_file", fail)
    else:
        monkeypatch.setattr(os, failing.removeprefix("os."), fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else MemoryFileError
    with pytest.raises(expected):
        make_memory([[1, 1]]).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.ttmem"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError, match=r"cannot write .*nowhere.*No such file"):
        make_memory([[3, 2]]).save(tmp_path / "nowhere" / "a.ttmem")


def test_a_folder_as_target_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ttmem").mkdir()
    with pytest.raises(MemoryFileError, match="cannot write"):
        make_memory([[3, 2]]).save(tmp_path / "a.ttmem")
    assert [p.name for p in tmp_path.iterdir()] == ["a.ttmem"]
