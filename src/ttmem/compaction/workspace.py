"""Finished steps of a long compaction, on disk, so that a killed run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ttmem.errors import MemoryFileError, ResumeError
from ttmem.memory.file import atomic_save, checksum, read_tensors

STEPS = ("replay", "rollouts", "passages", "stage1-*", "rate-*", "stage2-*")
STAMP = "ttmem-partial"
"""The file that marks a folder as ours, and says what its steps depend on."""


@dataclass
class Workspace:
    """A folder with one safetensors file per finished step. Without a folder, nothing is kept.

    `key` names everything the steps depend on: document, model, method, settings, budget, seed.
    """

    folder: Path | None
    key: str = ""

    @classmethod
    def open(cls, folder: Path | None, identity: dict[str, Any], resume: bool) -> Workspace:
        """Start in `folder`, or go on in it. Raises ResumeError when it holds another run's work."""
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        workspace = cls(folder, key)
        if folder is None:
            return workspace
        stamp = folder / STAMP
        try:
            if folder.is_dir() and not stamp.exists() and any(folder.iterdir()):
                raise ResumeError(f"{folder} holds other files than ttmem's partial work: name another folder")
            if folder.is_dir() and not resume:
                workspace.discard()
            folder.mkdir(parents=True, exist_ok=True)
            if stamp.exists() and stamp.read_text() != key:
                raise ResumeError(
                    f"{folder} holds partial work for another document, model, budget, seed or other settings: use the "
                    "same ones to go on, or leave out --resume to start over"
                )
            stamp.write_text(key)
        except OSError as error:
            raise MemoryFileError(f"cannot write {folder}: {error.strerror}") from error
        return workspace

    def load(self, step: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and data of a finished step, or None."""
        if self.folder is None or not (self.folder / f"{step}.safetensors").exists():
            return None
        path = self.folder / f"{step}.safetensors"
        try:
            tensors, metadata = read_tensors(path)
            data = json.loads(metadata["data"])
            if metadata["checksum"] != checksum(data, tensors):
                raise ValueError("the checksum does not match")
            if metadata["key"] != self.key:
                raise ValueError("it belongs to another run")
            return tensors, data
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ResumeError(f"{path} is damaged ({error}): delete {self.folder} and start over") from error

    def save(self, step: str, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
        """Keep a finished step, atomically."""
        if self.folder is not None:
            cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
            metadata = {"key": self.key, "data": json.dumps(data), "checksum": checksum(data, cpu)}
            atomic_save(cpu, self.folder / f"{step}.safetensors", metadata)

    def discard(self) -> None:
        """Delete what was kept, and the folder where nothing else is in it."""
        if self.folder is not None and self.folder.is_dir():
            for step in STEPS:
                for pattern in (f"{step}.safetensors", f".{step}.safetensors.*.tmp"):
                    for path in self.folder.glob(pattern):
                        path.unlink(missing_ok=True)
            (self.folder / STAMP).unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()
