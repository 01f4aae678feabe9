"""What is kept of the teacher's predictions, and the request that the replay starts with."""

from __future__ import annotations

import torch

from ttmem import Model
from ttmem.compaction.prompts import replay_request
from ttmem.compaction.supervision import CUE_TOKENS, Predictions, replay_cue


def test_a_cue_names_the_tokens_before(model: Model) -> None:
    ids = torch.tensor(model.encode("The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays."))
    assert replay_cue(model, ids, 0) == model.encode(replay_request())
    cue = model.decode(ids[12 - CUE_TOKENS : 12])
    assert replay_cue(model, ids, 12) == model.encode(replay_request(cue))


def test_predictions_keep_the_most_likely_tokens_and_the_normalizer() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4, 50)
    kept = Predictions.of(logits, 5)
    torch.testing.assert_close(kept.log_z, logits.logsumexp(-1))
    torch.testing.assert_close(kept.top_logits, logits.sort(-1, descending=True).values[..., :5])
    torch.testing.assert_close(logits.gather(-1, kept.top_ids), kept.top_logits)
    room = Predictions.empty(3, 6, k=5)
    room[:, :4] = kept
    assert torch.equal(room[:, :4].top_ids, kept.top_ids)
    assert not room.log_z[:, 4:].any()
