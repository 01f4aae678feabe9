"""Text summary: the model writes down what matters, and the summary's full cache is the memory.

The reference that needs no cache surgery: what assistants do today when a conversation grows too long.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.generation import greedy_answers
from ttmem.memory import Memory

REQUEST = (
    "\n\nSummarize the text above in at most {words} words. Keep the names, numbers, dates and other facts that "
    "someone may ask about later.\nSummary:"
)
WORDS_PER_TOKEN = 0.75
"""Of English text, roughly: the request names a length in words, the budget is in tokens."""


@dataclass
class TextSummary:
    """(document, budget) -> Memory of a summary of at most B tokens, read as a document of its own.

    What is asked follows the summary, from its length on: the memory's `document_length` is the number of the summary's
    tokens, while its info names the original document. Sliding layers hold the summary's window. A summary may be
    shorter than the budget, and so may be the memory. Small models fall into loops; `no_repeat` is the number of tokens
    in a row that a summary may not repeat (0: any).
    """

    request: str = REQUEST
    no_repeat: int = 12
    name = "summary"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Write the summary behind the full memory, greedily, and read it alone."""
        ids = self.summary(prepared, budget)
        layers = full_memory_layers(prepared.model.network, torch.tensor([ids], device=prepared.model.device))
        settings = {**asdict(self), "summary_tokens": len(ids)}
        return replace(prepared.memory(layers, self.name, budget, settings), document_length=len(ids))

    def summary(self, prepared: Prepared, budget: Budget) -> list[int]:
        """The summary's token ids: the model's greedy answer, cut at B tokens or before its end token.

        A model that ends at once leaves its end token, the memory of which says nothing.
        """
        model = prepared.model
        prompt = model.encode(self.request.format(words=max(1, int(budget.tokens * WORDS_PER_TOKEN))))
        full = prepared.full
        with prepared.progress.stage("writing the summary", 1) as advance:
            ids = greedy_answers(model, full, [prompt], budget.tokens, self.no_repeat)[0]
            advance(1)
        return ids[:-1] if len(ids) > 1 and ids[-1] in model.eos_token_ids else ids
