"""`Model`: a transformers decoder with its tokenizer, frozen, checked and known by fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ttmem.models.fingerprint import fingerprint_model, hash_tokenizer
from ttmem.models.layers import AttentionLayer, cache_keyword, describe_layers, verify_attention

ANSWER_ROOM = 256
"""Positions left for a question and its answer behind a document."""


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of raw text: no special tokens are added, and text that looks like one is read as plain text."""
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids)


@dataclass(eq=False)
class Model:
    """A decoder-only transformers model and its tokenizer, ready for compaction.

    Wrap your own: `ttmem.Model(network, tokenizer)`. The network is put in eval mode, its weights are frozen, and its
    attention must be `sdpa`. Raises ModelError when the architecture cannot carry a memory.
    """

    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str = ""

    def __post_init__(self) -> None:
        self.layers: list[AttentionLayer] = describe_layers(self.network)
        if self.network.config._attn_implementation != "sdpa":
            self.network.set_attn_implementation("sdpa")
        self.network.eval().requires_grad_(False)
        self.name = self.name or self.network.name_or_path or self.architecture
        verify_attention(self.network)

    @property
    def architecture(self) -> str:
        return type(self.network).__name__

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def compacted_layers(self) -> list[AttentionLayer]:
        """The layers with global attention."""
        return [layer for layer in self.layers if layer.window is None]

    @property
    def max_positions(self) -> int | None:
        """Tokens the model's positions reach, None where the configuration does not say."""
        limit = getattr(self.network.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(limit) if limit else None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of configuration and weights, the same in fp32 and bf16."""
        return fingerprint_model(self.network)

    @cached_property
    def tokenizer_hash(self) -> str:
        return hash_tokenizer(self.tokenizer)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation, from the generation config, the model config or the tokenizer."""
        for source in (self.network.generation_config, self.network.config, self.tokenizer):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

    @cached_property
    def cache_keyword(self) -> str:
        """The name under which the network takes its cache."""
        return cache_keyword(self.network)

    @property
    def pad_token_id(self) -> int:
        """An id for masked positions; its value never matters."""
        return self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0

    def encode(self, text: str) -> list[int]:
        """See `encode`."""
        return encode(self.tokenizer, text)

    def left_pad(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Prompts as one batch: ids and mask [B, T], padded on the left."""
        width = max(map(len, prompts))
        ids = [[self.pad_token_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def decode(self, ids: Tensor | list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def forward(self, input_ids: Tensor, cache: Any, **kwargs: Any) -> Any:
        """The network's forward with its cache under the right keyword."""
        return self.network(input_ids=input_ids, use_cache=True, **{self.cache_keyword: cache}, **kwargs)

    def identity(self) -> dict[str, Any]:
        """What a memory records of its model."""
        return {
            "name": self.name,
            "architecture": self.architecture,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer_hash,
        }
