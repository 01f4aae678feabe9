"""What a training would take, found without training: parameters, operations per token, bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ttmem.training.loop import TrainSettings
from ttmem.training.optimizers import moment_bytes

BACKWARD = 2
"""The backward pass of a matrix product is two products of the same size."""


@torch.no_grad()
def forward_flops(network: PreTrainedModel, tokens: int) -> int:
    """Operations of the matrix products of one forward over `tokens` tokens, as the code runs them.

    network: on the meta device, where only shapes are computed. A product of [m, k] and [k, n] counts as 2 m k n.
    Scores that are computed and masked count too.
    """
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(input_ids=ids, use_cache=False)
    return counter.get_total_flops()


def training_plan(network: PreTrainedModel, settings: TrainSettings, length: int, batch: int) -> dict[str, Any]:
    """Sizes and costs of training `network` (on the meta device) on sequences of `length` tokens, `batch` in a step.

    Bytes are those of one process that keeps everything, with parameters in fp32; activations come on top. With fsdp,
    each of N processes keeps an N-th. Gradient checkpointing adds a forward.
    """
    parameters: dict[str, nn.Parameter] = dict(network.named_parameters())
    embedding = network.get_input_embeddings().weight.numel()
    count = sum(parameter.numel() for parameter in parameters.values())
    tokens = settings.steps * length * batch
    per_token = forward_flops(network, length) / length
    return {
        "parameters": count,
        "embedding_parameters": embedding,
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
