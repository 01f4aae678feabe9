"""First values of ttmem's own layers inside transformers' models."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def reset_missing(module: nn.Module) -> None:
    """`module.reset_parameters()`, where there is one, but for what a checkpoint has brought.

    transformers asks for first values of every layer of which a checkpoint lacks something, and marks what it has
    loaded. Without this a layer that is new to a checkpoint would hold what lay in memory before.
    """
    reset = getattr(module, "reset_parameters", None)
    if reset is None or not type(module).__module__.startswith("ttmem."):
        return
    loaded = [(p, p.clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
    reset()
    for parameter, value in loaded:
        parameter.copy_(value)
