"""YaRN: positions beyond those a model was trained on, by transformers' own rotary settings."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ttmem.errors import BudgetError, ModelError


def yarn_parameters(config: PreTrainedConfig, factor: float) -> dict[str, Any]:
    """What `rope_parameters` of a configuration is to be, so that its positions reach `factor` times as far.

    Raises ModelError where its positions are none that YaRN can stretch, BudgetError for a factor of 1 or less.
    """
    own = getattr(config, "rope_parameters", None) or {}
    if not 1.0 < factor < math.inf:
        raise BudgetError(f"the YaRN factor is {factor}; it must be a finite number above 1")
    if own.get("rope_type") != "default" or "rope_theta" not in own:
        raise ModelError(
            f"the positions of a {config.model_type} model with rope_parameters {own or None} cannot be stretched by "
            "YaRN: it is for plain rotary positions, the same in all layers"
        )
    return {
        **own,
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def apply_yarn(network: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Stretch a decoder's positions by YaRN, in place, in its configuration and in its rotary embedding.

    The result is what transformers builds from a configuration with these `rope_parameters`, and is saved as such. For
    models of the Llama family, with fast weights or without. Raises ModelError, BudgetError as `yarn_parameters` does.
    """
    config, decoder = network.config, network.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    parameters = yarn_parameters(config, factor)
    if rotary is None:
        raise ModelError(f"{type(network).__name__} keeps its rotary embedding elsewhere than Llama does")
    config.max_position_embeddings = int(factor * config.max_position_embeddings)
    config.rope_parameters = parameters
    decoder.rotary_emb = type(rotary)(config).to(rotary.inv_freq.device)
    return network
