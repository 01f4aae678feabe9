"""The update rules by name: each is a decoder layer with one interface, (hidden, context, state) -> hidden."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.deltanet import DeltaLayer
from ttmem.fast_weights.in_place import InPlaceLayer
from ttmem.fast_weights.lact import LaCTLayer
from ttmem.fast_weights.state import LayerState
from ttmem.fast_weights.ttcd import TTCDLayer
from ttmem.fast_weights.window import WindowLayer

LAYERS: dict[str, type[nn.Module]] = {
    "ttcd": TTCDLayer,
    "in_place": InPlaceLayer,
    "lact": LaCTLayer,
    "deltanet": DeltaLayer,
    "gated_deltanet": DeltaLayer,
}
UNPACKED = ("lact", "deltanet", "gated_deltanet")
"""Rules that take one document per row; packed rows are taken apart for them."""


class FastLayer(Protocol):
    """What a rule has to be."""

    def forward(self, hidden: Tensor, context: Context, state: LayerState | None = None) -> Tensor:
        """hidden [B, T, d] -> [B, T, d], rows with their tokens at the front. Must not look ahead.

        state: what the layer has kept of the tokens before, changed in place; None where nothing is to be kept.
        """
        ...


def make_layer(config: TTCDConfig, layer: int) -> nn.Module:
    """The decoder layer at an index: that of the rule where `fast_layers` has it, else plain attention."""
    kind = LAYERS[config.rule] if layer in (config.fast_layers or ()) else WindowLayer
    return kind(config, layer)
