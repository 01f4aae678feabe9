"""Sliding-window perplexity: the same block behind every context, and a window's reach shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from ttmem.errors import TaskError
from ttmem.evaluation.perplexity import block_losses, check_blocks

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.5,
}


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 40, 100)


def test_losses_are_those_of_the_block(tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**SHAPE))
    found = block_losses(lm, tokens, 8, [1, 5, 40], 3)
    assert found.shape == (3, 3)
    for column, start in enumerate((40, 66, 92)):
        for row, context in enumerate((1, 5, 40)):
            ids = torch.tensor(tokens[start - context : start + 8])
            logits = lm(input_ids=ids[None]).logits[0]
            expected = cross_entropy(logits[context - 1 : -1], ids[context:])
            assert found[row, column].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_window_sees_no_more_than_it_reaches(tokens: np.ndarray) -> None:
    torch.manual_seed(0)
    lm = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4))
    near, far, farther = block_losses(lm, tokens, 8, [1, 10, 40], 2)
    torch.testing.assert_close(far, farther)
    assert not torch.allclose(near, far)


def test_too_few_tokens(tokens: np.ndarray) -> None:
    lm = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with pytest.raises(TaskError, match="100 tokens are too few"):
        block_losses(lm, tokens, 8, [1, 93], 2)
    with pytest.raises(TaskError, match="no context"):
        check_blocks(100, 8, [], 2)
    with pytest.raises(TaskError, match="at least 1"):
        block_losses(lm, tokens, 8, [0, 9], 2)
