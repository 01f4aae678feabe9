"""What a method of compaction is."""

from __future__ import annotations

from typing import Protocol

from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.memory import Memory


class Method(Protocol):
    """A way to compact: one object with its settings as fields, called with a prepared document and a budget."""

    name: str

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory: ...
