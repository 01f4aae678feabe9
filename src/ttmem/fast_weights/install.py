"""`install`: fast weights in a pretrained model of the Llama family, which computes as before until it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ttmem.errors import BudgetError, ModelError
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.modeling import TTCDForCausalLM

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
COPIED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
          "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings",
          "rope_parameters")  # fmt: skip
RULES = ("ttcd", "in_place", "window")
DEFAULTS = {
    "dual_engine": "plain", "normalize_keys": False, "convolved_reads": False, "convolution_start": "pretrained",
}  # fmt: skip
"""Where continual pre-training differs from training from scratch."""
FROM_THE_MODEL = ("qk_norm", "qkv_bias", "output_bias")


def install(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    *,
    teacher_window: int | Literal["own"] | None = "own",
    windows: int | list[int | None] | Literal["own"] | None = "own",
    student_window: int = 2048,
    chunk_size: int = 2048,
    rule: str = "ttcd",
    **settings: Any,
) -> TTCDForCausalLM:
    """Put fast weights into `layers` of a pretrained Llama, SmolLM2, Qwen2, Qwen3 or Mistral model.

    layers: by default four, evenly spread from layer 0; also taken under the name that `TTCDConfig` has for them,
    fast_layers. teacher_window: "own" is the window that the model has in these
    layers, full attention for most; None is full attention. windows: of the other layers, their own by default.
    `settings` are the other fields of `TTCDConfig`; where the paper's continual pre-training differs from training from
    scratch, its choice is the default here: keys are not normalised, the fast weights read Z_T, conv_T copies and
    conv_S is zero. dual_engine is "plain", with which the result can equal the model bit for bit; "fused" trains faster
    and equals it up to rounding.

    The result takes over the model's modules without copying a weight, so use it in the model's place. With the model's
    own windows, and the convolutions left in, it computes before training what the model does, bit for bit.

    rule: "ttcd", "in_place" (whose convolution then starts at zero), or "window" for the baseline that has no fast
    weights, but `windows`. Raises ModelError for other models and rules, BudgetError for settings outside their range.
    """
    base = model.config
    if base.model_type not in FAMILIES or not hasattr(model, "lm_head"):
        raise ModelError(
            f"cannot install fast weights in {type(model).__name__}: only causal language models of "
            f"{', '.join(FAMILIES)} have the layers they are made for"
        )
    if rule not in RULES:
        raise ModelError(f"the rule {rule!r} cannot be installed in a pretrained model; {', '.join(RULES)} can")
    layers = _checked(settings, layers)
    attention, own_windows = model.model.layers[0].self_attn, _windows(model)
    config = TTCDConfig(
        **{name: getattr(base, name) for name in COPIED},
        head_dim=attention.head_dim,
        mlp_bias=model.model.layers[0].mlp.down_proj.bias is not None,
        qk_norm=hasattr(attention, "q_norm"),
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        windows=own_windows if windows == "own" else windows,
        rule=rule,
        fast_layers=layers,
        teacher_window=None if teacher_window == "own" else teacher_window,
        student_window=student_window,
        chunk_size=chunk_size,
        **{**DEFAULTS, **settings},
    )
    config.check()
    if teacher_window == "own":
        own = {own_windows[layer] for layer in config.fast_layers or () if 0 <= layer < len(own_windows)}
        if len(own) > 1:
            raise BudgetError(f"layers {config.fast_layers} have different windows ({own}): name a teacher_window")
        config.teacher_window = own.pop() if own else None
    config.dtype = model.dtype
    config._name_or_path = base._name_or_path
    with torch.device("meta"):
        installed = TTCDForCausalLM(config)
    _take(installed, model)
    for index in config.fast_layers or ():
        layer: Any = installed.model.layers[index]
        layer.fast.to_empty(device=layer.mlp.down_proj.weight.device).to(model.dtype)
        layer.fast.reset_parameters()
    installed.generation_config = model.generation_config
    return installed.train(model.training)


def _checked(settings: dict[str, Any], layers: Sequence[int] | None) -> Any:
    """The fast layers, as a list where they are any. Raises BudgetError for a setting that there is not."""
    if "fast_layers" in settings:
        if layers is not None:
            raise BudgetError("layers and fast_layers are two names of one setting: give one of them")
        layers = settings.pop("fast_layers")
    known = [name for name in TTCDConfig.__annotations__ if name not in (*FROM_THE_MODEL, "model_type")]
    for name in settings:
        if name not in known:
            raise BudgetError(f"{name!r} is no setting of fast weights; there are {', '.join(known)}")
    return list(layers) if isinstance(layers, (tuple, range)) else layers


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Each layer's attention window."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    if window is not None and not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _take(mine: nn.Module, theirs: nn.Module) -> None:
    """Take over every module of `theirs` that has no parts, in its place in `mine`."""
    for name, child in theirs.named_children():
        if list(child.children()):
            _take(getattr(mine, name), child)
        else:
            setattr(mine, name, child)
