"""Many sequences behind many memories in one forward: the cache of continuous batching.

A step's tokens, of all sequences, go through the model as one row [1, N] with explicit positions: no padding, and the
weights are read once per step. Attention alone knows which tokens belong together. A memory's entries are read once
for all its sequences; a sequence's own tokens lie in a block with those of about the same length.

    cache = BatchCache(model)
    row = cache.join(memory)
    logits = cache.run([(row, prompt), (other, [token])])    # one row of logits per part
    cache.leave(row)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ttmem.attention.branches import Branch, merge_outputs
from ttmem.attention.kernels import fast_attention
from ttmem.attention.ragged import memory_attention
from ttmem.errors import MemoryMismatchError
from ttmem.memory.cache import MemoryKeys, UncountedLayer, window_branch
from ttmem.memory.layer import WindowMemory
from ttmem.memory.memory import Memory

if TYPE_CHECKING:
    from ttmem.models import Model

SMALLEST_BLOCK = 64
"""Sequences of up to this many new tokens share a block; the next blocks are each twice as long."""


@dataclass(eq=False)
class Row:
    """A sequence: its memory (None: none), how many new tokens are cached, and where they lie."""

    memory: Memory | None
    length: int = 0
    capacity: int = 0
    index: int = 0

    @property
    def position(self) -> int:
        """The position of its next token."""
        return self.length + (0 if self.memory is None else self.memory.document_length)


@dataclass
class Decoding:
    """The sequences of one block that get one token in a step.

    tokens [n]: where in the step's row; rows [n]: where in the block; lengths [n]: tokens cached before.
    """

    capacity: int
    tokens: Tensor
    rows: Tensor
    lengths: Tensor
    held: int
    longest: int
    in_order: bool
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What hides another sequence's length, and what a window has left behind: [rows, 1, 1, longest] or None."""
        if window not in self.masks:
            self.masks[window] = self._bias(window, dtype)
        return self.masks[window]

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        last = self.lengths.new_zeros(self.held)
        last[self.rows] = self.lengths
        index = torch.arange(self.longest, device=last.device)
        visible = index <= last.unsqueeze(-1)
        if window is not None:
            visible &= index > last.unsqueeze(-1) - window
        if bool(visible.all()):
            return None
        hidden = torch.finfo(dtype).min
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, hidden).view(self.held, 1, 1, -1)


@dataclass
class Chunk:
    """Several tokens of one sequence: the step's tokens `start` to `end`, behind `past` cached ones."""

    capacity: int
    row: int
    start: int
    end: int
    past: int

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """What its tokens see of the sequence's, [1, 1, T, past + T]; None where that is plainly causal from 0 on."""
        total = self.past + self.end - self.start
        if self.past == 0 and (window is None or total <= window):
            return None
        query = torch.arange(self.past, total, device=device).unsqueeze(-1)
        key = torch.arange(total, device=device)
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        return visible.view(1, 1, *visible.shape)


@dataclass
class Step:
    """What one forward runs. Tokens of one memory are neighbours, tokens without one come last.

    memories: (start, end, memory); seen [N]: new tokens each token sees, itself included, without a window.
    """

    count: int
    memories: list[tuple[int, int, Memory]]
    decodings: list[Decoding]
    chunks: list[Chunk]
    seen: Tensor

    @property
    def behind_memories(self) -> int:
        """Tokens that have a memory."""
        return self.memories[-1][1] if self.memories else 0


