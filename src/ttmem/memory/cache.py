"""The adapter of a memory to the transformers cache: goes into any model that runs `sdpa` attention, unmodified.

A compacted layer answers `update` with the new tokens' keys only, as a tensor that remembers its memory. When the
model hands these keys to `torch.nn.functional.scaled_dot_product_attention`, torch asks the tensor's class first
(`__torch_function__`), and attention over memory and new tokens is computed as one softmax (`attention/branches.py`).
So positions, masks, batching, sampling and streaming stay the business of transformers, and nothing is patched.

The layer reports the document's N tokens as seen, whatever the memory's size: the first question token has position N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ttmem.attention.branches import Branch, merge_branches, merge_outputs
from ttmem.attention.kernels import fast_attention
from ttmem.attention.ragged import memory_attention
from ttmem.errors import MemoryMismatchError
from ttmem.memory.layer import LayerMemory, WindowMemory

if TYPE_CHECKING:
    from ttmem.memory.memory import Memory

Observer = Callable[[int, Tensor, float, Branch, Branch], None]
"""Called in every compacted layer with (layer index, post-rotary queries [B, H*G, T, d], scale, the memory's branch,
the merged branch). For capturing queries and scores; must not change them."""


class AttendingLayer(Protocol):
    """A cache layer that computes attention over what it holds itself."""

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Attention for post-rotary queries [B, H*G, T, d], with the keys and values `update` returned and the model's
        boolean mask; output as `scaled_dot_product_attention` gives it."""


class MemoryKeys(Tensor):
    """The new tokens' keys [B, H, n, d] of one layer, tied to the layer's memory until attention is computed."""

    source: AttendingLayer

    @classmethod
    def tie(cls, keys: Tensor, source: AttendingLayer) -> MemoryKeys:
        tied = keys.as_subclass(cls)
        tied.source = source
        return tied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SCORE_PRODUCTS:
            raise MemoryMismatchError(
                "a ttmem memory needs the model's 'sdpa' attention, and this model runs another one: load it with "
                "attn_implementation='sdpa', or call model.set_attn_implementation('sdpa')"
            )
        with torch._C.DisableTorchFunctionSubclass():  # from here on the keys are a plain tensor
            if func is torch.nn.functional.scaled_dot_product_attention:
                return _attend(*args, **kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, Tensor):  # repeat_kv and the like reshape the keys on their way to attention
                tied = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, MemoryKeys))
                return cls.tie(result, tied.source)
            return result


_SCORE_PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, torch.baddbmm, Tensor.matmul, Tensor.__matmul__}


