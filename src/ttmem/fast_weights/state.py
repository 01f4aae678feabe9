"""The state of a model with fast weights, as a transformers cache: what it has read, in a bounded number of bytes.

A layer's state is a few named tensors, batch first: keys and values of its window, accumulated dW, features of the
unfinished chunk, tails of convolutions. What they mean is the layer's business; copying, selecting rows, counting
bytes and writing to files is done here for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ttmem.errors import MemoryMismatchError
from ttmem.memory.cache import UncountedLayer

NO_CROP = (
    "what was read into fast weights cannot be taken back, so the last tokens cannot be removed: keep a copy of the "
    "state (`state.copy()`) from before them, and use decoding without a draft model or prompt lookup"
)

WIDE = ("memory", "recurrent")
"""Tensors that sum up many tokens, kept in fp32 at least."""


SLACK = 8
"""A kept tensor may hold on to a storage that is larger by this part; else it is copied out."""


def _trimmed(tensor: Tensor) -> Tensor:
    """The end of a long text must not keep all of it alive; copying at every decode step is not worth it either."""
    needed = tensor.numel() * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() > needed + needed // SLACK else tensor


class LayerState(UncountedLayer):
    """One layer's tensors by name, each [B, ..]. Layers read and write them through `get` and `set`."""

    is_sliding = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}

    @overload
    def get(self, name: str) -> Tensor | None: ...

    @overload
    def get(self, name: str, default: Tensor) -> Tensor: ...

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        return self.tensors.get(name, default)

    def behind(self, name: str, new: Tensor, dim: int = 1) -> Tensor:
        """New tokens' tensor behind what was kept of the earlier ones."""
        old = self.tensors.get(name)
        return new if old is None else torch.cat([old.to(new.dtype), new], dim=dim)

    def set(self, **tensors: Tensor | None) -> None:
        """Keep tensors for the next forward, without their gradient. None is not kept."""
        for name, tensor in tensors.items():
            if tensor is None:
                self.tensors.pop(name, None)
            else:
                self.tensors[name] = _trimmed(tensor.detach())
        self.is_initialized = True

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}

    def reset(self) -> None:
        self.tensors = {}
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        raise MemoryMismatchError(NO_CROP)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise MemoryMismatchError("a fast-weight state belongs to a model with fast weights; this model has none")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise MemoryMismatchError("a fast-weight state belongs to a model with fast weights; this model has none")


class FastWeightCache(Cache):
    """A model's state. Hand it to `forward` or `generate` as the cache; it is changed in place.

    seen: columns of tokens read, padding included. counts: tokens of each row's current document, as in `Layout`.
    A state of one row that meets a batch of many is copied for each of them: one reading, many questions.
    """

    layers: list[LayerState]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[LayerState() for _ in range(num_layers)])
        self.seen = 0
        self.counts: Tensor | int = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    @property
    def batch(self) -> int | None:
        """Rows of the state; None before anything is read."""
        for layer in self.layers:
            for tensor in layer.tensors.values():
                return tensor.shape[0]
        return None

    def match_batch(self, batch: int) -> None:
        """Raise MemoryMismatchError unless a batch of this size can go on from the state."""
        if self.batch in (None, batch):
            return
        if self.batch != 1:
            raise MemoryMismatchError(f"the state has {self.batch} rows, and the batch has {batch}: they must agree")
        self.batch_repeat_interleave(batch)

    def num_bytes(self) -> int:
        """Bytes of the state. Storage may be larger by up to an eighth."""
        return sum(
            tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors.values()
        )

    def reset(self) -> None:
        """Forget everything; the next forward starts a new text."""
        super().reset()
        self.seen, self.counts = 0, 0

    def copy(self) -> FastWeightCache:
        """An independent copy: the layers never write into tensors they have kept, so they can be shared."""
        copied = FastWeightCache(len(self.layers))
        for layer, mine in zip(copied.layers, self.layers, strict=True):
            layer.tensors = dict(mine.tensors)
            layer.is_initialized = mine.is_initialized
        copied.seen, copied.counts = self.seen, self.counts
        return copied

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> FastWeightCache:
        """A copy on another device, and for a model of another dtype; what is kept in fp32 stays so."""
        moved = self.copy()
        for layer in moved.layers:
            layer.tensors = {
                name: tensor.to(device, tensor.dtype if name in WIDE else dtype or tensor.dtype)
                for name, tensor in layer.tensors.items()
            }
        if isinstance(moved.counts, Tensor):
            moved.counts = moved.counts.to(device)
        return moved

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            layer.change(function)
        if isinstance(self.counts, Tensor):
            self.counts = function(self.counts)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise MemoryMismatchError(NO_CROP)

    def activate_past_recording(self) -> None:
        raise MemoryMismatchError(NO_CROP)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))
