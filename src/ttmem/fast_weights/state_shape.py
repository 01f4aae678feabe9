"""What a model's state looks like, the tensors of each layer and their shapes, so that a file of others is refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.state import WIDE, FastWeightCache

WIDE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """A tensor of a layer: its shape behind the rows, with None where tokens are counted, `least` to `most` of them.

    needed: it is there as soon as anything is read.
    """

    shape: tuple[int | None, ...]
    least: int = 0
    most: int = 0
    needed: bool = True

    def fits(self, tensor: Tensor, rows: int) -> bool:
        if tensor.dim() != 1 + len(self.shape) or tensor.shape[0] != rows:
            return False
        pairs = zip(self.shape, tensor.shape[1:], strict=True)
        return all(self.least <= size <= self.most if wanted is None else size == wanted for wanted, size in pairs)


def check_shape(state: FastWeightCache, config: TTCDConfig) -> None:
    """Raise ValueError unless the state has the tensors that a model of this configuration keeps."""
    if len(state.layers) != config.num_hidden_layers:
        raise ValueError(f"it has {len(state.layers)} layers, and the model has {config.num_hidden_layers}")
    counts = state.counts.tolist() if isinstance(state.counts, Tensor) else [state.counts]
    rows = state.batch
    if rows is None and not state.seen:
        return
    for index, layer in enumerate(state.layers):
        parts = layer_parts(config, index, state.seen, counts)
        missing = {name for name, part in parts.items() if part.needed} - set(layer.tensors)
        if missing or not set(layer.tensors) <= set(parts):
            has, needs = (", ".join(sorted(names)) or "nothing" for names in (layer.tensors, parts))
            raise ValueError(f"layer {index} has {has}, and needs {needs}")
        for name, tensor in layer.tensors.items():
            if not parts[name].fits(tensor, rows or 0):
                raise ValueError(f"layers.{index}.{name} has the shape {tuple(tensor.shape)}")
            if not tensor.is_floating_point() or (name in WIDE and tensor.dtype not in WIDE_DTYPES):
                raise ValueError(f"layers.{index}.{name} is of {tensor.dtype}")


def layer_parts(config: TTCDConfig, layer: int, seen: int, counts: list[int]) -> dict[str, Part]:
    """The tensors by name. seen, counts: of the state; rows may keep more than their own documents need."""
    rule = config.rule if layer in (config.fast_layers or ()) else "window"
    d, f, C, longest = config.hidden_size, config.intermediate_size, config.chunk_size, max(counts)
    heads, head = config.num_attention_heads, config.head_dim or d // config.num_attention_heads
    if rule in ("deltanet", "gated_deltanet"):
        taps = config.delta_kernel - 1
        tail = Part((None, 3 * heads * head), min(taps, longest), min(taps, seen))
        return {"recurrent": Part((heads, head, head)), "tail": tail}
    window = config.window_of(layer)
    reach = seen if window is None else min(seen, window - 1)
    kept = Part((config.num_key_value_heads or heads, None, head), min(reach, longest), reach)
    parts = {"keys": kept, "values": kept}
    unfinished = max(count % C for count in counts)

    def pending(*shape: int) -> Part:
        return Part((None, *shape), unfinished, C - 1)

    if rule in ("ttcd", "in_place"):
        parts["memory"] = Part((d, f), needed=longest >= C)
        parts |= {"pending_keys": pending(f), "pending_values": pending(d)}
    if rule == "ttcd" and config.conv_kernel:
        taps = config.conv_kernel - 1
        tail = Part((None, f), min(taps, unfinished), min(taps, seen))
        parts |= {"tail_teacher": tail, "tail_student": tail}
    if rule == "lact":
        size = heads * head // config.lact_heads
        square = Part((config.lact_heads, size, size))
        parts |= {"w1": square, "w2": square, "w3": square, "pending_rates": pending(config.lact_heads, 3)}
        parts |= {"pending_k": pending(config.lact_heads, size), "pending_v": pending(config.lact_heads, size)}
    return parts