def _attend(
    query: Tensor,
    key: MemoryKeys,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` over a layer's memory and its new tokens, with the model's own scale."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask > torch.finfo(attn_mask.dtype).min / 2
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return key.source.attend(query, key.as_subclass(Tensor), value, scale, attn_mask, is_causal)


def _window_attention(
    query: Tensor, memory: WindowMemory, scale: float, mask: Tensor | None, is_causal: bool, new_length: int
) -> Branch:
    """The document's part of a sliding window, as `window_branch`, with what is visible read from the model's mask."""
    if mask is not None:
        seen: Tensor | int = mask.sum(dim=-1, keepdim=True)
    elif is_causal:
        seen = torch.arange(1, new_length + 1, device=query.device).view(1, 1, -1, 1)
    else:
        seen = new_length
    return window_branch(query, memory, scale, seen)


def window_branch(query: Tensor, memory: WindowMemory, scale: float, seen: Tensor | int) -> Branch:
    """The document's part of a sliding window: where v new tokens are visible, its last `window - v` entries are.

    query [B, H*G, T, d]; seen: v, a number or a tensor that broadcasts to [B, 1, T, 1].
    """
    length = memory.keys.shape[1]
    visible = torch.arange(length, 0, -1, device=query.device) <= memory.window - seen
    keys, values = (t.expand(query.shape[0], -1, -1, -1) for t in (memory.keys, memory.values))
    return fast_attention(query, keys, values, scale, mask=visible.view((1,) * (4 - visible.dim()) + visible.shape))


class UncountedLayer(CacheLayerMixin):
    """A cache layer without a length of its own: positions are the caller's, and the mask covers what is run."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class MemoryLayer(UncountedLayer):
    """A compacted layer: the memory, shared by all sequences and never written, and the new tokens' own K and V."""

    is_sliding = False
    is_croppable = True

    def __init__(
        self, index: int, memory: LayerMemory | WindowMemory, document_length: int, observer: Observer | None = None
    ) -> None:
        super().__init__()
        self.index = index
        self.memory = memory
        self.document_length = document_length
        self.observer = observer
        self.before: LayerMemory | None = None
        self.merging = "normalizer"
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def memory_for(self, query: Tensor) -> LayerMemory | WindowMemory:
        """The memory on the query's device and in its dtype, converted once; trainable memories stay as they are."""
        if not self.memory.keys.requires_grad:
            self.memory = self.memory.to(query.device, query.dtype)
        return self.memory

    def before_for(self, query: Tensor) -> LayerMemory | None:
        """What lies before the memory (see `Memory.before`), on the query's device and in its dtype."""
        if self.before is not None:
            self.before = self.before.to(query.device, query.dtype)
        return self.before

    @property
    def new_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values [B, H, T, d]; return the keys tied to the memory, and the values."""
        self._check(key_states, value_states)
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], dim=-2)
            self.values = torch.cat([self.values, value_states], dim=-2)
        return MemoryKeys.tie(self.keys, self), self.values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """One softmax over the memory and the new tokens (paper eq. 5)."""
        memory = self.memory_for(query)
        if isinstance(memory, WindowMemory):
            from_memory = _window_attention(query, memory, scale, mask, is_causal, keys.shape[-2])
        else:
            from_memory = memory_attention(query, memory, scale)
        from_new = fast_attention(query, keys, values, scale, mask=mask, is_causal=is_causal)
        before = self.before_for(query)
        if before is not None:
            from_new = merge_branches(memory_attention(query, before, scale), from_new)
        if self.merging == "equal":
            return torch.lerp(from_memory.output, from_new.output, 0.5).to(query.dtype)
        if self.observer is None:
            return merge_outputs(from_memory, from_new).to(query.dtype)
        merged = merge_branches(from_memory, from_new)
        self.observer(self.index, query, scale, from_memory, merged)
        return merged.output.to(query.dtype)

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self.memory.num_heads, self.memory.keys.shape[-1], self.memory.values.shape[-1])
        found = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        if shape != found:
            raise MemoryMismatchError(
                f"layer {self.index} of the memory has {shape[0]} KV heads with dimensions {shape[1:]}, the model's "
                f"has {found[0]} with {found[1:]}: this memory was made for another model"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new tokens only; they start at the document's length."""
        if query_length == 0:
            raise MemoryMismatchError(
                "the model was run on no tokens: generate() cuts the document's tokens off its inputs, and these held "
                "only the question: pass generate() both memory.cache() and **memory.inputs(question_ids)"
            )
        return self.new_length + query_length, self.document_length

    def get_seq_length(self) -> int:
        return self.document_length + self.new_length

    def reset(self) -> None:
        """Forget the new tokens; the document stays."""
        self.keys, self.values = None, None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` new tokens (transformers passes a negative number)."""
        remove = abs(tokens_to_remove)
        if remove > self.new_length:
            raise MemoryMismatchError(
                f"cannot remove {remove} tokens: {self.new_length} follow the document, whose own tokens are compacted"
            )
        if remove and self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[..., :-remove, :], self.values[..., :-remove, :]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, indices.to(self.keys.device))
            self.values = self.values.index_select(0, indices.to(self.values.device))


class WindowLayer(MemoryLayer):
    """A sliding-window layer behind the document's last window, which all sequences share.

    It keeps the new tokens apart from the window, as a compacted layer does: between the two lies the padding of
    left-padded sequences, which must not count as distance.
    """

    is_sliding = True


class MemoryCache(Cache):
    """A transformers cache that starts behind a compacted document. Made by `Memory.cache()`; one per conversation."""

    def __init__(self, memory: Memory, observer: Observer | None = None) -> None:
        length = memory.document_length
        layers = [
            MemoryLayer(index, layer, length, observer)
            if isinstance(layer, LayerMemory)
            else WindowLayer(index, layer, length)
            for index, layer in enumerate(memory.layers)
        ]
        for index, layer in enumerate(layers):
            layer.merging = memory.merging
            if memory.before is not None:
                earlier = memory.before.layers[index]
                layer.before = earlier if isinstance(earlier, LayerMemory) else None  # a window holds its own past
        super().__init__(layers=layers)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx >= len(self.layers):
            raise MemoryMismatchError(
                f"the model has more layers than the memory's {len(self.layers)}: it was made for another model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
