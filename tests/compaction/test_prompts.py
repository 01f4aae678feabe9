"""Tests of the prompt lists and of the subsets drawn from them."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.compaction.prompts import (
    DOCUMENT_REQUESTS,
    HELD_OUT_PROMPTS,
    RESPONSE_INSTRUCTIONS,
    replay_request,
    rollout_prompts,
)

PRODUCT = [
    f"\n\n{request} {instruction}\nAnswer:"
    for request, instruction in product(DOCUMENT_REQUESTS, RESPONSE_INSTRUCTIONS)
]
PAIRS = dict(zip(PRODUCT, product(DOCUMENT_REQUESTS, RESPONSE_INSTRUCTIONS), strict=True))


def test_lists_have_their_sizes_and_no_duplicates() -> None:
    for entries, size in ((DOCUMENT_REQUESTS, 24), (RESPONSE_INSTRUCTIONS, 20), (HELD_OUT_PROMPTS, 24)):
        assert len(entries) == size
        assert len(set(entries)) == size


@pytest.mark.parametrize("entry", DOCUMENT_REQUESTS + RESPONSE_INSTRUCTIONS)
def test_parts_are_single_clean_lines(entry: str) -> None:
    assert entry == entry.strip()
    assert "\n" not in entry
    assert entry.isascii()
    assert entry.endswith(".")


@pytest.mark.parametrize("prompt", HELD_OUT_PROMPTS)
def test_held_out_prompts_have_the_rollout_form(prompt: str) -> None:
    assert re.fullmatch(r"\n\n\S[^\n]*[.?]\nAnswer:", prompt)
    assert prompt.isascii()


def test_no_prompt_targets_a_benchmark() -> None:
    banned = re.compile(r"needle|haystack|magic|pass ?key|uuid|phone|look ?up|secret", re.IGNORECASE)
    assert [p for p in (*PRODUCT, *HELD_OUT_PROMPTS, replay_request("x")) if banned.search(p)] == []


def test_held_out_prompts_share_nothing_with_the_training_prompts() -> None:
    assert set(HELD_OUT_PROMPTS).isdisjoint(PRODUCT)
    for part in DOCUMENT_REQUESTS + RESPONSE_INSTRUCTIONS:
        assert not any(part in prompt for prompt in HELD_OUT_PROMPTS)


def test_default_is_the_whole_product_in_request_major_order() -> None:
    assert rollout_prompts() == PRODUCT
    assert rollout_prompts(480) == PRODUCT


@pytest.mark.parametrize("count", [1, 2, 19, 20, 23, 24, 25, 47, 48, 96, 119, 120, 121, 240, 361, 479, 480])
def test_subset_covers_evenly_at_edge_counts(count: int) -> None:
    check_subset(count)


@given(st.integers(min_value=1, max_value=480))
def test_subset_covers_evenly(count: int) -> None:
    check_subset(count)


def check_subset(count: int) -> None:
    prompts = rollout_prompts(count)
    assert len(prompts) == count
    assert len(set(prompts)) == count
    assert prompts == [prompt for prompt in PRODUCT if prompt in set(prompts)]  # request-major order
    requests = Counter(PAIRS[prompt][0] for prompt in prompts)
    instructions = Counter(PAIRS[prompt][1] for prompt in prompts)
    for used, entries in ((requests, DOCUMENT_REQUESTS), (instructions, RESPONSE_INSTRUCTIONS)):
        floor, ceiling = count // len(entries), -(-count // len(entries))
        assert all(floor <= used[entry] <= ceiling for entry in entries)


def test_subset_is_the_same_each_time_and_a_fresh_list() -> None:
    first = rollout_prompts(48)
    first_copy = list(first)
    first.clear()
    assert rollout_prompts(48) == first_copy


def test_a_few_prompts_reach_content_organization_and_style() -> None:
    positions = [DOCUMENT_REQUESTS.index(PAIRS[prompt][0]) for prompt in rollout_prompts(5)]
    assert min(positions) < 15
    assert any(15 <= position < 20 for position in positions)
    assert max(positions) >= 20


@pytest.mark.parametrize("count", [0, -1, 481, 10_000])
def test_count_outside_the_product_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"\b480, got {count}$"):
        rollout_prompts(count)


@given(st.one_of(st.integers(max_value=0), st.integers(min_value=481)))
def test_any_count_outside_the_product_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"got {count}$"):
        rollout_prompts(count)


def test_replay_request_without_a_cue() -> None:
    assert replay_request() == "\n\nRepeat the previous text exactly.\n"
    assert replay_request(" \n") == replay_request("")


@given(st.text(min_size=1).filter(lambda text: bool(text.strip())))
def test_replay_request_holds_the_cue_verbatim(cue: str) -> None:
    request = replay_request(cue)
    assert request.startswith("\n\nRepeat exactly ")
    assert f'"{cue}"' in request
    assert request.endswith("\n")
    assert request != replay_request()
