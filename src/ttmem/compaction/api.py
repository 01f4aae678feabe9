"""`compact`: text in, memory out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from os import PathLike
from pathlib import Path
from typing import Any

from ttmem.compaction.attention_matching import AttentionMatching, AttentionMatchingOMP
from ttmem.compaction.document import Document
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.method import Method
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.pyramidkv import PyramidKV
from ttmem.compaction.search import check_fidelity, smallest_memory
from ttmem.compaction.settings import Budget, LatentSettings, preset_settings
from ttmem.compaction.snapkv import SnapKV
from ttmem.compaction.summary import TextSummary
from ttmem.compaction.workspace import Workspace
from ttmem.errors import BudgetError
from ttmem.evaluation.fidelity import measure_fidelity
from ttmem.memory import Memory
from ttmem.models import Model
from ttmem.progress import Progress
from ttmem.versions import versions


class FullMemory:
    """Keep everything: the reference, and what a budget larger than the document gives."""

    name = "full"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        return prepared.full


METHODS: dict[str, Callable[[LatentSettings, int], Method]] = {
    "latent": LatentCompaction,
    "kvzip+": lambda settings, seed: KVzipPlus(),
    "full": lambda settings, seed: FullMemory(),
    "summary": lambda settings, seed: TextSummary(),
    "am": lambda settings, seed: AttentionMatching(),
    "am-omp": lambda settings, seed: AttentionMatchingOMP(),
    "snapkv": lambda settings, seed: SnapKV(),
    "pyramidkv": lambda settings, seed: PyramidKV(),
}


def make_method(name: str, settings: LatentSettings, seed: int) -> Method:
    """The method of a name. Raises BudgetError for an unknown one."""
    if name not in METHODS:
        raise BudgetError(f"the method {name!r} is not one of {', '.join(METHODS)}")
    return METHODS[name](settings, seed)


def run_identity(
    model: Model, document: Document, method: str, settings: LatentSettings, budget: Any, seed: int
) -> dict[str, Any]:
    """All that a compaction depends on, as JSON: a workspace belongs to one of them."""
    return {
        "document": document.sha256,
        "model": model.identity(),
        "dtype": str(model.dtype),
        "method": method,
        "settings": asdict(settings),
        "budget": budget,
        "seed": seed,
        "versions": versions(),
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def compact(
    model: Model,
    text: str,
    *,
    ratio: float | None = None,
    tokens: int | None = None,
    fidelity: float | None = None,
    preset: str = "balanced",
    settings: LatentSettings | None = None,
    method: str = "latent",
    seed: int = 0,
    name: str = "text",
    measure: bool = True,
    progress: Progress | None = None,
    workdir: str | PathLike[str] | None = None,
    resume: bool = False,
) -> Memory:
    """Turn a document into a small memory for one model, before any question is known.

    Give the budget as a `ratio` (16 keeps one sixteenth; the default when nothing is given), as `tokens` per layer and
    KV head, or as a `fidelity`: the smallest budget of a ladder whose memory has at least this top-1 agreement with the
    full context on held-out generic prompts. `preset` is quick, balanced, thorough or paper; `settings` overrides it.
    The memory carries its fidelity against the full context, unless `measure` is False. With `workdir`, finished steps
    are kept in that folder and `resume` goes on from them, with the same result; delete it once the memory is saved.

    Raises DocumentError (empty, too long), BudgetError (budget, preset, or a fidelity that none reaches), ResumeError
    (another run's workdir) and MemoryFileError (a workdir that cannot be written).
    """
    if fidelity is not None:
        check_fidelity(fidelity, ratio, tokens)
    elif ratio is None and tokens is None:
        ratio = 16
    chosen = settings or preset_settings(preset)
    document = Document.of(model, text, name)
    budget = None if fidelity is not None else Budget.of(document.length, ratio, tokens)
    compaction = make_method(method, chosen, seed)
    if budget is not None and budget.tokens >= document.length:
        compaction = FullMemory()
    wanted = budget.tokens if budget is not None else {"fidelity": fidelity}
    identity = run_identity(model, document, method, chosen, wanted, seed)
    workspace = Workspace.open(None if workdir is None else Path(workdir), identity, resume)
    prepared = Prepared(model, document, chosen, progress or Progress(), workspace)
    if budget is None:
        assert fidelity is not None
        memory = smallest_memory(compaction, prepared, fidelity)
    else:
        memory = compaction(prepared, budget)
    memory.info.created = now()
    if measure and not memory.info.fidelity and memory is not prepared.full:
        memory.info.fidelity = asdict(measure_fidelity(model, prepared.full, memory, prepared.progress))
    return memory
