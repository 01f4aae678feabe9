"""State files: the same state again, for the model that wrote it and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ttmem import Memory
from ttmem.errors import MemoryFileError, MemoryMismatchError
from ttmem.fast_weights import TTCDForCausalLM, load_state, save_state
from ttmem.memory.file import STATE_KEY, is_state_file, read_tensors


def test_it_goes_on_as_if_it_had_not_stopped(any_fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> None:
    ids = make_ids(1, 30)
    path = tmp_path / "a.state"
    save_state(any_fast.read(ids[:, :18]), path, any_fast)
    assert is_state_file(path)
    state = load_state(path, any_fast)
    assert state.get_seq_length() == 18
    with torch.no_grad():
        found = any_fast(ids[:, 18:], cache=state).logits
        expected = any_fast(ids, use_cache=False).logits[:, 18:]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["a.state"]


def test_a_padded_batch(fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> None:
    ids = make_ids(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    state = fast.new_state()
    with torch.no_grad():
        expected = fast(ids, attention_mask=mask, use_cache=False).logits[:, 18:]
        fast(ids[:, :18], attention_mask=mask[:, :18], cache=state)
        save_state(state, tmp_path / "a.state", fast)
        found = fast(ids[:, 18:], cache=load_state(tmp_path / "a.state", fast)).logits
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


def test_an_empty_state(fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> None:
    save_state(fast.new_state(), tmp_path / "a.state", fast)
    state = load_state(tmp_path / "a.state", fast)
    torch.testing.assert_close(fast(make_ids(1, 9), cache=state).logits, fast(make_ids(1, 9)).logits)


def test_in_another_dtype(make_fast: Any, make_ids: Any, tmp_path: Path) -> None:
    """The fingerprint is the same; sums stay in fp32."""
    narrow, wide = make_fast(dtype=torch.bfloat16), make_fast(dtype=torch.bfloat16).float()
    save_state(narrow.read(make_ids(1, 18)), tmp_path / "a.state", narrow)
    state = load_state(tmp_path / "a.state", wide)
    assert {t.dtype for layer in state.layers for t in layer.tensors.values()} == {torch.float32}
    save_state(state, tmp_path / "b.state", wide)
    again = load_state(tmp_path / "b.state", narrow)
    assert again.layers[0].tensors["memory"].dtype == torch.float32
    assert again.layers[0].tensors["keys"].dtype == torch.bfloat16
    narrow(make_ids(1, 9), cache=again)


def test_another_model(make_fast: Any, make_ids: Any, tmp_path: Path) -> None:
    model = make_fast()
    save_state(model.read(make_ids(1, 18)), tmp_path / "a.state", model)
    with pytest.raises(MemoryMismatchError, match="load that model"):
        load_state(tmp_path / "a.state", make_fast(seed=1))
    with pytest.raises(MemoryMismatchError, match="chunk_size 5, now 6"):
        load_state(tmp_path / "a.state", make_fast(chunk_size=6))


@pytest.fixture
def written(fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> Path:
    save_state(fast.read(make_ids(1, 18)), tmp_path / "a.state", fast)
    return tmp_path / "a.state"


def rewrite(path: Path, change: Any) -> None:
    tensors, metadata = read_tensors(path)
    header = json.loads(metadata[STATE_KEY])
    change(tensors, header)
    save_file(tensors, path, {STATE_KEY: json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, header: header.update(seen=5), "checksum"),
        (lambda tensors, header: tensors["layers.0.memory"].add_(1), "checksum"),
        (lambda tensors, header: header.update(format_version=99), "upgrade"),
        (lambda tensors, header: header.pop("format_version"), "not a fast-weight state"),
    ],
)
def test_altered_files(fast: TTCDForCausalLM, written: Path, change: Any, message: str) -> None:
    rewrite(written, change)
    with pytest.raises(MemoryFileError, match=message):
        load_state(written, fast)


def test_other_files(fast: TTCDForCausalLM, written: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError, match="no such file"):
        load_state(tmp_path / "none.state", fast)
    save_file(load_file(written), tmp_path / "plain.state")
    with pytest.raises(MemoryFileError, match="not a fast-weight state"):
        load_state(tmp_path / "plain.state", fast)
    (tmp_path / "short.state").write_bytes(written.read_bytes()[:-9])
    with pytest.raises(MemoryFileError, match="cut short"):
        load_state(tmp_path / "short.state", fast)
    assert not is_state_file(tmp_path / "short.state")
    with pytest.raises(MemoryFileError, match="ttmem ask"):
        Memory.load(written)


def test_what_cannot_be_written(fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> None:
    state = fast.read(make_ids(1, 18))
    with pytest.raises(MemoryFileError, match="cannot write"):
        save_state(state, tmp_path / "nowhere" / "a.state", fast)
    state.layers[0].tensors["memory"] = state.layers[0].tensors["memory"] / 0
    with pytest.raises(MemoryFileError, match=r"layers\.0\.memory"):
        save_state(state, tmp_path / "a.state", fast)
    assert list(tmp_path.iterdir()) == []
