"""The smallest budget that reaches a fidelity."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem import BudgetError, LatentSettings, Memory, Model, compact
from ttmem.compaction import search
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.search import LADDER, ladder, smallest_memory
from ttmem.compaction.settings import Budget
from ttmem.evaluation.fidelity import Fidelity, measure_fidelity


class Known:
    """KVzip+, with the budgets it was asked for."""

    name = "known"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        self.asked.append(budget.tokens)
        return KVzipPlus()(prepared, budget)


@pytest.mark.parametrize("wanted", range(len(LADDER) + 1))
def test_bisection_finds_the_first_rung_that_reaches(
    model: Model, make_prepared: Any, document_text: str, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    prepared = make_prepared(model, document_text * 3)
    budgets = ladder(prepared.document.length)
    wanted = min(wanted, len(budgets))

    def measured(model: Model, full: Memory, memory: Memory, progress: Any) -> Fidelity:
        rung = [budget.tokens for budget in budgets].index(memory.info.budget["tokens"])
        return Fidelity(0.0, 0.9 if rung >= wanted else 0.1, 1, 1)

    monkeypatch.setattr(search, "measure_fidelity", measured)
    method = Known()
    if wanted == len(budgets):
        with pytest.raises(BudgetError, match=r"no budget reaches.*0\.5.*2\.0x 0\.100"):
            smallest_memory(method, prepared, 0.5)
    else:
        memory = smallest_memory(method, prepared, 0.5)
        assert memory.info.budget["tokens"] == budgets[wanted].tokens
        assert memory.info.fidelity["top1"] == 0.9
    assert len(method.asked) <= 4


@given(length=st.integers(8, 5000))
def test_the_ladder_rises(length: int) -> None:
    tokens = [budget.tokens for budget in ladder(length)]
    assert tokens == sorted(set(tokens))
    assert tokens[0] >= 4
    assert tokens[-1] == length // 2


def test_a_document_too_short_for_any_budget() -> None:
    with pytest.raises(BudgetError, match="too few"):
        ladder(5)


def test_through_compact_with_the_figure_that_was_measured(
    model: Model, document_text: str, quick_settings: LatentSettings
) -> None:
    memory = compact(model, document_text, fidelity=0.05, method="kvzip+", settings=quick_settings)
    full = compact(model, document_text, method="full", ratio=1)
    assert memory.info.fidelity == asdict(measure_fidelity(model, full, memory))
    assert memory.info.fidelity["top1"] >= 0.05


@pytest.mark.parametrize(
    "options", [{"fidelity": 0}, {"fidelity": 1.1}, {"fidelity": 0.9, "ratio": 4}, {"fidelity": 0.9, "tokens": 9}]
)
def test_wrong_requests_are_refused_before_any_work(model: Model, document_text: str, options: dict[str, Any]) -> None:
    with pytest.raises(BudgetError, match="fidelity"):
        compact(model, document_text, **options)
