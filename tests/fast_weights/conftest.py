"""Tiny models with every rule, in fp64, whose fast weights matter: random parameters where they would start at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ttmem.fast_weights import TTCDConfig, TTCDForCausalLM

TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "windows": 8,
    "teacher_window": 8,
    "student_window": 4,
    "chunk_size": 5,
    "lact_lr": 0.5,
}
RULES = ("ttcd", "in_place", "lact", "deltanet", "gated_deltanet", "window")
RANDOM = ("conv_teacher", "conv_student", "projection", "rate", "fast.conv")


def build(rule: str = "ttcd", seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> TTCDForCausalLM:
    layers = [0, 2] if rule in ("ttcd", "in_place") else None
    torch.manual_seed(seed)
    model = TTCDForCausalLM(TTCDConfig(**{**TINY, "rule": rule, "fast_layers": layers, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(RANDOM):
            torch.nn.init.normal_(parameter, std=0.4)
    return model.to(dtype).eval()


@pytest.fixture(scope="session")
def make_fast() -> Callable[..., TTCDForCausalLM]:
    """(rule="ttcd", seed=0, dtype=float64, **config changes) -> a fresh model in eval mode."""
    return build


@pytest.fixture(scope="session", params=RULES)
def any_fast(request: pytest.FixtureRequest) -> TTCDForCausalLM:
    """A model of every rule in turn. Not to be changed."""
    return build(request.param)


@pytest.fixture(scope="session")
def fast() -> TTCDForCausalLM:
    """The tiny TTCD model. Not to be changed."""
    return build()


@pytest.fixture(scope="session")
def make_ids() -> Callable[..., torch.Tensor]:
    """(batch, tokens, seed=0) -> ids without the padding's."""

    def make(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(1, 60, (batch, tokens), generator=torch.Generator().manual_seed(seed))

    return make
