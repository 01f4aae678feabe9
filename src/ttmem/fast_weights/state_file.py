"""The state file: what a model with fast weights has read, as safetensors with one JSON document in its metadata.

docs/file-format.md describes it. Written atomically, never pickled, and refused by any other model than the one that
read: weights, settings and tokenizer are known by fingerprint.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ttmem.checks import is_count
from ttmem.errors import MemoryFileError, MemoryMismatchError
from ttmem.fast_weights.modeling import TTCDForCausalLM
from ttmem.fast_weights.state import FastWeightCache
from ttmem.fast_weights.state_shape import check_shape
from ttmem.memory.file import STATE_KEY, atomic_save, checksum, not_finite, read_tensors
from ttmem.models.fingerprint import fingerprint_model
from ttmem.versions import versions

STATE_VERSION = 1
MOST_TOKENS, MOST_LAYERS = 2**40, 10_000
NAMED = {"model": ("name", "architecture", "fingerprint", "tokenizer"), "document": ("name", "sha256")}
"""Texts that a description has."""


@dataclass
class StateInfo:
    """Where a state comes from.

    model: name, architecture, fingerprint, tokenizer ("" where not known). settings: `TTCDConfig.fast_settings`.
    document: name, sha256, tokens; empty where the state was not read from a document.
    """

    model: dict[str, str]
    settings: dict[str, Any]
    document: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    created: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))


def save_state(state: FastWeightCache, path: str | PathLike[str], model: TTCDForCausalLM) -> None:
    """Write a state of `model`. Raises MemoryFileError when it cannot be written or is not finite."""
    write_state(state, path, StateInfo(identity(model), model.config.fast_settings()))


def load_state(path: str | PathLike[str], model: TTCDForCausalLM) -> FastWeightCache:
    """Read a state back, on the model's device and in its dtype.

    Raises MemoryFileError when the file is missing, damaged, altered or newer, MemoryMismatchError when another model
    wrote it.
    """
    state, info = read_state(path)
    check_model(info, identity(model), model.config.fast_settings())
    check_tensors(state, model)
    return state.to(model.device, model.dtype)


def check_tensors(state: FastWeightCache, model: TTCDForCausalLM) -> None:
    """Raise MemoryFileError unless a state has the tensors that this model, which wrote it, keeps."""
    try:
        check_shape(state, model.config)
    except ValueError as error:
        raise MemoryFileError(
            f"the state does not fit the model that it names ({error}): the file was altered; read the document again"
        ) from error


def identity(model: TTCDForCausalLM) -> dict[str, str]:
    """What a state records of its model."""
    return {
        "name": model.name_or_path,
        "architecture": type(model).__name__,
        "fingerprint": fingerprint_model(model),
        "tokenizer": "",
    }


def check_model(info: StateInfo, model: dict[str, str], settings: dict[str, Any]) -> None:
    """Raise MemoryMismatchError unless a state belongs to this model. Tokenizers count where both are known."""
    made = info.model
    if made["fingerprint"] != model["fingerprint"]:
        raise MemoryMismatchError(
            f"this state was read by {made['name'] or 'a model'} ({made['architecture']}, weights "
            f"{made['fingerprint'][:12]}), not by {model['name'] or 'this model'} (weights "
            f"{model['fingerprint'][:12]}): load that model, in the same dtype where one is float16, which rounds "
            "weights otherwise, or read the document again"
        )
    changed = [name for name, value in settings.items() if info.settings.get(name) != value]
    if changed:
        pairs = ", ".join(f"{name} {info.settings.get(name)!r}, now {settings[name]!r}" for name in changed)
        raise MemoryMismatchError(f"this state was read with other settings ({pairs}): read the document again")
    if made["tokenizer"] and model["tokenizer"] and made["tokenizer"] != model["tokenizer"]:
        raise MemoryMismatchError(
            f"this state was read with another tokenizer ({made['tokenizer'][:12]}) than {model['name']}'s "
            f"({model['tokenizer'][:12]}): use the tokenizer it was read with, or read the document again"
        )


def write_state(state: FastWeightCache, path: str | PathLike[str], info: StateInfo) -> None:
    """Write a state with its description, atomically."""
    tensors = {
        f"layers.{i}.{name}": tensor.cpu().clone()  # layers may share one, which safetensors refuses
        for i, layer in enumerate(state.layers)
        for name, tensor in layer.tensors.items()
    }
    if (name := not_finite(tensors)) is not None:
        raise MemoryFileError(f"not writing {path}: tensor {name!r} holds NaN or infinite values")
    header: dict[str, Any] = {
        "format_version": STATE_VERSION,
        "layers": len(state.layers),
        "seen": state.seen,
        "counts": state.counts.tolist() if isinstance(state.counts, Tensor) else state.counts,
        "info": asdict(info),
    }
    header["checksum"] = checksum(header, tensors)
    atomic_save(tensors, path, {STATE_KEY: json.dumps(header)})


def read_state(path: str | PathLike[str]) -> tuple[FastWeightCache, StateInfo]:
    """A state and its description, on the CPU. Raises MemoryFileError."""
    path = Path(path)
    if not path.is_file():
        raise MemoryFileError(f"{path}: no such file")
    try:
        tensors, metadata = read_tensors(path)
        header = json.loads(metadata[STATE_KEY])
        version, stored = header["format_version"], header.pop("checksum", None)
    except (SafetensorError, OSError) as error:
        raise MemoryFileError(f"{path}: not a fast-weight state, or cut short ({error})") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
        raise MemoryFileError(f"{path}: a safetensors file, but not a fast-weight state") from error
    if type(version) is not int or not 1 <= version <= STATE_VERSION:
        raise MemoryFileError(
            f"{path}: format version {version!r}, and this ttmem reads up to {STATE_VERSION}: upgrade ttmem"
        )
    if stored != checksum(header, tensors):
        raise MemoryFileError(
            f"{path}: the checksum does not match: the file was altered or damaged; read the document again"
        )
    if (name := not_finite(tensors)) is not None:
        raise MemoryFileError(f"{path}: tensor {name!r} holds NaN or infinite values; read the document again")
    try:
        info = StateInfo(**header["info"])
        _check_info(info)
        return _state(header, tensors), info
    except (KeyError, TypeError, ValueError) as error:
        raise MemoryFileError(f"{path}: the file's description does not fit its tensors ({error})") from error


def _check_info(info: StateInfo) -> None:
    """What else reads it relies on. Raises KeyError, TypeError or ValueError."""
    for part, keys in NAMED.items():
        values = getattr(info, part)
        for key in keys if values or part == "model" else ():
            if type(values[key]) is not str:
                raise ValueError(f"{part}.{key} is {values[key]!r}")
    if info.document:
        _count(info.document["tokens"], "document.tokens")
    settings = info.settings
    if not isinstance(settings["rule"], str) or not isinstance(settings["fast_layers"], list):
        raise ValueError(f"the rule {settings['rule']!r} in layers {settings['fast_layers']!r}")
    _count(settings["chunk_size"], "chunk_size")
    if not isinstance(info.versions, dict) or not isinstance(info.created, str):
        raise ValueError(f"versions {info.versions!r}, created {info.created!r}")


def _count(value: Any, name: str, most: int = MOST_TOKENS) -> int:
    if not is_count(value, 0) or value > most:
        raise ValueError(f"{name} is {value!r}")
    return value


def _state(header: dict[str, Any], tensors: dict[str, Tensor]) -> FastWeightCache:
    state = FastWeightCache(_count(header["layers"], "layers", MOST_LAYERS))
    named = {f"layers.{index}": layer for index, layer in enumerate(state.layers)}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if layer not in named or not tensor.dim():
            raise ValueError(f"there is a tensor {name!r} of shape {tuple(tensor.shape)}")
        named[layer].set(**{part: tensor})
    if len({tensor.shape[0] for tensor in tensors.values()}) > 1:
        raise ValueError("tensors of different batch sizes")
    state.seen = _count(header["seen"], "seen")
    counts = header["counts"]
    for count in counts if isinstance(counts, list) else [counts]:
        _count(count, "counts", state.seen)
    if isinstance(counts, list) and len(counts) != state.batch:
        raise ValueError(f"{len(counts)} counts for {state.batch} rows")
    state.counts = torch.tensor(counts) if isinstance(counts, list) else counts
    return state
