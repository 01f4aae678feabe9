"""Where chunks, windows and rows lie. Nothing here is learned.

A slot is a token's place in the padded batch, a position its place in its own row: position = slot - start. A row
padded on the left starts later. Chunk c holds the positions [c S, (c + 1) S). Where `starts` is None all rows start at
slot 0, and nothing has to be gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.checks import is_count
from ttmem.errors import BlockError


@dataclass(frozen=True)
class Sparsity:
    """What a query sees: a local window, and `top_k` of the chunks that the window does not reach.

    window: W, the query's own token included. align_window: let the window begin where a chunk begins: it is then up to
    S - 1 tokens longer, and no token lies between it and the last chunk. sink: a score of 0 without a value takes
    part in the fusion, so that a query may attend to nothing.
    """

    chunk: int = 64
    top_k: int = 32
    window: int = 512
    align_window: bool = False
    sink: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk", "top_k", "window"):
            value = getattr(self, name)
            if not is_count(value):
                raise BlockError(f"the sparsity's {name} is {value!r}; it must be an integer of at least 1.")

    def window_begin(self, position: Tensor) -> Tensor:
        """The first position in the window of each query position; negative where the row begins later than that."""
        begin = position - self.window + 1
        return begin.div(self.chunk, rounding_mode="floor") * self.chunk if self.align_window else begin

    def chunks_before(self, position: Tensor) -> Tensor:
        """How many chunks end before the window of each query position: these can be selected."""
        return self.window_begin(position).div(self.chunk, rounding_mode="floor").clamp_min(0)

    @property
    def reach(self) -> int:
        """The most tokens in a window."""
        return self.window + (self.chunk - 1 if self.align_window else 0)


def row_starts(mask: Tensor | None, length: int) -> Tensor | None:
    """The slot of each row's first token, [B], from a mask [B, length] that is 1 where there is a token.

    None where all rows start at slot 0. Padding on the right is allowed too: nothing before it sees it.
    Raises BlockError for another shape, or for padding between tokens.
    """
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[1] != length:
        raise BlockError(
            f"the attention mask must be [batch, {length}], 1 where there is a token (cached ones included), not "
            f"{list(mask.shape)}."
        )
    tokens = mask != 0
    if bool(tokens.all()):
        return None
    count = tokens.sum(1)
    first = tokens.int().argmax(1)
    last = length - 1 - tokens.flip(1).int().argmax(1)
    if bool(((count > 0) & (last - first + 1 != count)).any()):
        raise BlockError("the attention mask has padding between tokens; pad rows on the left (or on the right).")
    starts = torch.where(count > 0, first, length)
    return starts if bool(starts.any()) else None


def chunk_slots(chunks: Tensor, starts: Tensor | None, chunk: int) -> Tensor:
    """Slots of the tokens of chunks: [B, ..] chunk numbers -> [B, .., S]."""
    slots = chunks.unsqueeze(-1) * chunk + torch.arange(chunk, device=chunks.device)
    return slots if starts is None else slots + starts.view(-1, *[1] * (slots.dim() - 1))


def take_slots(tokens: Tensor, slots: Tensor) -> Tensor:
    """tokens [B, H, N, d] at slots [B, H or 1, ..] -> [B, H, .., d]. Slots outside are those at the edge."""
    batch, heads, length, dim = tokens.shape
    index = slots.clamp(0, length - 1).expand(batch, heads, *slots.shape[2:])
    flat = index.reshape(batch, heads, -1, 1).expand(-1, -1, -1, dim)
    return tokens.gather(2, flat).view(*index.shape, dim)


def all_chunks(tokens: Tensor, starts: Tensor | None, count: int, chunk: int) -> Tensor:
    """The first `count` chunks of each row: [B, H, N, d] -> [B, H, count, S, d]. Those not complete hold anything."""
    if starts is None:
        return tokens[:, :, : count * chunk].unflatten(2, (count, chunk))
    numbers = torch.arange(count, device=tokens.device).expand(tokens.shape[0], 1, -1)
    return take_slots(tokens, chunk_slots(numbers, starts, chunk))


def complete(length: int, starts: Tensor | None, chunk: int) -> Tensor | int:
    """How many chunks are complete after `length` slots: one number, or [B]."""
    return length // chunk if starts is None else (length - starts).clamp_min(0) // chunk
