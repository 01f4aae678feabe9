"""Held-out divergences decide the split of the budget, the rate, and whether training is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ttmem import Memory, Progress
from ttmem.compaction.choice import RATES, SPLITS, Choice, Divergence, better, choose_rate
from ttmem.compaction.distillation import Teaching, distill
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget


@pytest.fixture(scope="module")
def choosing(prepared: Prepared) -> Prepared:
    passages = {"passage_rounds": 1, "passage_tokens": 12, "distill_passages": 2}
    changes = {"closed_form": True, "fit_updates": 0, "distill_updates": 6, "trial_updates": 3, "relative_rate": True}
    settings = replace(prepared.settings, **passages, **changes)
    return Prepared(prepared.model, prepared.document, settings)


@pytest.fixture(scope="module")
def student(choosing: Prepared) -> Memory:
    return KVzipPlus()(choosing, Budget.of(choosing.document.length, tokens=16))


@pytest.fixture(scope="module")
def teaching(choosing: Prepared) -> Teaching:
    return Teaching(choosing.full, choosing.rollouts, choosing.passages)


def test_the_full_memory_does_not_diverge(choosing: Prepared, student: Memory) -> None:
    full = choosing.choice.divergence(choosing.full, choosing.settings)
    compact = choosing.choice.divergence(student, choosing.settings)
    assert abs(full.answers) < 1e-5
    assert abs(full.passages) < 1e-5
    assert compact.answers > 1e-4
    assert compact.score > full.score


def test_halving_either_divergence_is_worth_the_same() -> None:
    assert Divergence(1.0, 4.0).score == pytest.approx(Divergence(4.0, 1.0).score)
    assert Divergence(0.5, 4.0).score < Divergence(1.0, 4.0).score - 0.6
    assert math.isfinite(Divergence(0.0, 0.0).score)


def test_what_decides_trains_nothing(choosing: Prepared) -> None:
    choice = choosing.choice
    assert not set(map(tuple, choice.answers.prompts)) & set(map(tuple, choosing.rollouts.prompts))
    both = (choice.passages, choosing.passages)
    pairs = [set(zip(map(tuple, each.prompts), map(tuple, each.answers), strict=True)) for each in both]
    assert not pairs[0] & pairs[1]


def test_the_best_split_is_kept(choosing: Prepared) -> None:
    budget = Budget.of(choosing.document.length, tokens=24)
    base = replace(choosing.settings, distill_updates=0)
    found = LatentCompaction(replace(base, choose_split=True)).after_stage_1(choosing, budget)
    scores = []
    for latent_fraction, floor in SPLITS:
        one = LatentCompaction(replace(base, latent_fraction=latent_fraction, preserver_floor=floor))
        scores.append(choosing.choice.divergence(one.after_stage_1(choosing, budget), base).score)
    assert choosing.choice.divergence(found, base).score == pytest.approx(min(scores), abs=1e-6)
    assert len(set(scores)) > 1


def test_the_chosen_rate_is_the_best_of_those_that_keep_the_answers(
    choosing: Prepared, student: Memory, teaching: Teaching
) -> None:
    settings = replace(choosing.settings, distill_lr=0.1)
    before = choosing.choice.divergence(student, settings)
    found = choose_rate(choosing.choice, student, teaching, settings, 0, Progress())
    tried = {}
    for part in RATES:
        trial = replace(settings, distill_lr=part * 0.1, distill_updates=3)
        memory, _ = distill(choosing.model, student, teaching, trial, 0, Progress())
        tried[part * 0.1] = choosing.choice.divergence(memory, settings)
    allowed = {rate: d.score for rate, d in tried.items() if d.answers <= 1.25 * before.answers + 0.01}
    assert found == (min(allowed, key=lambda rate: allowed[rate]) if allowed else min(tried))


def test_a_rate_that_spoils_everything_falls_to_the_lowest(
    choosing: Prepared, student: Memory, teaching: Teaching
) -> None:
    settings = replace(choosing.settings, distill_lr=1e4)
    assert choose_rate(choosing.choice, student, teaching, settings, 0, Progress()) == pytest.approx(1e4 / 9)


def test_training_that_brings_it_no_closer_is_undone(choosing: Prepared, student: Memory) -> None:
    choice: Choice = choosing.choice
    assert better(choice, choosing.full, student, choosing.settings) is choosing.full
    assert better(choice, student, choosing.full, choosing.settings) is choosing.full
    for rate in (1e-3, 1e4):
        method = LatentCompaction(replace(choosing.settings, distill_lr=rate))
        found = choice.divergence(method.after_stage_2(choosing, student), choosing.settings)
        assert found.score <= choice.divergence(student, choosing.settings).score + 1e-6
