"""Files that must not be read: cut short, altered, foreign, newer, or with a description that does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ttmem import Memory, MemoryFileError
from ttmem.memory import MemoryInfo
from ttmem.memory.file import checksum
from ttmem.memory.layer import LayerMemory, WindowMemory

Edit = Callable[[dict[str, Any], dict[str, Tensor]], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound file with a window layer and a ragged layer."""
    torch.manual_seed(0)
    window = WindowMemory(torch.randn(2, 3, 4), torch.randn(2, 3, 4), 4)
    ragged = LayerMemory(torch.randn(5, 4), torch.randn(5, 4), torch.randn(5), (3, 2))
    model = {"name": "m", "architecture": "A", "fingerprint": "f", "tokenizer": "t"}
    document = {"name": "d", "sha256": "0", "tokens": 9}
    info = MemoryInfo("latent", model, document, {"tokens": 2, "ratio": 4.5})
    Memory([window, ragged], 9, info, torch.arange(9)).save(tmp_path / "a.ttmem")
    return tmp_path / "a.ttmem"


def rewrite(path: Path, edit: Edit, right_checksum: bool = True) -> None:
    """Edit header and tensors of a file, with a checksum that fits or the old one."""
    with safe_open(path, framework="pt") as opened:
        header = json.loads(opened.metadata()["ttmem"])
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    edit(header, tensors)
    if right_checksum:
        header.pop("checksum", None)
        header["checksum"] = checksum(header, tensors)
    save_file(tensors, path, {"ttmem": json.dumps(header)})


def test_the_fixture_is_sound(path: Path) -> None:
    rewrite(path, lambda header, tensors: None)
    assert Memory.load(path).document_length == 9


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(MemoryFileError, match=r"none\.ttmem: no such file"):
        Memory.load(tmp_path / "none.ttmem")
    with pytest.raises(MemoryFileError, match="no such file"):
        Memory.load(tmp_path)


def test_a_file_cut_at_any_length(path: Path) -> None:
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(MemoryFileError, match="cut short"):
            Memory.load(path)


def test_bytes_too_many(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(MemoryFileError):
        Memory.load(path)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
def test_any_flipped_byte_is_noticed(path: Path, flip: int) -> None:
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for position in [*range(8), *range(8, header, 5), *range(header, len(raw), 13)]:
        damaged = bytearray(raw)
        damaged[position] ^= flip
        path.write_bytes(damaged)
        with pytest.raises(MemoryFileError, match=re.escape(str(path))):
            Memory.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip, as pickled models are", b"plain text\n" * 50, bytes(64)])
def test_what_is_not_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ttmem").write_bytes(content)
    with pytest.raises(MemoryFileError, match="not a ttmem memory"):
        Memory.load(tmp_path / "a.ttmem")


@pytest.mark.parametrize("content", [None, "not json", "[1, 2]", "3", "", "[" * 100_000])
def test_other_safetensors(tmp_path: Path, content: str | None) -> None:
    metadata = {"format": "pt"} if content is None else {"ttmem": content}
    save_file({"weight": torch.zeros(3)}, tmp_path / "a.ttmem", metadata)
    with pytest.raises(MemoryFileError, match="a safetensors file, but not a ttmem memory"):
        Memory.load(tmp_path / "a.ttmem")


def test_a_newer_format_says_to_upgrade(path: Path) -> None:
    rewrite(path, lambda header, tensors: header.update(format_version=2))
    with pytest.raises(MemoryFileError, match=r"version 2 is newer than this ttmem reads \(1\): upgrade"):
        Memory.load(path)


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, None, [1]])
def test_a_version_that_is_no_version(path: Path, version: Any) -> None:
    rewrite(path, lambda header, tensors: header.update(format_version=version))
    with pytest.raises(MemoryFileError, match="format version"):
        Memory.load(path)


@pytest.mark.parametrize("stored", ["0" * 64, None, 5])
def test_a_wrong_checksum(path: Path, stored: Any) -> None:
    rewrite(path, lambda header, tensors: header.update(checksum=stored), right_checksum=False)
    with pytest.raises(MemoryFileError, match="the checksum does not match"):
        Memory.load(path)


