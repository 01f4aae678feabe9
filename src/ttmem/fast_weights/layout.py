"""Where the tokens of one forward stand in their documents.

Inside the network a row has its tokens at the front and its padding behind them: padding at the end is hidden from all
tokens by causality alone, so neither attention nor memory needs a mask for it. `arrange` brings rows into this form,
`Rows` brings results back into the caller's.

Coordinates are per row: the first new token is 0, what the row's state holds lies below, and a document that has n
tokens in the state began at -n. A document begins where the position is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.errors import ModelError


@dataclass
class Rows:
    """A rearrangement of the tokens [B, T] into rows [B', T'], and back; both are indices into the flattened other."""

    there: Tensor
    back: Tensor

    def arrange(self, x: Tensor) -> Tensor:
        """[B, T, ..] -> [B', T', ..]."""
        return x.flatten(0, 1)[self.there]

    def restore(self, x: Tensor) -> Tensor:
        """[B', T', ..] -> [B, T, ..]. What comes back at the place of padding has no meaning."""
        return x.flatten(0, 1)[self.back]


@dataclass
class Layout:
    """The tokens [B, T] of a forward.

    lengths [B]: tokens before the padding begins; None: all T.
    counts: tokens of the current document in each row's state, [B], or one number where all rows agree.
    first [B, T]: the coordinate where each token's document begins; None where it is -counts everywhere and `counts` is
    a number, so that all rows reach the end of a chunk together.
    """

    batch: int
    tokens: int
    device: torch.device
    lengths: Tensor | None = None
    counts: Tensor | int = 0
    first: Tensor | None = None
    packed: bool = False

    def coordinates(self) -> Tensor:
        """[1, T]."""
        return torch.arange(self.tokens, device=self.device).unsqueeze(0)

    def row_counts(self) -> Tensor:
        """`counts` as a tensor, [B] or [1]."""
        return counts_tensor(self.counts, self.device)

    def begins(self) -> Tensor:
        """`first`, [B, T] or [1, T]."""
        if self.first is not None:
            return self.first
        return -self.row_counts().unsqueeze(1).expand(1, self.tokens)

    def places(self) -> Tensor:
        """Each token's place in its document, from 0: [B, T] or [1, T]."""
        return self.coordinates() - self.begins()

    def segments(self, held: int) -> Tensor | None:
        """The document of the last `held` tokens in the state and of the new ones, [B, held + T]; None: all are of one.

        Document 0 is the one that goes on from the state, and -1 stands for what the state holds of no meaning.
        """
        if self.first is None:
            return None
        begun = -self.row_counts().unsqueeze(1)
        new = torch.where(self.first == begun, 0, self.first + 1)
        before = torch.arange(-held, 0, device=self.device).unsqueeze(0)
        return torch.cat([torch.where(before >= begun, 0, -1).expand(self.batch, held), new], dim=1)

    def last_first(self) -> Tensor | int:
        """Where the document begins that is current after this forward: [B], or a number."""
        if self.first is None:
            return -self.counts
        if self.lengths is None:
            return self.first[:, -1]
        last = self.first.gather(1, (self.lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        return torch.where(self.lengths > 0, last, -self.row_counts())

    def next_counts(self) -> Tensor | int:
        """Tokens of the current document after this forward."""
        return (self.tokens if self.lengths is None else self.lengths) - self.last_first()

    def keep_last(self, stream: Tensor, many: int) -> Tensor:
        """The last `many` entries of each row of [old | new] ([B, S, ..], the new T at its end), padding left out.

        Rows with fewer entries have something without meaning at their front; no later token looks that far back.
        """
        many = min(many, stream.shape[1])
        if self.lengths is None:
            return stream[:, stream.shape[1] - many :]
        end = stream.shape[1] - self.tokens + self.lengths
        index = end.unsqueeze(1) - many + torch.arange(many, device=self.device)
        index = index.clamp_min(0).view(*index.shape, *(1,) * (stream.dim() - 2))
        return stream.gather(1, index.expand(-1, -1, *stream.shape[2:]))

    def completes(self, chunk: int) -> bool:
        """Whether any row reaches the end of a chunk. Waits for the device where rows differ: for inference only."""
        ends = self.next_counts() // chunk > self.counts // chunk
        return ends if isinstance(ends, bool) else self.packed or bool(ends.any())


def arrange(
    shape: tuple[int, int],
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    counts: Tensor | int = 0,
    seen: int = 0,
    unpack: bool = False,
) -> tuple[Rows | None, Layout, Tensor]:
    """Rows, layout and positions [B', T'] of a batch of tokens [B, T].

    attention_mask [B, T], or [B, seen + T] with what the state has read: 0 for padding, anywhere. position_ids [B, T]
    or [1, T]: 0 begins a document. Without them tokens are counted. counts, seen: of the state.
    unpack: give each document of a packed row a row of its own.

    While gradients are recorded on a GPU, nothing here waits for it, unless rows are unpacked. Otherwise masks that
    mask nothing and positions that only count are looked for and left out.
    """
    batch, tokens = shape
    may_look = device.type == "cpu" or (device.type != "meta" and not torch.is_grad_enabled())
    mask = _new_part(attention_mask, shape, seen)
    if mask is not None and may_look and bool(mask.all()):
        mask = None
    steps = torch.arange(tokens, device=device).unsqueeze(0)
    rows, lengths = None, None
    if position_ids is not None:
        position_ids = position_ids.to(device).expand(batch, tokens)
    if mask is not None:
        order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)
        offsets = tokens * torch.arange(batch, device=device).unsqueeze(1)
        rows = Rows(order + offsets, torch.argsort(order, dim=1) + offsets)
        lengths = mask.sum(1)
        if position_ids is not None:
            position_ids = position_ids.gather(1, order)
    layout = Layout(batch, tokens, device, lengths, counts)
    begun = -counts_tensor(counts, device).unsqueeze(1)
    starts = None
    if position_ids is not None:
        starts = position_ids == 0
        if lengths is not None:
            starts = starts & (steps < lengths.unsqueeze(1))
        if may_look and not bool((starts & (steps > begun)).any()):
            starts = None
    if starts is not None:
        layout.packed = True
        marks = torch.where(starts, steps, begun)
        layout.first = marks.cummax(dim=1).values if tokens else marks
    elif not isinstance(counts, int):
        layout.first = begun.expand(batch, tokens)
    if layout.packed and unpack:
        return _unpack(layout, rows, position_ids, seen)
    return rows, layout, layout.places() if position_ids is None else position_ids


def counts_tensor(counts: Tensor | int, device: torch.device) -> Tensor:
    """[B], or [1] where all rows agree; filled on the device, since copying a number to it would wait."""
    return torch.full((1,), counts, device=device) if isinstance(counts, int) else counts


def _new_part(mask: Tensor | None, shape: tuple[int, int], seen: int) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() != 2 or mask.shape[1] not in (shape[1], seen + shape[1]) or mask.shape[0] != shape[0]:
        raise ModelError(
            f"the attention mask has shape {tuple(mask.shape)}; it must be {shape} or ({shape[0]}, {seen + shape[1]}), "
            "with 0 for padding"
        )
    return mask[:, mask.shape[1] - shape[1] :].bool()


def _unpack(
    layout: Layout, rows: Rows | None, position_ids: Tensor | None, seen: int
) -> tuple[Rows, Layout, Tensor]:
    """One row per document. Reads their number and lengths from the device."""
    if seen:
        raise ModelError("rows of several documents cannot go on from a state under this rule: run them one by one")
    first, device, tokens = layout.begins(), layout.device, layout.tokens
    steps = layout.coordinates().expand(layout.batch, tokens)
    valid = steps < (tokens if layout.lengths is None else layout.lengths.unsqueeze(1))
    opens = (steps == first) & valid
    document = (opens.flatten().cumsum(0) - 1).clamp_min(0).view(layout.batch, tokens)
    place = torch.where(valid, steps - first, 0)
    many, longest = int(opens.sum()), int(place.max()) + 1
    back = document * longest + place
    there = torch.zeros(many * longest, dtype=torch.long, device=device)
    flat = torch.arange(layout.batch * tokens, device=device).view_as(back)
    there[back[valid]] = flat[valid]
    lengths = torch.bincount(document[valid], minlength=many)
    there, back = there.view(many, longest), torch.where(valid, back, 0)
    if rows is not None:
        there, back = rows.there.flatten()[there], back.flatten()[rows.back]
    unpacked = Layout(many, longest, device, lengths)
    return Rows(there, back), unpacked, unpacked.places()
