"""How many bytes a state takes, from the configuration alone."""

from __future__ import annotations

from ttmem.errors import BudgetError
from ttmem.fast_weights.config import TTCDConfig


def state_bytes(config: TTCDConfig, batch: int = 1, itemsize: int = 2, tokens: int | None = None) -> int:
    """The most bytes that a state of `batch` rows takes, however long the text: a bound that long texts reach.

    itemsize: bytes of a number in the model's dtype. Accumulated dW and recurrent states are fp32, or fp64 for models
    in fp64. tokens: the length of the text; full attention keeps all of it, so there the length must be given. Raises
    BudgetError where it is not.
    """
    wide = max(4, itemsize)
    total = 0
    for layer in range(config.num_hidden_layers):
        rule = config.rule if layer in (config.fast_layers or ()) else "window"
        total += _layer_bytes(config, layer, rule, itemsize, wide, tokens)
    return batch * total


def _layer_bytes(config: TTCDConfig, layer: int, rule: str, item: int, wide: int, tokens: int | None) -> int:
    d, f = config.hidden_size, config.intermediate_size
    head = config.head_dim or d // config.num_attention_heads
    width = config.num_attention_heads * head
    if rule in ("deltanet", "gated_deltanet"):
        return config.num_attention_heads * head**2 * wide + (config.delta_kernel - 1) * 3 * width * item
    window = config.window_of(layer)
    if window is None and tokens is None:
        raise BudgetError(f"layer {layer} has full attention, whose state grows with the text: say for how many tokens")
    kept = min(x for x in (tokens, None if window is None else window - 1) if x is not None)
    total = 2 * (config.num_key_value_heads or config.num_attention_heads) * head * kept * item
    pending = config.chunk_size - 1
    if rule in ("ttcd", "in_place"):
        total += d * f * wide + pending * (d + f) * item
    if rule == "ttcd" and config.conv_kernel:
        total += 2 * (config.conv_kernel - 1) * f * item
    if rule == "lact":
        size = width // config.lact_heads
        total += 3 * config.lact_heads * size**2 * item + pending * (2 * width + 3 * config.lact_heads) * item
    return total