class BatchLayer(UncountedLayer):
    """One layer's new tokens, in blocks [rows, H, capacity, d], and attention over them and the memories' layers."""

    is_croppable = False

    def __init__(self, index: int, window: int | None, cache: BatchCache) -> None:
        super().__init__()
        self.index, self.window, self.cache = index, window, cache
        self.is_sliding = window is not None
        self.blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values [1, H, N, d] where their sequences lie."""
        step = self.cache.step
        for states, kept in ((key_states, 0), (value_states, 1)):
            for decoding in step.decodings:
                block = self._block(decoding.capacity, key_states, value_states)[kept]
                tokens = states[0] if decoding.in_order else states[0].index_select(1, decoding.tokens)
                block[decoding.rows, :, decoding.lengths] = tokens.transpose(0, 1)
            for chunk in step.chunks:
                block = self._block(chunk.capacity, key_states, value_states)[kept]
                span = slice(chunk.past, chunk.past + chunk.end - chunk.start)
                block[chunk.row, :, span] = states[0, :, chunk.start : chunk.end]
        return MemoryKeys.tie(key_states, self), value_states

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Attention of the step's tokens, each over its own sequence; the model's mask says nothing here."""
        step = self.cache.step
        packed = query.reshape(1, -1, step.count, query.shape[-1])  # a single token's head groups may lie on its axis
        new = self._from_new(packed, scale)
        output = new.output
        behind = step.behind_memories
        if behind:
            memory = self._from_memories(packed, scale)
            merged = merge_outputs(memory, Branch(output[:, :, :behind], new.log_z[:, :, :behind]))
            output = merged if behind == step.count else torch.cat([merged, output[:, :, behind:]], dim=2)
        return output.to(query.dtype).reshape(*query.shape[:-1], -1)

    def _from_memories(self, query: Tensor, scale: float) -> Branch:
        """The memories' branch of all tokens that have one."""
        step = self.cache.step
        parts = []
        for start, end, memory in step.memories:
            layer, tokens = memory.layers[self.index], query[:, :, start:end]
            if isinstance(layer, WindowMemory):
                seen = step.seen[start:end].clamp(max=layer.window).view(1, 1, -1, 1)
                parts.append(window_branch(tokens, layer, scale, seen))
            else:
                parts.append(memory_attention(tokens, layer, scale))
        if len(parts) == 1:
            return parts[0]
        return Branch(torch.cat([p.output for p in parts], dim=2), torch.cat([p.log_z for p in parts], dim=2))

    def _from_new(self, query: Tensor, scale: float) -> Branch:
        """The branch of every token over its sequence's own tokens."""
        step = self.cache.step
        parts: list[tuple[Tensor | slice, Branch]] = []
        for decoding in step.decodings:
            parts.append((decoding.tokens, self._decode(decoding, query, scale)))
        for chunk in step.chunks:
            keys, values = (
                block[chunk.row : chunk.row + 1, :, : chunk.past + chunk.end - chunk.start]
                for block in self.blocks[chunk.capacity]
            )
            mask = chunk.mask(self.window, query.device)
            tokens = query[:, :, chunk.start : chunk.end]
            branch = fast_attention(tokens, keys, values, scale, mask=mask, is_causal=mask is None)
            parts.append((slice(chunk.start, chunk.end), branch))
        if len(parts) == 1 and (step.chunks or step.decodings[0].in_order):
            return parts[0][1]
        value_dim = parts[0][1].output.shape[-1]
        output = query.new_empty(1, query.shape[1], step.count, value_dim, dtype=torch.float32)
        log_z = query.new_empty(1, query.shape[1], step.count, dtype=torch.float32)
        for where, branch in parts:
            output[:, :, where], log_z[:, :, where] = branch
        return Branch(output, log_z)

    def _decode(self, decoding: Decoding, query: Tensor, scale: float) -> Branch:
        """One token each of a block's sequences, in one call; rows that get none in this step are computed in vain."""
        tokens = query[0] if decoding.in_order else query[0].index_select(1, decoding.tokens)
        each = tokens.transpose(0, 1).unsqueeze(2)  # [n, H*G, 1, d]
        if not decoding.in_order:
            each = each.new_zeros(decoding.held, *each.shape[1:]).index_copy_(0, decoding.rows, each)
        keys, values = (block[: decoding.held, :, : decoding.longest] for block in self.blocks[decoding.capacity])
        branch = fast_attention(each, keys, values, scale, bias=decoding.bias(self.window, query.dtype))
        output, log_z = branch.output.squeeze(2).transpose(0, 1), branch.log_z.squeeze(2).transpose(0, 1)
        if not decoding.in_order:
            output, log_z = output.index_select(1, decoding.rows), log_z.index_select(1, decoding.rows)
        return Branch(output.unsqueeze(0), log_z.unsqueeze(0))

    def _block(self, capacity: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The block of a capacity, with room for the sequences in it."""
        needed = len(self.cache.rows[capacity])
        held = self.blocks.get(capacity)
        if held is None or held[0].shape[0] < needed:
            rows = 1 << (needed - 1).bit_length()
            fresh = [t.new_zeros(rows, t.shape[1], capacity, t.shape[-1]) for t in (keys, values)]
            for old, new in zip(held or (), fresh, strict=False):
                new[: old.shape[0]] = old
            self.blocks[capacity] = fresh[0], fresh[1]
        return self.blocks[capacity]

    def move(self, source: tuple[int, int], target: tuple[int, int], length: int) -> None:
        """Copy a sequence's `length` tokens from (capacity, row) to (capacity, row)."""
        if length == 0:
            return
        (old, row), (new, place) = source, target
        keys, values = self.blocks[old]
        for kept, block in zip((keys, values), self._block(new, keys, values), strict=True):
            block[place, :, :length] = kept[row, :, :length]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True


class BatchCache(Cache):
    """Sequences that join and leave at any step, each behind its own memory, a shared one, or none.

    A sequence's logits are those it has alone, up to the rounding of larger matrix products.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.rows: dict[int, list[Row]] = {}
        self.step = Step(0, [], [], [], torch.empty(0))
        super().__init__(layers=[BatchLayer(layer.index, layer.window, self) for layer in model.layers])

    @property
    def held(self) -> int:
        """Sequences that have tokens cached."""
        return sum(map(len, self.rows.values()))

    def join(self, memory: Memory | None) -> Row:
        """A new sequence. Raises MemoryMismatchError for a memory whose layers are not the model's."""
        if memory is not None:
            check_layers(self.model, memory)
        return Row(memory)

    def leave(self, row: Row) -> None:
        """Forget a sequence; the last one of its block takes its place."""
        if row.capacity:
            self._vacate(row)
        row.length = row.capacity = 0

    @torch.no_grad()
    def run(self, parts: Sequence[tuple[Row, Sequence[int]]]) -> Tensor:
        """Run each sequence's next tokens; logits [parts, V] behind the last token of each, in the order given."""
        order = self._order([row for row, _ in parts])
        ids: list[int] = []
        positions: list[int] = []
        lasts = [0] * len(parts)
        spans: list[tuple[Row, int, int]] = []
        for which in order:
            row, tokens = parts[which]
            self._make_room(row, row.length + len(tokens))
            spans.append((row, len(ids), len(ids) + len(tokens)))
            ids += tokens
            positions += range(row.position, row.position + len(tokens))
            lasts[which] = len(ids) - 1
        device = self.model.device
        self.step = self._plan(spans, len(ids))
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool, device=device)
        output = self.model.forward(
            torch.tensor([ids], device=device),
            self,
            attention_mask=mask,  # four axes: taken as it is, and not looked at by this cache's layers
            position_ids=torch.tensor([positions], device=device),
            logits_to_keep=torch.tensor(lasts, device=device),
        )
        for row, start, end in spans:
            row.length += end - start
        logits: Tensor = output.logits[0].float()
        return logits

    def _order(self, rows: list[Row]) -> list[int]:
        """Parts so that those of one memory are neighbours and those without one come last."""
        groups: dict[int, list[int]] = {}
        for which, row in enumerate(rows):
            groups.setdefault(id(row.memory), []).append(which)
        without = groups.pop(id(None), [])
        return [which for group in groups.values() for which in group] + without

    def _plan(self, spans: list[tuple[Row, int, int]], count: int) -> Step:
        memories: list[tuple[int, int, Memory]] = []
        single: dict[int, list[tuple[Row, int]]] = {}
        chunks: list[Chunk] = []
        seen: list[int] = []
        for row, start, end in spans:
            if row.memory is not None and memories and memories[-1][2] is row.memory:
                memories[-1] = (memories[-1][0], end, row.memory)
            elif row.memory is not None:
                memories.append((start, end, row.memory))
            if end - start == 1:
                single.setdefault(row.capacity, []).append((row, start))
            else:
                chunks.append(Chunk(row.capacity, row.index, start, end, row.length))
            seen += range(row.length + 1, row.length + 1 + end - start)
        decodings = [self._decoding(capacity, rows, count) for capacity, rows in single.items()]
        return Step(count, memories, decodings, chunks, torch.tensor(seen, device=self.model.device))

    def _decoding(self, capacity: int, rows: list[tuple[Row, int]], count: int) -> Decoding:
        indices, tokens = [row.index for row, _ in rows], [token for _, token in rows]
        held = len(self.rows[capacity])
        device = self.model.device
        return Decoding(
            capacity,
            torch.tensor(tokens, device=device),
            torch.tensor(indices, device=device),
            torch.tensor([row.length for row, _ in rows], device=device),
            held,
            max(row.length for row, _ in rows) + 1,
            in_order=indices == list(range(held)) and tokens == list(range(count)),
        )

    def _make_room(self, row: Row, length: int) -> None:
        """Have `row` in a block that holds `length` tokens."""
        if length <= row.capacity:
            return
        capacity = max(SMALLEST_BLOCK, 1 << (length - 1).bit_length())
        rows = self.rows.setdefault(capacity, [])
        place = len(rows)
        rows.append(row)
        if row.capacity:
            for layer in self.layers:
                layer.move((row.capacity, row.index), (capacity, place), row.length)
            self._vacate(row)
        row.capacity, row.index = capacity, place

    def _vacate(self, row: Row) -> None:
        """Close the gap that `row` leaves in its block; free a block that is empty."""
        rows = self.rows[row.capacity]
        last = rows.pop()
        if last is not row:
            for layer in self.layers:
                layer.move((row.capacity, last.index), (row.capacity, row.index), last.length)
            rows[row.index] = last
            last.index = row.index
        if not rows:
            del self.rows[row.capacity]
            for layer in self.layers:
                layer.blocks.pop(row.capacity, None)


