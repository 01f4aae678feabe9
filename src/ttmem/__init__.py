"""ttmem: test-time memory for transformers. A long document becomes a small memory, once, and answers any question.

model = ttmem.load_model()
memory = ttmem.compact(model, text, ratio=16)
memory.save("doc.ttmem")
ttmem.ask(model, ttmem.Memory.load("doc.ttmem"), ["Who wrote it?"])
"""

from ttmem.compaction.api import compact
from ttmem.compaction.settings import PRESETS, LatentSettings
from ttmem.errors import (
    BudgetError,
    DocumentError,
    MemoryFileError,
    MemoryMismatchError,
    ModelError,
    ResumeError,
    TtmemError,
)
from ttmem.evaluation.fidelity import Fidelity, measure_fidelity
from ttmem.generation import ask, stream
from ttmem.memory import Memory
from ttmem.models import Model, load_model
from ttmem.progress import ConsoleProgress, Progress
from ttmem.versions import version_of

__version__ = version_of("ttmem")

__all__ = [
    "PRESETS",
    "BudgetError",
    "ConsoleProgress",
    "DocumentError",
    "Fidelity",
    "LatentSettings",
    "Memory",
    "MemoryFileError",
    "MemoryMismatchError",
    "Model",
    "ModelError",
    "Progress",
    "ResumeError",
    "TtmemError",
    "__version__",
    "ask",
    "compact",
    "load_model",
    "measure_fidelity",
    "stream",
]
