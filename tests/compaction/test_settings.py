"""Budgets and presets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem import PRESETS, BudgetError, LatentSettings
from ttmem.compaction.settings import MIN_TOKENS, Budget, preset_settings


@given(st.integers(1, 10**6), st.floats(1, 10**5))
def test_a_ratio_gives_that_fraction_or_is_refused(length: int, ratio: float) -> None:
    if int(length / ratio) < MIN_TOKENS and ratio > 1 and int(length / ratio) < length:
        with pytest.raises(BudgetError, match=f"{int(length / ratio)} tokens per head for a document of {length}"):
            Budget.of(length, ratio=ratio)
    else:
        budget = Budget.of(length, ratio=ratio)
        assert budget.tokens == int(length / ratio)
        assert budget.ratio * budget.tokens == pytest.approx(length)


@given(st.integers(1, 10**6), st.integers(MIN_TOKENS, 10**6))
def test_tokens_are_taken_as_they_are_up_to_the_document(length: int, tokens: int) -> None:
    budget = Budget.of(length, tokens=tokens)
    assert budget.tokens == min(tokens, length)
    assert budget.ratio == pytest.approx(length / budget.tokens)


@pytest.mark.parametrize(("ratio", "tokens"), [(None, None), (16.0, 20)])
def test_both_or_neither_are_refused(ratio: float | None, tokens: int | None) -> None:
    with pytest.raises(BudgetError, match="one of them"):
        Budget.of(1000, ratio, tokens)


@pytest.mark.parametrize("ratio", [0.99, 0.0, -4.0, float("nan"), float("inf"), float("-inf")])
def test_a_ratio_outside_its_range_is_named(ratio: float) -> None:
    with pytest.raises(BudgetError, match=f"the ratio is {ratio}"):
        Budget.of(1000, ratio=ratio)


@pytest.mark.parametrize("tokens", [3, 1, 0, -5])
def test_too_few_tokens_say_which_ratio_would_do(tokens: int) -> None:
    with pytest.raises(BudgetError, match=rf"the budget is {tokens} tokens .* a ratio of at most 250"):
        Budget.of(1000, tokens=tokens)


def test_whole_numbers_and_edges() -> None:
    assert Budget.of(1000, ratio=16) == Budget(62, 1000 / 62)
    assert Budget.of(1000, ratio=1) == Budget(1000, 1.0)
    assert Budget.of(1000, tokens=1000) == Budget.of(1000, tokens=10**9) == Budget(1000, 1.0)
    assert Budget.of(1000, ratio=250).tokens == 4
    with pytest.raises(BudgetError):
        Budget.of(1000, ratio=250.1)


@given(st.integers(MIN_TOKENS, 10**5), st.floats(0.01, 1), st.floats(0.01, 1))
def test_latents_and_anchors_fit_in_the_budget(tokens: int, latent: float, anchor: float) -> None:
    settings = LatentSettings(latent_fraction=latent, anchor_fraction=anchor)
    budget = Budget(tokens, 2.0)
    assert 1 <= settings.anchors(budget) <= settings.latents(budget) <= tokens


def test_the_papers_shares() -> None:
    budget = Budget(256, 16.0)
    assert LatentSettings().latents(budget) == 64
    assert LatentSettings().anchors(budget) == 16


def test_presets() -> None:
    assert set(PRESETS) == {"quick", "balanced", "thorough", "paper"}
    assert preset_settings("paper") == LatentSettings()
    paper = LatentSettings()
    assert (paper.rollouts, paper.fit_updates, paper.distill_updates, paper.pool) == (480, 1000, 1000, 4096)
    assert (paper.fit_lr, paper.distill_lr, paper.top_k, paper.rollout_tokens) == (3e-3, 1e-4, 20, 24)
    with pytest.raises(BudgetError, match="'fast' is not one of quick, balanced, thorough, paper"):
        preset_settings("fast")


SENSELESS = [
    *({name: -1} for name in ("rollouts", "rollout_tokens", "top_k", "replay_chunk", "pool", "fit_positions")),
    *({name: -1} for name in ("fit_updates", "distill_updates", "distill_batch", "clip", "fit_lr", "distill_lr")),
    *({name: 0} for name in ("rollouts", "rollout_tokens", "top_k", "replay_chunk", "pool", "distill_batch")),
    *({name: value} for name in ("latent_fraction", "anchor_fraction") for value in (-0.1, 1.5)),
    {"rollouts": 481},
]


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    """They are the user's error, to be told at once, not a traceback an hour later."""
    accepted = []
    for change in SENSELESS:
        try:
            LatentSettings(**change)
        except BudgetError as error:
            assert next(iter(change)) in str(error)  # noqa: PT017 (a loop over many)
        else:
            accepted.append(change)
    assert accepted == []
