"""Keys at other positions: what a model's rotary embedding does to them, found out and checked by measurement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ttmem.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary variants whose rates change with the length of the text: cached keys cannot be moved."""
PROBE_TOKENS, PROBE_SHIFT = 12, 37


def rotate(keys: Tensor, shift: int, rates: Tensor | None) -> Tensor:
    """Keys [..., d] moved by `shift` positions, in fp32 inside.

    rates [r]: radians per position of the pairs (i, r + i) of the first 2 r channels; None: keys have no positions.
    """
    if rates is None or shift == 0:
        return keys
    angles = shift * rates.double()
    cos, sin = angles.cos().float(), angles.sin().float()
    half = rates.shape[0]
    first, second, rest = keys.float().split([half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).to(keys.dtype)


def rotary_rates(network: PreTrainedModel) -> list[Tensor | None]:
    """For each layer, the rates with which its keys turn, None for a layer without positions.

    Each layer's keys of a few tokens are computed at two places, and the rates of the model that take the one to the
    other are chosen. Raises ModelError where none do, or where rates depend on the text's length.
    """
    from ttmem.compaction.prefill import full_memory_layers

    name = type(network).__name__
    kinds = set(_rope_types(network.config.get_text_config(decoder=True)))
    if kinds & set(LENGTH_DEPENDENT):
        raise ModelError(f"{name} turns keys at rates that depend on the length ({', '.join(sorted(kinds))})")
    vocabulary = network.get_input_embeddings().num_embeddings
    ids = (torch.arange(PROBE_TOKENS, device=network.device) * 37 + 11).remainder(vocabulary).unsqueeze(0)
    near, far = (full_memory_layers(network, ids, start=start) for start in (0, PROBE_SHIFT))
    candidates = [None, *_all_rates(network)]
    tolerance = 1e-3 if network.dtype == torch.float32 else 0.1
    chosen: list[Tensor | None] = []
    for index, (here, there) in enumerate(zip(near, far, strict=True)):
        size = there.keys.float().abs().max().clamp_min(1.0)
        errors = [
            (rotate(here.keys, PROBE_SHIFT, rates) - there.keys).float().abs().max() / size for rates in candidates
        ]
        best = min(range(len(candidates)), key=errors.__getitem__)
        if not errors[best] <= tolerance:
            raise ModelError(
                f"{name}: keys of layer {index} at another position are not what its rotary embedding makes of them "
                f"(relative difference {errors[best]:.2g}), so they cannot be moved"
            )
        chosen.append(candidates[best])
    return chosen


def _all_rates(network: PreTrainedModel) -> list[Tensor]:
    """The distinct tables of rates that the model holds."""
    found: list[Tensor] = []
    for buffer_name, buffer in network.named_buffers():
        last = buffer_name.rpartition(".")[2]
        if not last.endswith("inv_freq") or "original" in last or buffer.dim() != 1:
            continue
        if not any(buffer.shape == other.shape and torch.equal(buffer, other) for other in found):
            found.append(buffer)
    return found


def _rope_types(config: object) -> Sequence[str]:
    """The kinds of rotary embedding a configuration names, one or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [table["rope_type"] for table in tables if "rope_type" in table]
