"""Pieces of the document to repeat, and what the teacher predicts for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem import Model
from ttmem.compaction.prompts import replay_request
from ttmem.compaction.supervision import CUE_TOKENS, Predictions, piece_starts, replay_cue, replay_pieces


@given(length=st.integers(1, 200), piece=st.integers(1, 80), seed=st.integers(0, 10**6))
def test_every_round_covers_the_document_once(length: int, piece: int, seed: int) -> None:
    starts = piece_starts(length, piece, seed)
    for _ in range(2):
        covered: list[int] = []
        while len(covered) < length:
            start = next(starts)
            span = range(max(0, start), min(start + piece, length))
            assert len(span) >= 1
            covered += span
        assert sorted(covered) == list(range(length))


def test_starts_depend_on_the_seed_only() -> None:
    one, again, other = (list(islice(piece_starts(100, 8, seed), 40)) for seed in (1, 1, 2))
    assert one == again != other


def test_a_cue_names_the_tokens_before(model: Model) -> None:
    ids = torch.tensor(model.encode("The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays."))
    assert replay_cue(model, ids, 0) == model.encode(replay_request())
    cue = model.decode(ids[12 - CUE_TOKENS : 12])
    assert replay_cue(model, ids, 12) == model.encode(replay_request(cue))


def test_pieces_carry_their_own_predictions(model: Model) -> None:
    ids = torch.arange(60, 90)
    torch.manual_seed(0)
    predictions = Predictions.of(torch.randn(30, 50), 4)
    pieces = replay_pieces(model, ids, predictions, [-3, 10, 25], 8)
    assert pieces.answers == [list(range(60, 65)), list(range(70, 78)), list(range(85, 90))]
    for row, span in enumerate([slice(0, 5), slice(10, 18), slice(25, 30)]):
        count = span.stop - span.start
        for name in ("top_ids", "top_logits", "log_z"):
            kept = getattr(pieces.predictions, name)[row, :count]
            assert torch.equal(kept, getattr(predictions, name)[span])


@pytest.mark.parametrize("chunk", [1024, 40])
def test_the_replay_predicts_the_document_as_the_plain_model_does(model: Model, make_prepared: Any, chunk: int) -> None:
    prepared = make_prepared(model)
    prepared = make_prepared(model, settings=replace(prepared.settings, replay_batch=1, replay_chunk=chunk, top_k=5))
    ids, found = prepared.document.ids, prepared.replay.predictions
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        request = torch.tensor(replay_cue(model, ids, start))
        with torch.no_grad():
            logits = model.network(torch.cat([ids, request, part])[None]).logits[0, -len(part) - 1 : -1]
        expected = Predictions.of(logits, 5)
        span = slice(start, start + len(part))
        torch.testing.assert_close(found.log_z[span], expected.log_z, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.top_logits[span], expected.top_logits, atol=1e-4, rtol=1e-4)


def test_predictions_are_kept_only_where_asked_for(model: Model, make_prepared: Any) -> None:
    assert make_prepared(model).replay.predictions is None
