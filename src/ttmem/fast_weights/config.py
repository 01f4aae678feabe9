"""`TTCDConfig`: a decoder of the Llama family, of which some layers carry a fast-weight rule."""

from __future__ import annotations

import math
from typing import Any

from transformers import LlamaConfig

from ttmem.checks import is_count, is_number
from ttmem.errors import BudgetError

IN_PLACE_RULES = ("ttcd", "in_place")
RULES = (*IN_PLACE_RULES, "lact", "deltanet", "gated_deltanet", "window")
NUM_FAST_LAYERS = 4
"""In-place rules sit in this many layers, evenly spread from layer 0, unless `fast_layers` says otherwise."""

SWITCHES = ("qk_norm", "qkv_bias", "output_bias", "projection", "normalize_keys", "token_rates", "convolved_reads",
            "stop_gradient", "lact_muon")  # fmt: skip
CHOICES = {
    "rule": RULES,
    "dual_engine": ("fused", "plain"),
    "scan": ("exclusive", "inclusive"),
    "convolution_start": ("scratch", "pretrained"),
    "target": ("embedding", "hidden"),
    "delta_engine": ("plain", "fla"),
}
LEAST = {"chunk_size": 1, "student_window": 1, "conv_kernel": 0, "delta_kernel": 1, "lact_heads": 1}
MAX_RATE = 100.0
"""Of LaCT, whose parameter is the rate before a softplus."""


class TTCDConfig(LlamaConfig):
    """Configuration of `TTCDForCausalLM`. What is not named here is as in `LlamaConfig`, but for `attention_bias`.

    qk_norm: RMS norm of each head's queries and keys before the rotation (Qwen3).
    qkv_bias, output_bias: biases of the attention's projections (Qwen2 has the first), in place of `attention_bias`.
    windows: attention windows of the layers without a rule, in keys including the token itself; one for all, or one
    per layer; None: full attention.

    rule: "ttcd", "in_place", "lact", "deltanet", "gated_deltanet", or "window" for plain attention.
    fast_layers: which layers carry it. By default 4 evenly spread ones for the in-place rules, all for the others.
    teacher_window: of the attention in those layers (None: full). student_window: TTCD's student, smaller.
    chunk_size: tokens C after which the fast weights change. fast_lr: eta.
    dual_engine: how TTCD attends through both windows: "fused" shares the work between them
    (`ttmem.attention.dual_window`), "plain" makes two passes with torch's attention.

    TTCD: conv_kernel (taps of both convolutions, 0 for none), projection (P), normalize_keys, token_rates (beta),
    convolved_reads (the fast weights read conv_T(Z_T) rather than Z_T), stop_gradient (of the teacher's output), scan
    ("exclusive", or "inclusive" as eq. 13 prints it, which leaks the future), convolution_start ("scratch": conv_T zero
    and conv_S random; "pretrained": conv_T copies and conv_S is zero, so that nothing is written at first).
    In-Place TTT: target ("embedding" or "hidden"), conv_kernel and projection as above, the convolution centred.
    LaCT: lact_heads, lact_muon, lact_lr. DeltaNet: delta_kernel (taps of the convolutions of q, k and v), delta_engine
    ("plain", or "fla" for flash-linear-attention on a GPU).

    Raises BudgetError for a value of another type or outside its range, when a model is built from it.
    """

    model_type = "ttcd"

    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    windows: int | list[int | None] | None = 2048

    rule: str = "ttcd"
    fast_layers: list[int] | None = None
    teacher_window: int | None = 2048
    student_window: int = 1024
    chunk_size: int = 1024
    fast_lr: float = 0.3
    dual_engine: str = "fused"

    conv_kernel: int = 5
    projection: bool = True
    normalize_keys: bool = True
    token_rates: bool = True
    convolved_reads: bool = True
    stop_gradient: bool = False
    scan: str = "exclusive"
    convolution_start: str = "scratch"

    target: str = "embedding"

    lact_heads: int = 4
    lact_muon: bool = False
    lact_lr: float = 0.01

    delta_kernel: int = 4
    delta_engine: str = "plain"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.fast_layers is None and self.rule in RULES:
            layers = self.num_hidden_layers
            many = min(NUM_FAST_LAYERS, layers) if self.rule in IN_PLACE_RULES else layers
            self.fast_layers = [] if self.rule == "window" else [layers * i // many for i in range(many)]
        super().__post_init__(**kwargs)

    def window_of(self, layer: int) -> int | None:
        """The attention window of a layer: the teacher's where it carries a rule."""
        if layer in (self.fast_layers or ()):
            return self.teacher_window
        return self.windows[layer] if isinstance(self.windows, list) else self.windows

    def fast_settings(self) -> dict[str, Any]:
        """What the fast weights depend on beside the parameters; a state file records it."""
        names = ("rule", "fast_layers", "windows", "teacher_window", "student_window", "chunk_size", "fast_lr",
                 "conv_kernel", "projection", "normalize_keys", "token_rates", "convolved_reads", "scan", "target",
                 "lact_heads", "lact_muon", "lact_lr", "delta_kernel")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raise BudgetError for the first value that is not of its type, or outside its range."""
        for name in SWITCHES:
            self._require(type(getattr(self, name)) is bool, name, "True or False")
        for name, choices in CHOICES.items():
            self._require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")
        for name, least in LEAST.items():
            self._require(is_count(getattr(self, name), least), name, f"a whole number, at least {least}")
        self._check_layers()
        if self.rule == "ttcd":
            limit = self.teacher_window
            fits = limit is None or self.student_window <= limit
            self._require(fits, "student_window", f"from 1 to the teacher's window, {limit}")
        centred = self.rule != "in_place" or self.conv_kernel == 0 or self.conv_kernel % 2 == 1
        self._require(centred, "conv_kernel", "odd for the rule 'in_place', whose convolution is centred")
        self._require(_finite(self.fast_lr), "fast_lr", "a finite number")
        rate = self.lact_lr
        self._require(_finite(rate) and 0 < rate <= MAX_RATE, "lact_lr", f"a number above 0, up to {MAX_RATE}")
        width = self.num_attention_heads * (self.head_dim or 1)
        self._require(width % self.lact_heads == 0, "lact_heads", f"a divisor of {width}")
        biases = "False; qkv_bias and output_bias say which projections of the attention have biases"
        self._require(not self.attention_bias, "attention_bias", biases)

    def _check_layers(self) -> None:
        """Where the rule sits, and the windows of all layers."""
        layers = self.num_hidden_layers
        chosen = [] if self.fast_layers is None else self.fast_layers
        inside = isinstance(chosen, list) and all(is_count(layer, 0) and layer < layers for layer in chosen)
        distinct = inside and len(set(chosen)) == len(chosen)
        self._require(distinct, "fast_layers", f"a list of distinct layers from 0 to {layers - 1}")
        fits = (self.rule == "window") == (not chosen)
        self._require(fits, "fast_layers", "empty for the rule 'window', and only for it")
        windows = self.windows if isinstance(self.windows, list) else [self.windows] * layers
        self._require(len(windows) == layers, "windows", f"one window, or a list, for each of the {layers} layers")
        of_layers = f"a positive whole number, None for full attention, or a list of {layers} such"
        self._require(all(map(_is_window, windows)), "windows", of_layers)
        self._require(_is_window(self.teacher_window), "teacher_window", "a positive whole number, or None")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise BudgetError(f"the setting {name} is {getattr(self, name)!r}; it must be {wanted}")


def _is_window(value: object) -> bool:
    return value is None or is_count(value, 1)


def _finite(value: object) -> bool:
    return is_number(value) and math.isfinite(value)
