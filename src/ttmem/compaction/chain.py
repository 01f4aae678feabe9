"""A text that keeps growing, as a chain: each part was read and compacted behind those before it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from torch import Tensor

from ttmem.compaction.api import FullMemory, make_method
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import MIN_TOKENS, Budget, LatentSettings, preset_settings
from ttmem.memory import Memory
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
