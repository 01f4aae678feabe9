"""What is kept between calls: keys without rotary positions, values, and the summaries of complete chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ttmem.errors import BlockError


class BlockSparseLayer(DynamicLayer):
    """A layer's cache. keys, values [B, H, N, d] by slot; starts [B] or None, see `chunks`.

    summaries [B, H, C, d] and biases [B, H, C] or None are by chunk; a row's entries beyond its complete chunks hold
    anything. tail [B, 1, n, hidden]: the last tokens' compressor inputs, where these are not the keys; n < S.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: Tensor | None = None
        self.summaries: Tensor | None = None
        self.biases: Tensor | None = None
        self.tail: Tensor | None = None

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens. Summaries of chunks that are no longer complete are made anew when they are again."""
        if self.tail is not None and tokens_to_remove:
            raise BlockError(
                "a cache cannot drop tokens where hidden states are compressed: those of an open chunk are not kept. "
                "Use compressor_input='keys', or run the model from the beginning."
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.starts = self.summaries = self.biases = self.tail = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._rows(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._rows(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._rows(lambda kept: kept[indices])

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("starts", "summaries", "biases", "tail"):
            kept = getattr(self, name)
            setattr(self, name, None if kept is None else change(kept))


class BlockSparseCache(Cache):
    """The model's cache: a `BlockSparseLayer` for each layer."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[BlockSparseLayer() for _ in range(layers)])

    @property
    def starts(self) -> Tensor | None:
        return self.layers[0].starts

    def begin_rows(self, starts: Tensor | None) -> None:
        """Set where rows begin. Raises BlockError where a row that has tokens would begin elsewhere than before."""
        old, cached = self.starts, self.get_seq_length()
        if cached and (old is not None or starts is not None):
            before = torch.as_tensor(0 if old is None else old)
            now = torch.as_tensor(0 if starts is None else starts, device=before.device)
            if bool(((before != now) & ((before < cached) | (now < cached))).any()):
                raise BlockError(
                    "the attention mask begins rows elsewhere than the calls before did; pass the mask of all tokens, "
                    "cached ones included, or none."
                )
        for layer in self.layers:
            layer.starts = starts


def merge_summaries(old: Tensor | None, new: Tensor, done: Tensor | int) -> Tensor:
    """`new` [B, H, n, ..] from chunk `done` on, `old` [B, H, C, ..] before: [B, H, done + n, ..]."""
    if old is None:
        return new
    if isinstance(done, int):
        return torch.cat([old[:, :, :done], new], dim=2)
    kept, added = old.shape[2], new.shape[2]
    target = torch.arange(int(done.max()) + added, device=new.device)
    before = done.unsqueeze(1)
    index = torch.where(target < before, target, kept + (target - before).clamp(0, added - 1))
    index = index.clamp_max(kept + added - 1)
    index = index.view(index.shape[0], 1, -1, *[1] * (new.dim() - 3))
    joined = torch.cat([old, new], dim=2)
    return joined.gather(2, index.expand(-1, joined.shape[1], -1, *joined.shape[3:]))
