"""One layer's attention: projections, summaries of the chunks that have become complete, and the attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ttmem.block_sparse.attention import Streams, block_sparse_attention, sliding_attention
from ttmem.block_sparse.cache import BlockSparseCache, BlockSparseLayer, merge_summaries
from ttmem.block_sparse.chunks import chunk_slots, complete, take_slots
from ttmem.block_sparse.compressors import ChunkCompressor
from ttmem.block_sparse.configuration import BlockSparseConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 inside; in the dtype of x, also under autocast."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class BlockSparseAttention(nn.Module):
    """Attention over a window and selected chunks, or one of the references (`config.attention`)."""

    def __init__(self, config: BlockSparseConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)
        if config.attention == "block_sparse":
            keys = config.compressor_input == "keys"
            self.score_down = nn.Linear(width, config.query_rank, bias=False)
            self.score_up = nn.Linear(config.query_rank, config.num_attention_heads * dim, bias=False)
            self.score_norm = RMSNorm(dim, config.rms_norm_eps)
            self.compressor = ChunkCompressor(
                config.compressor,
                config.num_key_value_heads if keys else 1,
                dim if keys else width,
                config.chunk_size,
                config.summary_bias == "entropy",
                width if config.attention_query == "mark" else None,
                config.compressor_settings,
            )

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Callable[[Tensor], Tensor],
        starts: Tensor | None = None,
        cache: BlockSparseCache | None = None,
    ) -> Tensor:
        """x = norm(residual) [B, Q, hidden], the tokens behind those in the cache -> [B, Q, hidden]."""
        query, keys, values = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if cache is not None:
            keys, values = cache.update(keys, values, self.index)
        if self.config.attention == "full":
            output = self._full(query, keys, values, starts)
        elif self.config.attention == "sliding":
            near, far = self._near(query, keys)
            offset = keys.shape[2] - near
            query, keys = self._rotate(query, starts, far), self._rotate(keys[:, :, offset:], starts, far)
            near_starts = (0 if starts is None else starts) - offset
            output = sliding_attention(query, keys, values[:, :, offset:], self.config.sparsity, near_starts)
        else:
            layer = None if cache is None else cache.layers[self.index]
            streams = self.streams(x, residual, norm, query, keys, values, starts, layer)
            output = block_sparse_attention(streams, self.config.sparsity)
        return self.o_proj(output.to(x.dtype).transpose(1, 2).flatten(2))

    def streams(
        self,
        x: Tensor,
        residual: Tensor,
        norm: Callable[[Tensor], Tensor],
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor | None,
        layer: BlockSparseLayer | None,
    ) -> Streams:
        """What the attention gets: query [B, Hq, Q, d], keys and values [B, H, N, d], all without rotary positions."""
        near, N = self._near(query, keys)
        rotated = self._rotate(query, starts, N)
        near_keys = self._rotate(keys[:, :, N - near :], starts, N)
        scoring = self.score_norm(query + self._heads(self.score_up(self.score_down(x))))
        far_query, far_keys = query, keys
        if self.config.chunk_rotary:
            far_query, far_keys = rotated, self._rotate(keys, starts, N)
            if self.config.compressor_input == "keys":
                scoring = self._rotate(scoring, starts, N)
        tokens = self._tokens(x, residual, far_keys, layer)
        summaries, biases = self._summaries(tokens, x, N, norm, starts, layer)
        return Streams(
            rotated,
            near_keys,
            values[:, :, N - near :],
            far_query,
            far_keys,
            values,
            scoring,
            summaries,
            biases,
            starts,
        )

    def _tokens(self, x: Tensor, residual: Tensor, keys: Tensor, layer: BlockSparseLayer | None) -> Tensor:
        """What is compressed, of as many of the last slots as chunks may need: [B, streams, n, width]."""
        if self.config.compressor_input == "keys":
            return keys
        tokens = (x if self.config.compressor_input == "hidden" else residual).unsqueeze(1)
        if layer is not None:
            if layer.tail is not None:
                tokens = torch.cat([layer.tail, tokens], dim=2)
            layer.tail = tokens[:, :, max(0, tokens.shape[2] - self.config.chunk_size + 1) :].clone()
        return tokens

    def _summaries(
        self,
        tokens: Tensor,
        x: Tensor,
        length: int,
        norm: Callable[[Tensor], Tensor],
        starts: Tensor | None,
        layer: BlockSparseLayer | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Summaries and biases of all complete chunks; only those are computed that the cache has not."""
        chunk, before = self.config.chunk_size, length - x.shape[1]
        done, now = complete(before, starts, chunk), complete(length, starts, chunk)
        fresh = int(torch.as_tensor(now - done).max())
        if fresh == 0:
            if layer is not None and layer.summaries is not None:
                return layer.summaries, layer.biases
            return x.new_zeros(x.shape[0], self.config.num_key_value_heads, 0, self.config.head_dim), None
        first = torch.as_tensor(done, device=x.device).view(-1, 1, 1)
        numbers = (first + torch.arange(fresh, device=x.device)).expand(x.shape[0], 1, -1)
        slots = chunk_slots(numbers, starts, chunk)
        if isinstance(done, int):
            begin = done * chunk - (length - tokens.shape[2])
            blocks = tokens[:, :, begin : begin + fresh * chunk].unflatten(2, (fresh, chunk))
        else:
            blocks = take_slots(tokens, slots - (length - tokens.shape[2]))
        marks = take_slots(x.unsqueeze(1), slots[..., -1] - before)[:, 0]
        summaries, biases = self.summarise(blocks, marks, norm)
        if layer is None:
            return summaries, biases
        if biases is not None:
            layer.biases = merge_summaries(layer.biases, biases, done)
        layer.summaries = merge_summaries(layer.summaries, summaries, done)
        return layer.summaries, layer.biases

    def summarise(
        self, blocks: Tensor, marks: Tensor, norm: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Chunks [B, streams, C, S, width], marks [B, C, hidden] -> k' [B, H, C, d] and b' [B, H, C] or None."""
        vectors, biases = self.compressor(blocks, marks)
        if self.config.compressor_input == "keys":
            return vectors, biases
        vectors = vectors[:, 0]
        if self.config.compressor_input == "residual":
            vectors = norm(vectors)
        return self._heads(self.k_proj(vectors)), self._for_heads(biases)

    def _for_heads(self, biases: Tensor | None) -> Tensor | None:
        return None if biases is None else biases.expand(-1, self.config.num_key_value_heads, -1)

    def _full(self, query: Tensor, keys: Tensor, values: Tensor, starts: Tensor | None) -> Tensor:
        Q, N = query.shape[2], keys.shape[2]
        query, keys = self._rotate(query, starts, N), self._rotate(keys, starts, N)
        mask = None
        if starts is not None or Q != N:
            slot = torch.arange(N, device=query.device)
            own = slot[N - Q :].unsqueeze(1)
            seen = slot <= own
            if starts is not None:
                seen = (seen & (slot >= starts.view(-1, 1, 1))) | (slot == own)
            mask = seen.view(-1, 1, Q, N)
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )

    def _near(self, query: Tensor, keys: Tensor) -> tuple[int, int]:
        """Of how many of the last slots a window may need the keys, and of how many there are."""
        N = keys.shape[2]
        return min(N, query.shape[2] + self.config.sparsity.reach - 1), N

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads d] -> [B, heads, L, d]."""
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, starts: Tensor | None, length: int) -> Tensor:
        """x [B, H, n, d] of the last n of `length` slots, turned by its positions."""
        slots = torch.arange(length - x.shape[2], length, device=x.device).unsqueeze(0)
        return rotate(x, slots if starts is None else slots - starts.unsqueeze(1), self.config.rope_theta)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (Su et al., 2021): x [B, H, n, d], positions [B or 1, n]; channel i turns with i + d / 2."""
    half = x.shape[-1] // 2
    rates = theta ** -(torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.unsqueeze(1).unsqueeze(-1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
