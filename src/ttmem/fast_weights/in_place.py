"""In-Place TTT: the down-projection as fast weights, written with a convolution of the embeddings as the target."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.convolution import centred_convolution
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.state import LayerState
from ttmem.fast_weights.ttcd import read_memory
from ttmem.fast_weights.window import WindowLayer


class Target(nn.Module):
    """What In-Place TTT adds to a layer: a centred convolution [taps, d], and P [d, d]."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        d, taps = config.hidden_size, config.conv_kernel
        self.start = config.convolution_start
        self.conv = nn.Parameter(torch.empty(taps, d)) if taps else None
        self.projection = nn.Parameter(torch.empty(d, d)) if config.projection else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The convolution starts by handing over the next token, the target of a language model; in a pretrained model
        at zero, so that nothing is written. P is the identity."""
        if self.conv is not None:
            nn.init.zeros_(self.conv)
            if self.start == "scratch":
                nn.init.ones_(self.conv[min(self.conv.shape[0] // 2 + 1, self.conv.shape[0] - 1)])
        if self.projection is not None:
            nn.init.eye_(self.projection)


class InPlaceLayer(WindowLayer):
    """dW_i = eta sum_(t in C_i) (P Conv(x)_t) Z_t',  y_t = (W_down + sum_(j < i) dW_j) Z_t

    x: the token embeddings, or the layer's own normed hidden states. The convolution looks ahead within its chunk,
    which is read only after it is complete. So the state keeps x of the unfinished chunk, and what the chunk writes is
    computed at its end.
    """

    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.fast = Target(config)

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, state)
        h = self.post_attention_layernorm(hidden)
        Z = self.mlp.features(h)
        x = context.embeddings if self.config.target == "embedding" else h
        memory = read_memory(Z, Z, x, context, state, self.config, self._values)
        out = self.mlp.down_proj(Z)
        return hidden + (out if memory is None else out + memory)

    def _values(self, x: Tensor, layout: Layout) -> Tensor:
        """eta P Conv(x), [B, S, d], of the pending and the new tokens."""
        if self.fast.conv is not None:
            place, rest = chunk_places(layout, x.shape[1] - layout.tokens, self.config.chunk_size)
            x = centred_convolution(x, self.fast.conv.to(x.dtype), place, rest)
        if self.fast.projection is not None:
            x = linear(x, self.fast.projection)
        return self.config.fast_lr * x


def chunk_places(layout: Layout, held: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Of the pending and the new tokens, [B, held + T]: their places in their chunks, and the tokens left of them.

    A chunk ends early where the next document of a packed row begins; it is never read then, and its end is not asked.
    Pending tokens of the unfinished chunk are counted back from the first new token.
    """
    before = torch.arange(-held, 0, device=layout.device).unsqueeze(0) + layout.row_counts().unsqueeze(1)
    places = layout.places()
    rows = max(before.shape[0], places.shape[0])
    place = torch.cat([before.expand(rows, held), places.expand(rows, layout.tokens)], dim=1) % chunk
    return place, chunk - place
