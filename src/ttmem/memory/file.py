"""The memory file: safetensors with one JSON document in its metadata. docs/file-format.md describes it to the byte.

Writing goes to a temporary file beside the target and is moved over it at the end, so that a crash or Ctrl-C leaves
either the old file or the new one. Reading refuses what it does not understand or cannot trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ttmem.errors import MemoryFileError
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.memory import Memory, MemoryInfo

FORMAT_VERSION = 1
METADATA_KEY = "ttmem"
STATE_KEY = "ttmem_state"
"""The metadata of the other kind of file: the state of a model with fast weights (`fast_weights/state_file.py`)."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def write_memory(memory: Memory, path: str | PathLike[str], *, keep_document: bool = True) -> None:
    """Write `memory` to `path` atomically. Raises MemoryFileError when the folder cannot be written."""
    tensors = _tensors(memory, keep_document)
    if (name := not_finite(tensors)) is not None:
        raise MemoryFileError(f"not writing {path}: tensor {name!r} holds NaN or infinite values")
    header = {
        "format_version": FORMAT_VERSION,
        "document_length": memory.document_length,
        "layers": [_describe(layer) for layer in memory.layers],
        "info": asdict(memory.info),
    }
    header["checksum"] = checksum(header, tensors)
    atomic_save(tensors, path, {METADATA_KEY: json.dumps(header)})


def read_memory(path: str | PathLike[str], device: torch.device | str = "cpu") -> Memory:
    """Read and verify a memory file; see `Memory.load`."""
    header, tensors = _read(Path(path))
    version = header.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise MemoryFileError(f"{path}: format version {version!r} is not a number this ttmem knows")
    if version > FORMAT_VERSION:
        raise MemoryFileError(
            f"{path}: format version {version} is newer than this ttmem reads ({FORMAT_VERSION}): upgrade ttmem"
        )
    stored = header.pop("checksum", None)
    if stored != checksum(header, tensors):
        raise MemoryFileError(
            f"{path}: the checksum does not match: the file was altered or damaged; compact the document again"
        )
    if (name := not_finite(tensors)) is not None:
        raise MemoryFileError(f"{path}: tensor {name!r} holds NaN or infinite values; compact the document again")
    try:
        layers = [_layer(i, description, tensors, device) for i, description in enumerate(header["layers"])]
        info = MemoryInfo(**header["info"])
        tokens = tensors.get("document.tokens")
        _check(layers, info, header["document_length"], tokens)
        merging = info.settings.get("merging", "normalizer")
        return Memory(
            layers, header["document_length"], info, tokens if tokens is None else tokens.long(), merging
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(f"{path}: the file's description does not fit its tensors ({error})") from error


def _check(layers: list[LayerMemory | WindowMemory], info: MemoryInfo, length: int, tokens: Tensor | None) -> None:
    """What must hold between the parts of a file. Raises ValueError or KeyError."""
    if type(length) is not int or length < 1:
        raise ValueError(f"the document length is {length!r}")
    if not any(isinstance(layer, LayerMemory) for layer in layers):
        raise ValueError("there is no compacted layer")
    needed = {
        "model": ("name", "architecture", "fingerprint", "tokenizer"),
        "document": ("name", "sha256", "tokens"),
        "budget": ("tokens", "ratio"),
    }
    if info.fidelity:
        needed["fidelity"] = ("kl", "top1", "prompts")
    for part, keys in needed.items():
        for key in keys:
            if key not in dict(getattr(info, part)):
                raise KeyError(f"{part}.{key}")
    document = info.document["tokens"]
    entries = {kept for layer in layers if isinstance(layer, LayerMemory) for kept in layer.lengths}
    if length != document and entries != {length}:  # only the full cache of a text written for the document may differ
        raise ValueError(f"the document length is {length}, but the document has {document} tokens")
    if tokens is not None and (tokens.shape != (document,) or bool((tokens < 0).any())):
        raise ValueError(f"the document's tokens are not {document} token ids")


def not_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor that holds NaN or infinite values, if one does."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return name
    return None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises SafetensorError or OSError.

    The tensors are copies: products round differently where a tensor starts at an odd address of the file.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return tensors, file.metadata() or {}


def is_state_file(path: str | PathLike[str]) -> bool:
    """Whether a file is a fast-weight state, by its metadata. False for what is not there or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return STATE_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def checksum(header: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the header (without its checksum) and every tensor's name, dtype, shape and bytes, by name."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()


def atomic_save(tensors: dict[str, Tensor], path: str | PathLike[str], metadata: dict[str, str]) -> None:
    """Save tensors as safetensors; `path` is at every moment absent, the old file or the whole new one."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    atomic_write(path, lambda temporary: save_file(contiguous, temporary, metadata))


def atomic_write(path: str | PathLike[str], write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it there. Raises MemoryFileError where it cannot."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise MemoryFileError(f"cannot write {target}: {error.strerror}") from error
    temporary = Path(name)
    try:
        write(temporary)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"cannot write {target}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _tensors(memory: Memory, keep_document: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(memory.layers):
        tensors[f"layers.{index}.keys"] = layer.keys.detach().cpu()
        tensors[f"layers.{index}.values"] = layer.values.detach().cpu()
        if isinstance(layer, LayerMemory):
            tensors[f"layers.{index}.biases"] = layer.biases.detach().cpu()
    if keep_document and memory.tokens is not None:
        tensors["document.tokens"] = memory.tokens.to("cpu", torch.int32)
    return tensors


def _describe(layer: LayerMemory | WindowMemory) -> dict[str, Any]:
    if isinstance(layer, LayerMemory):
        return {"kind": "compacted", "lengths": list(layer.lengths), "unbiased": layer.unbiased}
    return {"kind": "window", "window": layer.window}


def _layer(
    index: int, description: dict[str, Any], tensors: dict[str, Tensor], device: torch.device | str
) -> LayerMemory | WindowMemory:
    keys, values = (tensors[f"layers.{index}.{name}"].to(device) for name in ("keys", "values"))
    if keys.dtype not in DTYPES or values.dtype != keys.dtype:
        raise ValueError(f"layer {index} has keys of {keys.dtype} and values of {values.dtype}")
    if description["kind"] == "window":
        return WindowMemory(keys, values, int(description["window"]))
    if description["kind"] != "compacted":
        raise ValueError(f"layer {index} is of unknown kind {description['kind']!r}")
    biases = tensors[f"layers.{index}.biases"].to(device)
    if biases.dtype != torch.float32:
        raise ValueError(f"layer {index} has biases of {biases.dtype}")
    return LayerMemory(keys, values, biases, tuple(description["lengths"]), bool(description["unbiased"]))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise MemoryFileError(f"{path}: no such file")
    try:
        tensors, metadata = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise MemoryFileError(f"{path}: not a ttmem memory, or cut short ({error})") from error
    if STATE_KEY in metadata:
        raise MemoryFileError(f"{path}: a fast-weight state, not a compacted memory: it can be asked with `ttmem ask`")
    try:
        header = json.loads(metadata[METADATA_KEY])
        if not isinstance(header, dict):
            raise TypeError
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:  # the last: nested without end
        raise MemoryFileError(f"{path}: a safetensors file, but not a ttmem memory") from error
    return header, tensors
