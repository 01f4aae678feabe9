"""`extend`: a document that has grown gets a memory of what is new, behind the one it has."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from pathlib import Path

from ttmem.compaction.api import FullMemory, make_method, now, run_identity
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, LatentSettings, preset_settings
from ttmem.compaction.workspace import Workspace
from ttmem.errors import BudgetError, DocumentError
from ttmem.evaluation.fidelity import measure_fidelity
from ttmem.memory import Memory
from ttmem.memory.merging import check_joinable
from ttmem.models import ANSWER_ROOM, Model
from ttmem.progress import Progress

METHODS = ("latent", "kvzip+", "am", "am-omp", "full")
"""Those that look at the document alone. SnapKV and PyramidKV read its last tokens behind the others."""


def extend(
    model: Model,
    memory: Memory,
    text: str,
    *,
    ratio: float | None = None,
    tokens: int | None = None,
    preset: str = "balanced",
    settings: LatentSettings | None = None,
    method: str = "latent",
    seed: int = 0,
    name: str = "more",
    measure: bool = True,
    progress: Progress | None = None,
    workdir: str | PathLike[str] | None = None,
    resume: bool = False,
) -> Memory:
    """A memory of a document and of the text that was added to it. `memory` itself is not changed.

    The text is read behind the memory, at the positions that follow the document's, and compacted there: what it costs
    depends on the text's length, not on the document's. Its teacher is the memory with all of the text's own entries,
    so nothing that the memory has lost comes back. Budget, presets and the rest are as for `compact`, of the new text
    alone; the fidelity is that of the new part.

    Raises DocumentError (empty, too long together), BudgetError (budget, preset, a method that cannot do this),
    MemoryMismatchError (another model's memory, one of a summary or without normalizers), ResumeError and
    MemoryFileError.
    """
    memory.check_model(model)
    check_joinable(memory)
    if method not in METHODS:
        raise BudgetError(f"the method {method!r} cannot extend a memory; {', '.join(METHODS)} can")
    chosen = settings or preset_settings(preset)
    document = Document.of(model, text, name)
    together, limit = memory.document_length + document.length, model.max_positions
    if limit is not None and together + ANSWER_ROOM > limit:
        raise DocumentError(
            f"{name}: with the memory's {memory.document_length:,} tokens it has {together:,}, and {model.name} "
            f"reaches {limit:,} positions, of which {ANSWER_ROOM} are kept for questions and answers: add less"
        )
    if ratio is None and tokens is None:
        ratio = 16
    budget = Budget.of(document.length, ratio, tokens)
    compaction = FullMemory() if budget.tokens >= document.length else make_method(method, chosen, seed)
    identity = run_identity(model, document, method, chosen, budget.tokens, seed)
    identity["before"] = [memory.info.document, memory.info.created, memory.entries]
    workspace = Workspace.open(None if workdir is None else Path(workdir), identity, resume)
    before = memory.to(model.device, model.dtype)
    prepared = Prepared(model, document, chosen, progress or Progress(), workspace, before=before)
    added = compaction(prepared, budget)
    if measure and added is not prepared.full:
        added.info.fidelity = asdict(measure_fidelity(model, prepared.full, added, prepared.progress))
    extended = added.joined()
    extended.info.created = now()
    return extended
