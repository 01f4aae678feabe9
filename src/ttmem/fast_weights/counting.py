"""What a training would take, found without training: parameters, operations per token, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ttmem.fast_weights.modeling import TTCDForCausalLM
from ttmem.training.loop import TrainSettings
from ttmem.training.optimizers import moment_bytes

BACKWARD = 2
"""The backward pass of a matrix product is two products of the same size."""


def forward_flops(network: TTCDForCausalLM, tokens: int) -> int:
    """Operations of the matrix products of one forward over `tokens` tokens, as the code runs them.

    network: on the meta device, where only shapes are computed. A product of [m, k] and [k, n] counts as 2 m k n.
    Scores that are computed and masked count too. Of layers that are alike, one is run.
    """
    decoder, config = network.model, network.config
    layers = decoder.layers
    alike: dict[tuple[bool, int | None], list[int]] = {}
    for index in range(len(layers)):
        alike.setdefault((index in (config.fast_layers or ()), config.window_of(index)), []).append(index)
    try:
        rest = _flops_with(network, [], tokens)
        each = [(len(same), _flops_with(network, [layers[same[0]]], tokens) - rest) for same in alike.values()]
    finally:
        decoder.layers = layers
    return rest + sum(count * flops for count, flops in each)


@torch.no_grad()
def _flops_with(network: TTCDForCausalLM, layers: Sequence[nn.Module], tokens: int) -> int:
    network.model.layers = nn.ModuleList(layers)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(input_ids=ids, use_cache=False)
    return counter.get_total_flops()


def training_plan(network: TTCDForCausalLM, settings: TrainSettings, length: int, batch: int) -> dict[str, Any]:
    """Sizes and costs of training `network` (on the meta device) on sequences of `length` tokens, `batch` in a step.

    Bytes are those of one process that keeps everything, with parameters in fp32; activations come on top. With fsdp,
    each of N processes keeps an N-th. Gradient checkpointing adds a forward.
    """
    parameters: dict[str, nn.Parameter] = dict(network.named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    tokens = settings.steps * length * batch
    per_token = forward_flops(network, length) / length
    return {
        "parameters": count,
        "embedding_parameters": network.get_input_embeddings().weight.numel(),
        "fast_parameters": sum(p.numel() for name, p in parameters.items() if ".fast." in name),
        "steps": settings.steps,
        "tokens_per_step": length * batch,
        "tokens": tokens,
        "forward_flops_per_token": per_token,
        "training_flops_per_token": (1 + BACKWARD) * per_token,
        "training_flops": (1 + BACKWARD) * per_token * tokens,
        "bytes": {
            "parameters": 4 * count,
            "gradients": 4 * count,
            "optimizer": moment_bytes(settings.optimizer, parameters),
        },
    }
