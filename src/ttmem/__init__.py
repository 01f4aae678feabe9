"""ttmem: test-time memory for transformers. A long document becomes a small memory, once, and answers any question.

model = ttmem.load_model()
memory = ttmem.compact(model, text, ratio=16)
memory.save("doc.ttmem")
ttmem.ask(model, ttmem.Memory.load("doc.ttmem"), ["Who wrote it?"])
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ttmem.errors import (
    BlockError,
    BudgetError,
    DocumentError,
    MemoryFileError,
    MemoryMismatchError,
    ModelError,
    QuestionError,
    ResumeError,
    ServeError,
    TaskError,
    TtmemError,
    VisionError,
)
from ttmem.progress import ConsoleProgress, Progress
from ttmem.versions import version_of

if TYPE_CHECKING:
    from ttmem.compaction.api import compact
    from ttmem.compaction.document import Document
    from ttmem.compaction.extend import extend
    from ttmem.compaction.kvzip_plus import KVzipPlus
    from ttmem.compaction.latent import LatentCompaction
    from ttmem.compaction.prepared import Prepared
    from ttmem.compaction.settings import PRESETS, Budget, LatentSettings
    from ttmem.conversation import Conversation
    from ttmem.evaluation.fidelity import Fidelity, measure_fidelity
    from ttmem.generation import ask, stream
    from ttmem.long_conversation import Folding, LongConversation
    from ttmem.memory import Memory
    from ttmem.memory.merging import merge
    from ttmem.models import Model, load_model

_LATE = {
    "compact": "compaction.api",
    "extend": "compaction.extend",
    "PRESETS": "compaction.settings",
    "LatentSettings": "compaction.settings",
    "Budget": "compaction.settings",
    "Conversation": "conversation",
    "Document": "compaction.document",
    "Folding": "long_conversation",
    "LongConversation": "long_conversation",
    "KVzipPlus": "compaction.kvzip_plus",
    "LatentCompaction": "compaction.latent",
    "Prepared": "compaction.prepared",
    "Fidelity": "evaluation.fidelity",
    "measure_fidelity": "evaluation.fidelity",
    "ask": "generation",
    "stream": "generation",
    "Memory": "memory",
    "merge": "memory.merging",
    "Model": "models",
    "load_model": "models",
}
"""Names whose modules import torch and transformers: loaded when first used, so that `ttmem --help` is instant."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    globals()[name] = value
    return value


__version__ = version_of("ttmem")

__all__ = [
    "PRESETS",
    "BlockError",
    "Budget",
    "BudgetError",
    "ConsoleProgress",
    "Conversation",
    "Document",
    "DocumentError",
    "Fidelity",
    "Folding",
    "KVzipPlus",
    "LatentCompaction",
    "LatentSettings",
    "LongConversation",
    "Memory",
    "MemoryFileError",
    "MemoryMismatchError",
    "Model",
    "ModelError",
    "Prepared",
    "Progress",
    "QuestionError",
    "ResumeError",
    "ServeError",
    "TaskError",
    "TtmemError",
    "VisionError",
    "__version__",
    "ask",
    "compact",
    "extend",
    "load_model",
    "measure_fidelity",
    "merge",
    "stream",
]
