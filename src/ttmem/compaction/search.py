"""The smallest budget that is good enough: `ttmem compact --fidelity`."""

from __future__ import annotations

from dataclasses import asdict

from ttmem.compaction.method import Method
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.errors import BudgetError
from ttmem.evaluation.fidelity import measure_fidelity
from ttmem.memory import Memory

LADDER = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""Ratios that are tried, smallest memory first."""


def check_fidelity(fidelity: float, ratio: float | None, tokens: int | None) -> None:
    """Raise BudgetError for a fidelity outside (0, 1], or beside another kind of budget."""
    if ratio is not None or tokens is not None:
        raise BudgetError(f"give a fidelity or a budget, one of them (ratio={ratio}, tokens={tokens})")
    if not 0 < fidelity <= 1:
        raise BudgetError(f"the fidelity is {fidelity}; it is a share of next tokens, above 0 and at most 1 (0.95)")


def smallest_memory(method: Method, prepared: Prepared, fidelity: float) -> Memory:
    """The memory of the highest ratio of the ladder whose top-1 agreement reaches `fidelity`, found by bisection.

    Takes larger budgets to be at least as good, so that four budgets are tried, not eleven. The teacher's artifacts are
    shared by all. Raises BudgetError, with the figures of what was tried, when the largest budget does not reach it.
    """
    budgets = ladder(prepared.document.length)
    tried: dict[int, Memory] = {}

    def reaches(rung: int) -> bool:
        memory = method(prepared, budgets[rung])
        measured = measure_fidelity(prepared.model, prepared.full, memory, prepared.progress)
        memory.info.fidelity = asdict(measured)
        tried[rung] = memory
        return measured.top1 >= fidelity

    low, high = 0, len(budgets)  # rungs below `low` fail; rung `high` reaches it, or is beyond the ladder
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    if high < len(budgets):
        return tried[high]
    figures = ", ".join(f"{budgets[rung].ratio:.1f}x {tried[rung].info.fidelity['top1']:.3f}" for rung in sorted(tried))
    raise BudgetError(
        f"no budget reaches a top-1 agreement of {fidelity} (tried: {figures}): ask for less, train longer (--preset), "
        "or keep everything (--method full)"
    )


def ladder(document_length: int) -> list[Budget]:
    """The ladder's budgets for a document, smallest first; ratios that leave too little are skipped."""
    budgets: dict[int, Budget] = {}
    for ratio in LADDER:
        try:
            budget = Budget.of(document_length, ratio)
        except BudgetError:
            continue
        budgets.setdefault(budget.tokens, budget)
    if not budgets:
        raise BudgetError(
            f"the document has {document_length} tokens, too few to compact: keep it whole, with --method full and no "
            "budget"
        )
    return list(budgets.values())
