"""`Memory`: what a document becomes, and all one can do with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttmem.errors import MemoryMismatchError
from ttmem.memory.cache import MemoryCache, Observer
from ttmem.memory.layer import LayerMemory, WindowMemory

if TYPE_CHECKING:
    from ttmem.models import Model


@dataclass
class MemoryInfo:
    """What a memory is of and how it was made. Stored in the file as JSON.

    model: name, architecture, weight fingerprint and tokenizer hash of the model it belongs to.
    document: name, SHA-256 of the text, number of tokens.
    budget: tokens per layer and KV head on average, and the ratio that gives.
    fidelity: figures against the full context on held-out prompts, where measured.
    """

    method: str
    model: dict[str, Any]
    document: dict[str, Any]
    budget: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    created: str = ""


@dataclass
class Memory:
    """A document's memory for one model: one `LayerMemory` per global layer, one `WindowMemory` per sliding layer.

    `tokens` are the document's token ids where they were kept (the default); evaluation against the full context
    needs them, answering does not. A memory is never written by answering, so any number of caches can share it.
    `merging` is "normalizer": one softmax over memory and new tokens (paper eq. 5); "equal" averages the two branches
    instead, an ablation that breaks the memory.

    `before` is another memory that lies before these layers' tokens and stays as it is, while a document that has
    grown is compacted: `document_length` then covers both, `tokens` only the later ones. `joined` makes one of the two.
    """

    layers: list[LayerMemory | WindowMemory]
    document_length: int
    info: MemoryInfo
    tokens: Tensor | None = None
    merging: str = "normalizer"
    before: Memory | None = None

    def joined(self) -> Memory:
        """This memory with what lies before it as part of its own entries; itself where there is nothing before it."""
        if self.before is None:
            return self
        from ttmem.memory.merging import join_behind

        return join_behind(self.before, self)

    def cache(self, observer: Observer | None = None) -> MemoryCache:
        """A fresh transformers cache behind this memory, for `model(...)` or `model.generate(...)`.

        Works with an unmodified transformers model that runs `sdpa` attention, for any batch size. Each call starts
        anew; reuse the same cache object to continue a conversation. Use `inputs` for right positions in `generate`.
        """
        return MemoryCache(self, observer)

    def inputs(
        self,
        question_ids: Tensor | Mapping[str, Tensor],
        attention_mask: Tensor | None = None,
        cache: MemoryCache | None = None,
    ) -> dict[str, Tensor]:
        """Keyword arguments for `model.generate`: the question's ids and a mask that also covers the document.

        Pass the tokenizer's output, or ids [B, T] (and the mask of left-padded ones). transformers reads positions and
        the length already cached from the mask, so it must be N + T wide. Where a conversation goes on in a cache, pass
        the cache too: what it holds is covered as well. If an earlier turn was padded, pass a mask over all that lies
        behind the document, earlier turns and question, so that the padding stays hidden.
        """
        if not isinstance(question_ids, Tensor):
            attention_mask = question_ids.get("attention_mask", attention_mask)
            question_ids = question_ids["input_ids"]
        ids: Tensor = torch.atleast_2d(question_ids)
        attention_mask = torch.ones_like(ids) if attention_mask is None else torch.atleast_2d(attention_mask)
        before = self.document_length if cache is None else cache.get_seq_length()
        behind = before + ids.shape[1] - attention_mask.shape[1]
        if behind < self.document_length:
            raise MemoryMismatchError(
                f"the mask covers {attention_mask.shape[1]} tokens, but only "
                f"{before + ids.shape[1] - self.document_length} lie behind the document"
            )
        document = attention_mask.new_ones(attention_mask.shape[0], behind)
        return {"input_ids": ids, "attention_mask": torch.cat([document, attention_mask], dim=-1)}

    @property
    def compacted(self) -> list[LayerMemory]:
        """The layers with global attention, which are the ones that are compacted."""
        return [layer for layer in self.layers if isinstance(layer, LayerMemory)]

    @property
    def entries(self) -> int:
        """KV pairs kept over all compacted layers and heads."""
        return sum(layer.total for layer in self.compacted)

    @property
    def heads(self) -> int:
        """KV heads of all compacted layers."""
        return sum(layer.num_heads for layer in self.compacted)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].keys.dtype

    def num_bytes(self) -> int:
        """Bytes of storage the memory really holds: entries, biases and windows."""
        return sum(layer.num_bytes() for layer in self.layers)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Memory:
        """The same memory on another device, or with keys and values in another dtype (biases stay fp32)."""
        before = None if self.before is None else self.before.to(device, dtype)
        return replace(self, layers=[layer.to(device, dtype) for layer in self.layers], before=before)

    def check_model(self, model: Model) -> None:
        """Raise MemoryMismatchError unless this memory was made with `model`'s weights and tokenizer."""
        made_with = self.info.model
        if made_with["fingerprint"] != model.fingerprint:
            raise MemoryMismatchError(
                f"this memory was made with {made_with['name']} ({made_with['architecture']}, weights "
                f"{made_with['fingerprint'][:12]}), not with {model.name} ({model.architecture}, weights "
                f"{model.fingerprint[:12]}): load that model, or compact the document again"
            )
        if made_with["tokenizer"] != model.tokenizer_hash:
            raise MemoryMismatchError(
                f"this memory was made with another tokenizer ({made_with['tokenizer'][:12]}) than {model.name}'s "
                f"({model.tokenizer_hash[:12]}): use the tokenizer it was made with, or compact the document again"
            )

    def save(self, path: str | PathLike[str], *, keep_document: bool = True) -> None:
        """Write the memory to `path`, atomically. `keep_document=False` leaves the document's token ids out."""
        from ttmem.memory.file import write_memory

        write_memory(self.joined(), path, keep_document=keep_document)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> Memory:
        """Read a memory file. Raises MemoryFileError when it is missing, truncated, altered, newer or not finite."""
        from ttmem.memory.file import read_memory

        return read_memory(path, device)
