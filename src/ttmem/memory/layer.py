"""One layer of a memory: ragged entries of a global-attention layer, or the window of a sliding layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class LayerMemory:
    """Keys, values and biases of one layer, all heads in one flat tensor, head after head.

    keys [total, key_dim] with their original rotary positions, values [total, value_dim], biases [total] fp32;
    lengths: entries per KV head, summing to total. `unbiased` says that all biases are zero, so that kernels skip them.
    """

    keys: Tensor
    values: Tensor
    biases: Tensor
    lengths: tuple[int, ...]
    unbiased: bool = False
    offsets: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths or not all(type(length) is int and length >= 0 for length in self.lengths):
            raise ValueError(f"lengths are {self.lengths}; each head needs a number of entries, none below 0")
        if self.keys.dim() != 2 or self.values.dim() != 2 or self.biases.dim() != 1:
            raise ValueError("keys and values need two axes and biases one")
        total = sum(self.lengths)
        if not (self.keys.shape[0] == self.values.shape[0] == self.biases.shape[0] == total):
            raise ValueError(
                f"lengths sum to {total}, but there are {self.keys.shape[0]} keys, {self.values.shape[0]} values "
                f"and {self.biases.shape[0]} biases"
            )
        ends = torch.tensor(self.lengths).cumsum(0).tolist()
        self.offsets = (0, *ends)

    @classmethod
    def full(cls, keys: Tensor, values: Tensor) -> LayerMemory:
        """The uncompacted memory of a cache layer: keys and values [H, N, d], zero biases."""
        num_heads, length, _ = keys.shape
        biases = torch.zeros(num_heads * length, device=keys.device)
        return cls(keys.flatten(0, 1), values.flatten(0, 1), biases, (length,) * num_heads, unbiased=True)

    @classmethod
    def from_heads(cls, keys: list[Tensor], values: list[Tensor], biases: list[Tensor] | None = None) -> LayerMemory:
        """A ragged layer from one [n_h, d] tensor per head; biases default to zero."""
        lengths = tuple(key.shape[0] for key in keys)
        if biases is None:
            biases = [torch.zeros(n, device=keys[0].device) for n in lengths]
            return cls(torch.cat(keys), torch.cat(values), torch.cat(biases), lengths, unbiased=True)
        return cls(torch.cat(keys), torch.cat(values), torch.cat(biases).float(), lengths)

    @property
    def num_heads(self) -> int:
        return len(self.lengths)

    @property
    def requires_grad(self) -> bool:
        """Whether any part of it trains."""
        return any(part.requires_grad for part in (self.keys, self.values, self.biases))

    @property
    def total(self) -> int:
        """Entries kept over all heads."""
        return self.offsets[-1]

    @property
    def is_uniform(self) -> bool:
        """Whether every head keeps the same, non-zero number of entries."""
        return self.lengths[0] > 0 and len(set(self.lengths)) == 1

    @cached_property
    def head_bias(self) -> Tensor:
        """Biases as a mask over the layer's flat entries, [1, H, 1, total] fp32: a head sees its own slice only."""
        owner = torch.repeat_interleave(torch.arange(self.num_heads), torch.tensor(self.lengths))
        own = owner == torch.arange(self.num_heads).unsqueeze(-1)
        hidden = torch.finfo(torch.float32).min
        return torch.where(own.to(self.biases.device), self.biases, hidden).view(1, self.num_heads, 1, -1)

    def heads(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Views of (keys [n_h, d], values [n_h, value_dim], biases [n_h] or None where all are zero) per head."""
        for start, end in zip(self.offsets, self.offsets[1:], strict=False):
            yield self.keys[start:end], self.values[start:end], None if self.unbiased else self.biases[start:end]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LayerMemory:
        """The same layer on another device or with keys and values of another dtype; biases stay fp32."""
        keys, values = self.keys.to(device, dtype), self.values.to(device, dtype)
        if keys is self.keys and values is self.values:
            return self
        return LayerMemory(keys, values, self.biases.to(device), self.lengths, self.unbiased)

    def num_bytes(self) -> int:
        """Bytes of storage held by the entries."""
        mask = self.__dict__.get("head_bias")  # cached once a short query has asked for it
        held = (self.keys, self.values, self.biases) if mask is None else (self.keys, self.values, self.biases, mask)
        return sum(tensor.untyped_storage().nbytes() for tensor in held)


@dataclass
class WindowMemory:
    """The last window of a sliding-window layer, kept as it is: keys and values [H, w, d], w < window."""

    keys: Tensor
    values: Tensor
    window: int

    def __post_init__(self) -> None:
        if self.keys.dim() != 3 or self.values.dim() != 3 or self.keys.shape[:2] != self.values.shape[:2]:
            raise ValueError(f"window keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} do not fit")
        if self.keys.shape[1] >= self.window:
            raise ValueError(f"a window of {self.window} cannot hold {self.keys.shape[1]} entries before a new token")

    @property
    def num_heads(self) -> int:
        return self.keys.shape[0]

    def behind(self, keys: Tensor, values: Tensor) -> WindowMemory:
        """What the window holds once keys and values [H, n, d] of later tokens have come."""
        keys, values = torch.cat([self.keys, keys], dim=1), torch.cat([self.values, values], dim=1)
        first = max(0, keys.shape[1] - (self.window - 1))
        return WindowMemory(keys[:, first:].clone(), values[:, first:].clone(), self.window)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> WindowMemory:
        """The same window on another device or in another dtype."""
        return WindowMemory(self.keys.to(device, dtype), self.values.to(device, dtype), self.window)

    def num_bytes(self) -> int:
        """Bytes of storage held by the window."""
        return sum(t.untyped_storage().nbytes() for t in (self.keys, self.values))
