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
from ttmem.fast_weights import Reading, TTCDForCausalLM, load_state, save_state
from ttmem.fast_weights.state_file import check_tensors
from ttmem.memory.file import STATE_KEY, checksum, is_state_file, read_tensors


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


def rewrite(path: Path, change: Any, honest: bool = False) -> None:
    """honest: with the checksum of what is written."""
    tensors, metadata = read_tensors(path)
    header = json.loads(metadata[STATE_KEY])
    change(tensors, header)
    if honest:
        del header["checksum"]
        header["checksum"] = checksum(header, tensors)
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


def info(**changes: Any) -> Any:
    return lambda tensors, header: header["info"].update(changes)


def top(**changes: Any) -> Any:
    return lambda tensors, header: header.update(changes)


def tensor(name: str, function: Any) -> Any:
    return lambda tensors, header: tensors.update({name: function(tensors["layers.0.keys"])})


MODEL = {"name": "a", "architecture": "b", "fingerprint": "c", "tokenizer": ""}
DESCRIPTIONS = {
    **{f"model {value!r}": info(model=value) for value in ({}, None, [], "a", {**MODEL, "name": 3})},
    **{f"no model.{key}": info(model={k: v for k, v in MODEL.items() if k != key}) for key in MODEL},
    "document": info(document={"x": 1}),
    "document tokens": info(document={"name": "a", "sha256": "b", "tokens": "many"}),
    "settings": info(settings={}),
    "rule": lambda tensors, header: header["info"]["settings"].update(rule=3),
    "layers of the rule": lambda tensors, header: header["info"]["settings"].update(fast_layers=0),
    "chunk": lambda tensors, header: header["info"]["settings"].update(chunk_size="5"),
    "versions": info(versions=[]),
    "created": info(created=None),
    "unknown part": info(other=1),
    "no info": top(info=None),
    **{f"{key} {value!r}": top(**{key: value})
       for key in ("seen", "counts", "layers")
       for value in (-1, 10**30, 18.0, "18", None, True, [-1], [18.0], [1, 2], {})},
    "counts beyond seen": top(counts=19),
    **{f"tensor {name}": tensor(name, torch.clone)
       for name in ("layers.-1.memory", "layers.3.keys", "layers.00.keys", "layers.x.keys", "layers.0", "keys")},
    "rows": tensor("layers.0.keys", lambda keys: torch.cat([keys, keys])),
    "number": tensor("layers.0.keys", lambda keys: keys.sum()),
}  # fmt: skip


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_that_cannot_be(written: Path, name: str) -> None:
    """Refused without the model, so that `ttmem info` says so too."""
    rewrite(written, DESCRIPTIONS[name], honest=True)
    with pytest.raises(MemoryFileError, match="does not fit its tensors"):
        Reading.load(written)


def test_a_description_nested_without_end(written: Path) -> None:
    tensors, _ = read_tensors(written)
    save_file(tensors, written, {STATE_KEY: "[" * 100_000})
    with pytest.raises(MemoryFileError, match="not a fast-weight state"):
        Reading.load(written)


ANY_RULE = ("ttcd", "in_place", "lact", "deltanet", "window")


@pytest.mark.parametrize("rule", ANY_RULE)
def test_tensors_that_the_model_does_not_keep(make_fast: Any, make_ids: Any, tmp_path: Path, rule: str) -> None:
    """Every tensor of every rule: missing, cut in any dimension, of whole numbers, beside an unknown one."""
    model, path = make_fast(rule), tmp_path / "a.state"
    save_state(model.read(make_ids(2, 19)), path, model)  # one before the end of a chunk
    sound = path.read_bytes()
    for name, kept in read_tensors(path)[0].items():
        changes = [lambda tensors, header, name=name: tensors.pop(name)]
        wrong = [kept.narrow(dim, 1, kept.shape[dim] - 1) for dim in range(1, kept.dim())]
        wrong += [kept.unsqueeze(-1), kept.flatten(0, 1), torch.cat([kept, kept], dim=1), kept.int()]
        changes += [lambda tensors, header, n=name, new=new: tensors.update({n: new.contiguous()}) for new in wrong]
        changes.append(lambda tensors, header, kept=kept: tensors.update({"layers.1.other": kept}))
        for change in changes:
            path.write_bytes(sound)
            rewrite(path, change, honest=True)
            with pytest.raises(MemoryFileError):
                load_state(path, model)
    for change in (top(layers=4), *([] if rule == "deltanet" else [top(seen=4, counts=4)])):
        path.write_bytes(sound)
        rewrite(path, change, honest=True)
        with pytest.raises(MemoryFileError, match="does not fit the model"):
            load_state(path, model)


@pytest.mark.parametrize("rule", ANY_RULE)
@pytest.mark.parametrize("changes", [{}, {"windows": None, "teacher_window": None}, {"chunk_size": 100}], ids=str)
def test_every_state_of_a_model_fits_it(make_fast: Any, make_ids: Any, rule: str, changes: dict[str, Any]) -> None:
    model = make_fast(rule, **changes)
    for many in (1, 3, 5, 18):
        for lengths in ((many, many), (many, many // 2), (0, many)):
            mask = (torch.arange(many) < torch.tensor(lengths).unsqueeze(1)).long()
            for real in (mask, mask.flip(1)):
                state = model.new_state()
                for ids, part in zip(make_ids(2, many).split(4, dim=1), real.split(4, dim=1), strict=True):
                    with torch.no_grad():
                        model(ids, attention_mask=part, cache=state)
                    check_tensors(state, model)
    packed = torch.cat([torch.arange(7), torch.arange(4), torch.arange(9)]).unsqueeze(0)
    state = model.new_state()
    model(make_ids(1, 20), position_ids=packed, cache=state)
    check_tensors(state, model)


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
