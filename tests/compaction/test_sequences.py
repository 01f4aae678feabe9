"""Padded batches of prompts and answers behind a memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem import Memory, Model
from ttmem.compaction.sequences import answer_logits, batch_sequences, mask_behind, positions_behind

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15]]
ANSWERS = [[20], [21, 22, 23], [24, 25]]


def test_positions_and_mask_behind_a_document() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 0]])
    assert positions_behind(100, mask).tolist()[0] == [100, 101, 102, 103]
    assert positions_behind(100, mask).tolist()[1][2:] == [100, 101]
    assert positions_behind(100, mask).tolist()[2][0] == 100
    assert mask_behind(2, mask).tolist() == [[1, 1, *row] for row in mask.tolist()]


def test_the_layout_of_a_batch(model: Model) -> None:
    batch = batch_sequences(model, 50, PROMPTS, ANSWERS)
    pad = model.pad_token_id
    assert batch.input_ids.tolist() == [
        [pad, pad, 5, 6, 7, 8, 20, pad],
        [pad, pad, pad, pad, pad, 9, 21, 22],
        [10, 11, 12, 13, 14, 15, 24, 25],
    ]
    assert batch.answers.tolist() == [[20, pad, pad], [21, 22, 23], [24, 25, pad]]
    assert batch.answer_mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch.attention_mask.shape == (3, 50 + 8)
    assert batch.attention_mask[:, :50].all()
    assert batch.position_ids[0, 2:6].tolist() == [50, 51, 52, 53]


@pytest.mark.parametrize("architecture", ["model", "gemma"])
def test_the_padding_changes_no_logit(architecture: str, request: Any, make_full: Any) -> None:
    """Each row's scored steps equal the plain model on document, prompt and answer."""
    model: Model = request.getfixturevalue(architecture)
    memory: Memory = make_full(model)
    batch = batch_sequences(model, memory.document_length, PROMPTS, ANSWERS)
    with torch.no_grad():
        logits = answer_logits(model, memory, batch)
        assert memory.tokens is not None
        for row, prompt, answer in zip(logits, PROMPTS, ANSWERS, strict=True):
            ids = memory.tokens.tolist() + prompt + answer
            plain = model.network(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            expected = plain[len(ids) - len(answer) - 1 : -1]
            torch.testing.assert_close(row[: len(answer)], expected, atol=1e-4, rtol=1e-4)
