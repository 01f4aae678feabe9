"""A text that keeps growing, as a chain: each part was read and compacted behind those before it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ttmem.compaction.api import FullMemory, make_method
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import MIN_TOKENS, Budget, LatentSettings, preset_settings
from ttmem.errors import MemoryFileError
from ttmem.memory import Memory
from ttmem.memory.file import atomic_write
from ttmem.models import Model
from ttmem.progress import Progress


@dataclass
class Part:
    """Tokens [M] of a part, the ratio it is kept at (1 or less: whole), and its own entries."""

    ids: Tensor
    ratio: float
    memory: Memory


@dataclass
class Chain:
    """What lies before, and the parts behind it. A part can be compacted again at another ratio, from its tokens.

    Its later parts then stay as they are: they were read behind the finer version.
    """

    model: Model
    base: Memory
    settings: LatentSettings = field(default_factory=lambda: preset_settings("quick"))
    method: str = "latent"
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    parts: list[Part] = field(default_factory=list)

    def memory(self, count: int | None = None) -> Memory:
        """One memory of the base and the first `count` parts (all of them by default)."""
        joined = self.base
        for part in self.parts[:count]:
            joined = replace(part.memory, before=joined).joined()
        return joined

    def save(self, folder: Path) -> None:
        """Write the parts, not what lies before them, into a folder: a memory file each, and then `parts.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        for index, part in enumerate(self.parts):
            _with_length(part.memory, part.memory.document_length).save(
                folder / f"part-{index}.ttmem", keep_document=False
            )
        listed = [{"ids": part.ids.tolist(), "ratio": part.ratio} for part in self.parts]
        atomic_write(folder / "parts.json", lambda temporary: temporary.write_text(json.dumps(listed)))

    def load(self, folder: Path) -> None:
        """Take the parts that `save` wrote behind the same base. Raises MemoryFileError where they are not whole."""
        try:
            listed = json.loads((folder / "parts.json").read_text())
            loaded = [(torch.tensor(part["ids"]), float(part["ratio"])) for part in listed]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise MemoryFileError(f"{folder}: no whole conversation lies there") from error
        parts = []
        for index, (ids, ratio) in enumerate(loaded):
            memory = Memory.load(folder / f"part-{index}.ttmem")
            memory.check_model(self.model)
            memory = replace(_with_length(memory, len(ids)), tokens=ids)
            parts.append(Part(ids, ratio, memory.to(self.model.device, self.model.dtype)))
        self.parts = parts

    def append(self, ids: Tensor, ratio: float) -> None:
        """Read tokens behind all that is there, and compact them."""
        self.parts.append(Part(ids, ratio, self._compact(ids, ratio, self.memory())))

    def recompact(self, index: int, ratio: float) -> None:
        """Compact a part again, read anew behind the parts before it as they now are."""
        ids = self.parts[index].ids
        self.parts[index] = Part(ids, ratio, self._compact(ids, ratio, self.memory(index)))

    def _compact(self, ids: Tensor, ratio: float, before: Memory) -> Memory:
        digest = hashlib.sha256(str(ids.tolist()).encode()).hexdigest()
        document = Document("turns", digest, ids)
        tokens = max(MIN_TOKENS, int(len(ids) / max(1.0, ratio)))
        whole = tokens >= len(ids)
        method = FullMemory() if whole else make_method(self.method, self.settings, self.seed)
        budget = Budget(len(ids), 1.0) if whole else Budget.of(len(ids), tokens=tokens)
        prepared = Prepared(self.model, document, self.settings, self.progress, before=before)
        return replace(method(prepared, budget), before=None)


def _with_length(memory: Memory, tokens: int) -> Memory:
    """A part's description has its own length, a file's the length of all that its positions count."""
    return replace(memory, info=replace(memory.info, document={**memory.info.document, "tokens": tokens}))