@pytest.mark.parametrize("changed", ["tensor", "info", "lengths"])
def test_an_edit_without_a_new_checksum(path: Path, changed: str) -> None:
    def edit(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if changed == "tensor":
            tensors["layers.1.values"][0, 0] += 1
        elif changed == "info":
            header["info"]["model"]["fingerprint"] = "another"
        else:
            header["layers"][1]["lengths"] = [2, 3]

    rewrite(path, edit, right_checksum=False)
    with pytest.raises(MemoryFileError, match="altered or damaged"):
        Memory.load(path)


@pytest.mark.parametrize("name", ["layers.0.keys", "layers.1.values", "layers.1.biases"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(path: Path, name: str, value: float) -> None:
    rewrite(path, lambda header, tensors: tensors[name].view(-1)[1:2].fill_(value))
    with pytest.raises(MemoryFileError, match=f"'{name}' holds NaN or infinite"):
        Memory.load(path)


def layer(**changes: Any) -> Edit:
    """Change the description of the ragged layer."""
    return lambda header, tensors: header["layers"][1].update(changes)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda header, tensors: tensors.update({name: change(tensors[name]).contiguous()})


ODD: dict[str, Edit] = {
    "lengths too short": layer(lengths=[3, 1]),
    "lengths too long": layer(lengths=[3, 3]),
    "a negative length": layer(lengths=[7, -2]),
    "lengths that are no whole numbers": layer(lengths=[2.5, 2.5]),
    "lengths as text": layer(lengths="32"),
    "lengths missing": lambda header, tensors: header["layers"][1].pop("lengths"),
    "one more head than the window has": layer(lengths=[]),
    "an unknown kind": layer(kind="compressed"),
    "a kind missing": lambda header, tensors: header["layers"][1].pop("kind"),
    "a layer that is no object": lambda header, tensors: header.update(layers=[3, 4]),
    "layers that are no list": lambda header, tensors: header.update(layers=7),
    "no layers": lambda header, tensors: header.update(layers=[]),
    "layers missing": lambda header, tensors: header.pop("layers"),
    "one layer too many": lambda header, tensors: header["layers"].append(dict(header["layers"][1])),
    "a window that is no number": lambda header, tensors: header["layers"][0].update(window="wide"),
    "a negative window": lambda header, tensors: header["layers"][0].update(window=-4),
    "a window smaller than its keys": lambda header, tensors: header["layers"][0].update(window=2),
    "a negative document length": lambda header, tensors: header.update(document_length=-1),
    "a document length that is no number": lambda header, tensors: header.update(document_length=None),
    "another document length than tokens": lambda header, tensors: header.update(document_length=8),
    "info missing": lambda header, tensors: header.pop("info"),
    "info with an unknown field": lambda header, tensors: header["info"].update(colour="blue"),
    "info without a model": lambda header, tensors: header["info"].pop("model"),
    "info with a model that is no object": lambda header, tensors: header["info"].update(model="m"),
    "info with a model without its fingerprint": lambda header, tensors: header["info"].update(model={"name": "m"}),
    "keys missing": lambda header, tensors: tensors.pop("layers.1.keys"),
    "biases missing": lambda header, tensors: tensors.pop("layers.1.biases"),
    "flat keys": tensor("layers.1.keys", lambda t: t[:, 0]),
    "keys with a head axis": tensor("layers.1.keys", lambda t: t.unsqueeze(1)),
    "window keys without a head axis": tensor("layers.0.keys", lambda t: t[0]),
    "window values of another length": tensor("layers.0.values", lambda t: t[:, :2]),
    "whole-number keys": tensor("layers.1.keys", lambda t: t.long()),
    "whole-number values": tensor("layers.1.values", lambda t: t.long()),
    "values of another dtype than keys": tensor("layers.1.values", lambda t: t.bfloat16()),
    "whole-number biases": tensor("layers.1.biases", lambda t: t.long()),
    "tokens with two axes": tensor("document.tokens", lambda t: t.view(3, 3)),
    "negative tokens": tensor("document.tokens", lambda t: t - 5),
}


@pytest.mark.parametrize("edit", ODD.values(), ids=ODD.keys())
def test_a_description_that_does_not_fit(path: Path, edit: Edit) -> None:
    """With a right checksum: only a faulty or hostile writer makes such files, and loading must still refuse them."""
    rewrite(path, edit)
    with pytest.raises(MemoryFileError):
        Memory.load(path)


def test_a_tensor_without_axes(path: Path) -> None:
    """safetensors takes it; nothing in a memory is one."""
    rewrite(path, lambda header, tensors: tensors.update(extra=torch.tensor(1.0)), right_checksum=False)
    with pytest.raises(MemoryFileError, match="the checksum does not match"):
        Memory.load(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [("budget", {"tokens": 2}), ("document", {"name": "d", "tokens": 9}), ("fidelity", {"kl": 0.1})],
)
def test_a_description_without_what_commands_show_is_refused(
    path: Path, part: str, value: dict[str, float | str]
) -> None:
    memory = Memory.load(path)
    setattr(memory.info, part, value)
    memory.save(path)
    with pytest.raises(MemoryFileError, match="description"):
        Memory.load(path)
