"""Sliding-window perplexity: how well a fixed block is predicted behind more and more of what came before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ttmem.errors import TaskError
from ttmem.progress import Advance


def check_blocks(tokens: int, block: int, contexts: Sequence[int], blocks: int) -> None:
    """What `block_losses` needs, to be known before a model is trained for it. Raises TaskError."""
    if not contexts:
        raise TaskError("there is no context to test behind; name at least one number of tokens.")
    if min(contexts) < 1 or block < 1 or blocks < 1:
        raise TaskError(f"{blocks} blocks of {block} tokens behind {min(contexts)}: all must be at least 1.")
    longest = max(contexts)
    if tokens < longest + block:
        raise TaskError(f"{tokens} tokens are too few for blocks of {block} behind {longest} tokens of context.")


@torch.no_grad()
def block_losses(
    network: PreTrainedModel,
    tokens: np.ndarray,
    block: int,
    contexts: Sequence[int],
    blocks: int,
    advance: Advance | None = None,
) -> Tensor:
    """Nats per token of `blocks` blocks behind each number of tokens of context: [contexts, blocks] fp32.

    tokens: ids, one row. The blocks are spread evenly over them, and each is the same for every context, whose largest
    fits before the first. A block's first token is predicted from its context, so contexts are at least 1.
    Raises TaskError where the tokens are too few.
    """
    check_blocks(len(tokens), block, contexts, blocks)
    starts = np.linspace(max(contexts), len(tokens) - block, blocks).astype(int)
    training = network.training
    network.eval()
    losses = torch.zeros(len(contexts), blocks)
    for column, start in enumerate(starts.tolist()):
        for row, context in enumerate(contexts):
            piece = torch.from_numpy(tokens[start - context : start + block].astype(np.int64)).to(network.device)
            logits = network(input_ids=piece[None, :-1], use_cache=False, logits_to_keep=block).logits[0]
            losses[row, column] = cross_entropy(logits.float(), piece[-block:]).cpu()
            if advance is not None:
                advance(1)
    network.train(training)
    return losses
