"""A document read into fast weights, and asked: the counterpart of a compacted memory, without any training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ttmem.compaction.document import Document
from ttmem.errors import ModelError
from ttmem.fast_weights.modeling import TTCDForCausalLM
from ttmem.fast_weights.state import FastWeightCache
from ttmem.fast_weights.state_file import StateInfo, check_model, check_tensors, read_state, write_state
from ttmem.models import Model
from ttmem.models.loading import load_network
from ttmem.progress import Progress

PIECE = 2048
"""Tokens read at a time, so that activations stay small."""


class Reader(Model):
    """A model with fast weights and its tokenizer: `Reader(network, tokenizer)` for your own; `load_reader` loads one.

    Raises ModelError for a model without fast weights.
    """

    network: TTCDForCausalLM

    def __post_init__(self) -> None:
        if not isinstance(self.network, TTCDForCausalLM):
            raise ModelError(
                f"{type(self.network).__name__} has no fast weights to read into: use `ttmem compact`, or install fast "
                "weights with ttmem.fast_weights.install and train them"
            )
        self.layers = []
        self.network.eval().requires_grad_(False)
        self.name = self.name or self.network.name_or_path or self.architecture

    def read(self, text: str, name: str = "text", progress: Progress | None = None) -> Reading:
        """Read a document. Raises DocumentError when it is empty or beyond the model's positions."""
        document = Document.of(self, text, name)
        state = self.network.new_state()
        ids = document.ids.to(self.device).unsqueeze(0)
        with (progress or Progress()).stage("reading", document.length) as advance:
            for piece in ids.split(PIECE, dim=1):
                self.network.read(piece, state)
                advance(piece.shape[1])
        described = {"name": name, "sha256": document.sha256, "tokens": document.length}
        return Reading(state, StateInfo(self.identity(), self.network.config.fast_settings(), described))


def load_reader(
    name: str | PathLike[str], *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> Reader:
    """Load a model with fast weights by hub id or folder; the arguments are those of `ttmem.load_model`."""
    return Reader(*load_network(name, dtype=dtype, device=device))


@dataclass
class Reading:
    """What a model keeps of a document it has read. `ttmem.ask` and `ttmem.stream` take it in a memory's place."""

    state: FastWeightCache
    info: StateInfo

    def check_model(self, model: Model) -> None:
        """Raise MemoryMismatchError unless `model` is the one that read, MemoryFileError for tensors it never keeps."""
        if not isinstance(model, Reader):
            check_model(self.info, model.identity(), {})
            return
        check_model(self.info, model.identity(), model.network.config.fast_settings())
        check_tensors(self.state, model.network)

    def cache(self) -> FastWeightCache:
        """A state of its own for one conversation: asking does not change the reading."""
        return self.state.copy()

    def inputs(
        self,
        question_ids: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None = None,
        cache: FastWeightCache | None = None,
    ) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` for `generate`: the mask also covers what the state has read."""
        if not isinstance(question_ids, Tensor):
            attention_mask = question_ids.get("attention_mask", attention_mask)
            question_ids = question_ids["input_ids"]
        ids: Tensor = torch.atleast_2d(question_ids)
        mask = torch.ones_like(ids) if attention_mask is None else torch.atleast_2d(attention_mask)
        seen = (self.state if cache is None else cache).seen
        read = mask.new_ones(mask.shape[0], seen + ids.shape[1] - mask.shape[1])
        return {"input_ids": ids, "attention_mask": torch.cat([read, mask], dim=-1)}

    def num_bytes(self) -> int:
        return self.state.num_bytes()

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Reading:
        return Reading(self.state.to(device, dtype), self.info)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a state file, atomically. Raises MemoryFileError."""
        write_state(self.state, path, self.info)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Reading:
        """Read a state file. Raises MemoryFileError."""
        return cls(*read_state(path))

    def describe(self) -> dict[str, Any]:
        """What is in it, as JSON."""
        return {**vars(self.info), "bytes": self.num_bytes()}
