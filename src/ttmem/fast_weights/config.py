"""`TTCDConfig`: a decoder of the Llama family, of which some layers carry a fast-weight rule."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from ttmem.errors import BudgetError

IN_PLACE_RULES = ("ttcd", "in_place")
RULES = (*IN_PLACE_RULES, "lact", "deltanet", "gated_deltanet", "window")
NUM_FAST_LAYERS = 4
"""In-place rules sit in this many layers, evenly spread from layer 0, unless `fast_layers` says otherwise."""


class TTCDConfig(LlamaConfig):
    """Configuration of `TTCDForCausalLM`. What is not named here is as in `LlamaConfig`.

    qk_norm: RMS norm of each head's queries and keys before the rotation (Qwen3).
    qkv_bias, output_bias: biases of the attention's projections (Qwen2 has the first).
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

    Raises BudgetError for a value outside its range, when a model is built from it.
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
        """Raise BudgetError for the first value outside its range."""

        def require(holds: bool, name: str, wanted: str) -> None:
            if not holds:
                raise BudgetError(f"the setting {name} is {getattr(self, name)!r}; it must be {wanted}")

        layers = self.num_hidden_layers
        require(self.rule in RULES, "rule", f"one of {', '.join(RULES)}")
        chosen = self.fast_layers or []
        inside = all(0 <= layer < layers for layer in chosen) and len(set(chosen)) == len(chosen)
        require(inside, "fast_layers", f"distinct layers from 0 to {layers - 1}")
        require((self.rule == "window") == (not chosen), "fast_layers", "empty for the rule 'window', and only for it")
        windows = self.windows if isinstance(self.windows, list) else [self.windows] * layers
        require(len(windows) == layers, "windows", f"one window, or one for each of the {layers} layers")
        require(all(w is None or w > 0 for w in windows), "windows", "positive, or None for full attention")
        require(self.teacher_window is None or self.teacher_window > 0, "teacher_window", "positive, or None")
        require(self.chunk_size > 0, "chunk_size", "at least 1")
        if self.rule == "ttcd":
            limit = self.teacher_window
            fits = self.student_window > 0 and (limit is None or self.student_window <= limit)
            require(fits, "student_window", f"from 1 to the teacher's window, {limit}")
        require(self.dual_engine in ("fused", "plain"), "dual_engine", "'fused' or 'plain'")
        require(self.conv_kernel >= 0, "conv_kernel", "at least 0")
        centred = self.rule != "in_place" or self.conv_kernel == 0 or self.conv_kernel % 2 == 1
        require(centred, "conv_kernel", "odd for the rule 'in_place', whose convolution is centred")
        require(self.scan in ("exclusive", "inclusive"), "scan", "'exclusive' or 'inclusive'")
        require(self.convolution_start in ("scratch", "pretrained"), "convolution_start", "'scratch' or 'pretrained'")
        require(self.target in ("embedding", "hidden"), "target", "'embedding' or 'hidden'")
        require(self.delta_engine in ("plain", "fla"), "delta_engine", "'plain' or 'fla'")
        require(self.delta_kernel > 0, "delta_kernel", "at least 1")
        width = self.num_attention_heads * (self.head_dim or 1)
        require(self.lact_heads > 0 and width % self.lact_heads == 0, "lact_heads", f"a divisor of {width}")
