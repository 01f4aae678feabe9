"""Passages of the document, asked for in different ways: what generic prompts leave out (ours).

Generic prompts ask what a document is about; the answers name little of what is in it. Passages go through the whole
text in rounds, each round cut elsewhere. A request names the words before a passage, or some of the words in it, and
the passage follows as the answer; what the teacher predicts along it is learned. Requests differ in form, because a
memory that only ever hears one request answers only that one well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from ttmem.compaction.prompts import PASSAGE_AFTER, PASSAGE_AROUND
from ttmem.compaction.rollouts import Capture, Rollouts
from ttmem.compaction.sequences import batch_sequences
from ttmem.compaction.settings import LatentSettings
from ttmem.compaction.supervision import Predictions, replay_cue, words_before
from ttmem.memory import Memory
from ttmem.models import Model
from ttmem.progress import Progress

BATCH = 16
CUE_INSIDE = 5
"""Tokens of a passage that name it."""
REPEATED, FOLLOWING = 0.25, 0.5
"""Parts of the requests: to repeat the text from a cue, as the reconstruction scores ask; for what follows a cue. The
rest name words inside the passage."""


def piece_starts(document_length: int, length: int, seed: int) -> Iterator[int]:
    """Starts of pieces without end, in rounds: every token of the document is in exactly one piece of a round.

    A round has an offset and an order of its own, so that pieces end elsewhere each time. The first piece of a round
    may begin before the document: it is the shorter for it.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(min(length, document_length), (), generator=generator))
        starts = torch.arange(-offset, document_length, length)
        yield from starts[torch.randperm(len(starts), generator=generator)].tolist()


def passages_of(
    model: Model, ids: Tensor, count: int, length: int, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    """`count` requests and the passages of the document [N] that they ask for: token ids of both."""
    tokens, draws = ids.tolist(), random.Random(seed)
    requests, passages = [], []
    for start in islice(piece_starts(len(tokens), length, seed), count):
        first, last = max(0, start), min(start + length, len(tokens))
        requests.append(passage_request(model, ids, first, last, draws))
        passages.append(tokens[first:last])
    return requests, passages


def passage_request(model: Model, ids: Tensor, first: int, last: int, draws: random.Random) -> list[int]:
    """A request, in one of several forms, that tokens `first` to `last` of the document [N] answer: token ids."""
    form = draws.random()
    if first == 0 or form < REPEATED:
        return replay_cue(model, ids, first)
    if form < REPEATED + FOLLOWING * (1 - REPEATED):
        return model.encode(draws.choice(PASSAGE_AFTER).format(cue=words_before(model, ids, first)))
    start = draws.randrange(first, max(first + 1, last - CUE_INSIDE + 1))
    cue = model.decode(ids[start : min(start + CUE_INSIDE, last)]).strip()
    return model.encode(draws.choice(PASSAGE_AROUND).format(cue=cue))


@torch.no_grad()
def collect_passages(
    model: Model, memory: Memory, count: int, settings: LatentSettings, seed: int, progress: Progress
) -> Rollouts:
    """`count` passages, teacher-forced: the full memory's predictions along them, and its queries.

    As rollouts are, with the document's own words for answers.
    """
    assert memory.tokens is not None
    length = settings.passage_tokens
    requests, passages = passages_of(model, memory.tokens, count, length, seed)
    predictions = Predictions.empty(count, length, k=settings.top_k)
    capture = Capture(memory, model, maxima=False)
    with progress.stage("passages of the document", count) as advance:
        for start in range(0, count, BATCH):
            rows = slice(start, start + BATCH)
            batch = batch_sequences(model, memory.document_length, requests[rows], passages[rows])
            steps = batch.answers.shape[1]
            output = model.forward(
                batch.input_ids,
                memory.cache(observer=capture.observe),
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids,
                logits_to_keep=steps,
            )
            predictions[rows, :steps] = Predictions.of(output.logits, settings.top_k)
            capture.close_batch(batch.attention_mask[:, memory.document_length :].bool())
            advance(len(requests[rows]))
    return Rollouts(requests, passages, predictions, capture.pools(settings.pool), [], capture.scales)
