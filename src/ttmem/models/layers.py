"""What compaction needs to know of a model's layers, and the refusal of models that cannot carry a memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ttmem.errors import ModelError

OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense", "wo")


@dataclass
class AttentionLayer:
    """One decoder layer's attention: its module, its output projection, and its window (None: global attention)."""

    index: int
    module: nn.Module
    window: int | None
    num_heads: int
    num_kv_heads: int

    def output_weight(self) -> Tensor:
        """The output projection by query head: [num_heads, value_dim, hidden]; head h adds `v @ weight[h]`."""
        weight = output_projection(self.module).weight.detach()
        return weight.view(weight.shape[0], self.num_heads, -1).permute(1, 2, 0)


def output_projection(attention: nn.Module) -> nn.Linear:
    """W_O of an attention module, by the names transformers gives it."""
    for name in OUTPUT_PROJECTIONS:
        projection = getattr(attention, name, None)
        if isinstance(projection, nn.Linear):
            return projection
    raise ModelError(
        f"{type(attention).__name__} has no output projection named one of {', '.join(OUTPUT_PROJECTIONS)}"
    )


def describe_layers(network: PreTrainedModel) -> list[AttentionLayer]:
    """The attention layers of a decoder, in order. Raises ModelError, naming the architecture that cannot work."""
    architecture = type(network).__name__
    config = network.config.get_text_config(decoder=True)
    if getattr(network, "keeps_fast_weights", False):
        raise ModelError(f"{architecture} keeps what it reads in fast weights: use `ttmem read` instead of compacting")
    if network.config.is_encoder_decoder:
        raise ModelError(f"{architecture} is an encoder-decoder; ttmem compacts the cache of decoder-only models")
    if not getattr(network, "_supports_sdpa", False):
        raise ModelError(f"{architecture} does not support 'sdpa' attention, through which ttmem reaches the cache")
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(f"{architecture} caps its attention scores, which 'sdpa' attention leaves out")
    modules = _attention_modules(network)
    cache = DynamicCache(config=config)
    windows: list[int | None] = [None] * config.num_hidden_layers
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer) and type(layer) is DynamicSlidingWindowLayer:
            windows[index] = layer.sliding_window
        elif type(layer) is not DynamicLayer:
            raise ModelError(
                f"{architecture}: layer {index} keeps a {type(layer).__name__}, not keys and values; ttmem compacts "
                "global attention and keeps sliding windows, nothing else"
            )
    if sorted(modules) != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"{architecture}: found attention modules with an output projection for layers {sorted(modules)}, expected "
            f"0 to {config.num_hidden_layers - 1}"
        )
    if all(window is not None for window in windows):
        raise ModelError(
            f"{architecture}: every layer attends to a window of {max(w for w in windows if w)} tokens, so there is no "
            "long cache to compact"
        )
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return [AttentionLayer(i, modules[i], windows[i], num_heads, num_kv_heads) for i in range(config.num_hidden_layers)]


def _attention_modules(network: PreTrainedModel) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    for module in network.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and any(
            isinstance(getattr(module, name, None), nn.Linear) for name in OUTPUT_PROJECTIONS
        ):
            found[index] = module
    return found


@torch.no_grad()
def verify_attention(network: PreTrainedModel) -> None:
    """Run a few tokens behind a full memory and compare with the plain model; raise ModelError when they differ.

    This catches by measurement what no configuration key tells reliably: attention sinks, score caps, latents in the
    cache, positions that live outside the keys.
    """
    from ttmem.compaction.prefill import full_memory_layers
    from ttmem.memory.memory import Memory, MemoryInfo

    architecture = type(network).__name__
    length, cut = 12, 7
    vocabulary = network.get_input_embeddings().num_embeddings
    ids = (torch.arange(length, device=network.device) * 37 + 11).remainder(vocabulary).unsqueeze(0)
    expected = network(input_ids=ids, use_cache=False).logits[0, cut:].float()
    try:
        layers = full_memory_layers(network, ids[:, :cut], chunk=cut)
        memory = Memory(layers, cut, MemoryInfo("full", {}, {}, {}))
        mask = torch.ones_like(ids)
        found = (
            network(input_ids=ids[:, cut:], attention_mask=mask, **{cache_keyword(network): memory.cache()})
            .logits[0]
            .float()
        )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{architecture} cannot run behind a memory: {type(error).__name__}: {error}") from error
    tolerance = 1e-3 if network.dtype == torch.float32 else 0.1
    difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
    if not difference <= tolerance:
        raise ModelError(
            f"{architecture} does not compute plain softmax attention over its cache: its logits behind a full memory "
            f"differ by {difference:.2g} (relative) from its own"
        )


def cache_keyword(network: PreTrainedModel) -> str:
    """The name under which this model's forward takes its cache: renamed to `cache` in transformers 5.24."""
    import inspect

    if hasattr(network, "cache_keyword"):  # our own models take both names, and `generate` only one
        return str(network.cache_keyword)
    parameters = inspect.signature(network.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