def check_layers(model: Model, memory: Memory) -> None:
    """Raise MemoryMismatchError unless the memory's layers fit the model's, so that no batch can fail on them."""
    config = model.network.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(memory.layers) != len(model.layers):
        raise MemoryMismatchError(f"the memory has {len(memory.layers)} layers, {model.name} has {len(model.layers)}")
    if memory.merging != "normalizer":
        raise MemoryMismatchError(f"the memory merges by {memory.merging!r}; only 'normalizer' can be batched")
    if memory.before is not None:
        raise MemoryMismatchError("the memory lies behind another one: batch memory.joined()")
    for layer, known in zip(memory.layers, model.layers, strict=True):
        window = layer.window if isinstance(layer, WindowMemory) else None
        found = (window, layer.num_heads, layer.keys.shape[-1], layer.values.shape[-1])
        wanted = (known.window, known.num_kv_heads, head_dim, head_dim)
        if found != wanted:
            raise MemoryMismatchError(
                f"layer {known.index} of the memory has window, KV heads and dimensions {found}, {model.name} has "
                f"{wanted}: this memory was made for another model"
            )
    if layer.keys.device != model.device or layer.keys.dtype != model.dtype:
        raise MemoryMismatchError(
            f"the memory is {layer.keys.dtype} on {layer.keys.device}, the model {model.dtype} on {model.device}: use "
            "memory.to(model.device, model.dtype)"
        )
