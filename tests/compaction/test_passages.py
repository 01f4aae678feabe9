"""Passages of a document: every token asked for, by requests of several forms; the teacher reads along."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem import Model, Progress
from ttmem.compaction.passages import collect_passages, passages_of, piece_starts
from ttmem.compaction.supervision import Predictions


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


@pytest.mark.parametrize("length", [1, 3, 8, 500])
def test_requests_are_answered_by_the_document_itself(model: Model, length: int) -> None:
    ids = torch.tensor(model.encode("The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays. " * 6))
    requests, passages = passages_of(model, ids, 40, length, seed=3)
    assert (requests, passages) == passages_of(model, ids, 40, length, seed=3)
    text = ids.tolist()
    for request, passage in zip(requests, passages, strict=True):
        assert request
        assert 1 <= len(passage) <= length
        assert any(text[i : i + len(passage)] == passage for i in range(len(text)))
    openings = {model.decode(torch.tensor(request))[:12] for request in requests}
    assert len(openings) > (4 if length < 500 else 0)  # one form alone would teach that form alone


def test_the_teacher_predicts_passages_as_the_plain_model_does(model: Model, make_prepared: Any) -> None:
    prepared = make_prepared(model)
    settings = replace(prepared.settings, passage_rounds=1, passage_tokens=9, top_k=5, pool=10**6)
    ids, count = prepared.document.ids, 20
    found = collect_passages(model, prepared.full, count, settings, 0, Progress())
    assert len(found.prompts) == len(found.answers) == count
    most = sum(map(len, found.prompts)) + sum(map(len, found.answers))
    assert most - count <= found.pools[0].positions < most  # the last token of an answer predicts nothing
    for row, (request, passage) in enumerate(zip(found.prompts, found.answers, strict=True)):
        sequence = torch.cat([ids, torch.tensor(request + passage)])
        with torch.no_grad():
            logits = model.network(sequence[None]).logits[0, -len(passage) - 1 : -1]
        expected = Predictions.of(logits, 5)
        torch.testing.assert_close(found.predictions.log_z[row, : len(passage)], expected.log_z, atol=1e-4, rtol=1e-4)
        kept = found.predictions.top_logits[row, : len(passage)]
        torch.testing.assert_close(kept, expected.top_logits, atol=1e-4, rtol=1e-4)
