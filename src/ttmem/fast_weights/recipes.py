"""Model and training by name: the paper's configurations, and sizes that a CPU trains.

From scratch: Table 3; heads, vocabulary, MLP and rotary base are those of the authors' public configurations.
Continual pre-training: Tables 3 and 5. Ours, where neither says: where "wsd" begins to fall.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ttmem.errors import BudgetError
from ttmem.fast_weights.config import IN_PLACE_RULES, TTCDConfig
from ttmem.fast_weights.install import install
from ttmem.fast_weights.modeling import TTCDForCausalLM
from ttmem.models.loading import load_network
from ttmem.models.yarn import apply_yarn
from ttmem.training.loop import TrainSettings

SYSTEMS = ("ttcd", "in_place", "lact", "deltanet", "gated_deltanet", "window", "full")
"""The rules of `TTCDConfig`, and full attention in all layers."""
BUNDLED = "bundled"
"""The base that `load_model` takes without a name."""


@dataclass(frozen=True)
class Recipe:
    """model: fields of `TTCDConfig` from scratch, arguments of `install` for a base. length: tokens of a sequence;
    batch: sequences per step.

    base: the pretrained model to start from, a hub id; None from scratch. outline: the base's configuration as far as
    its size goes, so that it can be counted without it. sliding: windows of all layers for the system "window" in it.
    """

    model: dict[str, Any]
    training: TrainSettings
    length: int
    batch: int
    base: str | None = None
    outline: dict[str, Any] = field(default_factory=dict)
    sliding: int = 8192

    @property
    def tokens(self) -> int:
        """What the whole training reads."""
        return self.training.steps * self.length * self.batch


def steps_for(tokens: float, per_step: int) -> int:
    return round(tokens / per_step)


def from_scratch(hidden: int, intermediate: int, heads: int, batch: int, tokens: float) -> Recipe:
    return Recipe(
        model={
            "vocab_size": 129_280,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": 24,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 32_768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
            "fast_layers": [0, 6, 12, 18],
            "windows": 2048,
            "teacher_window": 2048,
            "student_window": 1024,
            "chunk_size": 1024,
        },
        training=TrainSettings(
            steps=steps_for(tokens, batch * 32_768),
            optimizer="muon",
            lr=3e-3,
            weight_decay=0.1,
            schedule="wsd",
            warmup=500,
            stable=0.8,
            checkpoint_every=500,
        ),
        length=32_768,
        batch=batch,
    )


def continual(base: str, outline: dict[str, Any], **changes: Any) -> Recipe:
    """64K tokens in a sequence, about 1M in a step, 10B in all."""
    training = {"lr": 1e-5, "weight_decay": 0.1, "floor": 0.1, "warmup": 200, "checkpoint_every": 200, **changes}
    batch = training.pop("batch", 16)
    return Recipe(
        model={"student_window": 2048, "chunk_size": 2048, "target": "hidden", "dual_engine": "fused"},
        training=TrainSettings(steps=steps_for(1e10, batch * 65_536), schedule="cosine", **training),
        length=65_536,
        batch=batch,
        base=base,
        outline=outline,
    )


def outline(
    kind: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head: int, vocabulary: int,
    tied: bool = True,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


RECIPES: dict[str, Recipe] = {
    "340m": from_scratch(1024, 2816, heads=16, batch=16, tokens=2e10),
    "760m": from_scratch(1536, 4096, heads=24, batch=32, tokens=4e10),
    "smollm2-360m": continual("HuggingFaceTB/SmolLM2-360M", outline("llama", 960, 2560, 32, 15, 5, 64, 49_152)),
    "smollm2-1.7b": continual("HuggingFaceTB/SmolLM2-1.7B", outline("llama", 2048, 8192, 24, 32, 32, 64, 49_152)),
    "qwen3-0.6b": continual("Qwen/Qwen3-0.6B", outline("qwen3", 1024, 3072, 28, 16, 8, 128, 151_936)),
    "qwen3-1.7b": continual("Qwen/Qwen3-1.7B", outline("qwen3", 2048, 6144, 28, 16, 8, 128, 151_936)),
    # Table 5: half the rate, to 0, and 2M tokens in a step; the text beside it says 1M and a tenth.
    "llama-3.1-8b": continual(
        "meta-llama/Llama-3.1-8B",
        outline("llama", 4096, 14_336, 32, 32, 8, 128, 128_256, tied=False),
        lr=5e-6,
        floor=0.0,
        batch=32,
    ),
    "cpu": Recipe(
        model={
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "max_position_embeddings": 16384,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "fast_layers": [0, 2],
            "windows": 128,
            "teacher_window": 128,
            "student_window": 64,
            "chunk_size": 64,
        },
        training=TrainSettings(
            steps=1500, optimizer="muon", lr=5e-3, weight_decay=0.1, schedule="wsd", warmup=100, checkpoint_every=100
        ),
        length=1024,
        batch=4,
    ),
    "cpu-continual": Recipe(
        model={"student_window": 512, "chunk_size": 512},
        training=TrainSettings(
            steps=60, lr=1e-4, weight_decay=0.1, schedule="cosine", floor=0.1, warmup=6, checkpoint_every=10
        ),
        length=2048,
        batch=1,
        base=BUNDLED,
        outline=outline("llama", 576, 1536, 30, 9, 3, 64, 49_152),
        sliding=512,
    ),
}


def system_settings(system: str, layers: int) -> dict[str, Any]:
    """The fields of `TTCDConfig` that make a system of a model with fast layers: In-place rules keep these, DeltaNet
    and LaCT are in all layers, as in their papers. Raises BudgetError for an unknown name."""
    if system not in SYSTEMS:
        raise BudgetError(f"the system {system!r} is not one of {', '.join(SYSTEMS)}")
    if system == "full":
        return {"rule": "window", "fast_layers": [], "windows": None}
    if system == "window":
        return {"rule": "window", "fast_layers": []}
    return {"rule": system} if system in IN_PLACE_RULES else {"rule": system, "fast_layers": list(range(layers))}


def make_config(model: dict[str, Any], system: str, changes: dict[str, Any]) -> TTCDConfig:
    """The configuration of a system from scratch; `model` and `changes` are fields of `TTCDConfig`."""
    sizes = {**model, **changes}
    return TTCDConfig(**{**model, **system_settings(system, sizes["num_hidden_layers"]), **changes})


def build(
    recipe: Recipe,
    system: str = "ttcd",
    changes: dict[str, Any] | None = None,
    base: PreTrainedModel | None = None,
    yarn: float | None = None,
) -> PreTrainedModel:
    """The model that a recipe trains: from scratch, or in `base`, whose modules it takes over.

    changes: of the recipe's model. yarn: stretches positions by this factor (`ttmem.models.yarn`). "full" in a base is
    the base itself. Raises ModelError and BudgetError for what cannot be built.
    """
    changes = changes or {}
    if recipe.base is None:
        network: PreTrainedModel = TTCDForCausalLM(make_config(recipe.model, system, changes))
        return network if yarn is None else apply_yarn(network, yarn)
    if base is None:
        base, _ = load_base(recipe.base)
    if yarn is not None:
        apply_yarn(base, yarn)
    base.config.max_position_embeddings = max(base.config.max_position_embeddings, recipe.length)
    if system == "full":
        if changes:
            raise BudgetError(f"{', '.join(changes)}: the system 'full' is the base as it is, and has no such settings")
        return base
    own = {"windows": recipe.sliding} if system == "window" else recipe.model
    return install(base, rule=system, **{**own, **changes})


def load_base(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A base in fp32, ready for training, and its tokenizer. Raises ModelError where it is not there."""
    network, tokenizer, _ = load_network(None if name == BUNDLED else name, dtype="float32", device="cpu")
    return network.requires_grad_(True), tokenizer


def outlined(
    recipe: Recipe, system: str = "ttcd", changes: dict[str, Any] | None = None, yarn: float | None = None
) -> TTCDForCausalLM:
    """The same model without numbers, on the meta device: to be counted, with nothing downloaded.

    "full" in a base is a `TTCDForCausalLM` of its size.
    """
    with torch.device("meta"):
        if recipe.base is None:
            return cast(TTCDForCausalLM, build(recipe, system, changes, yarn=yarn))
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.outline))
        network = build(recipe, system, changes, base, yarn)
        return install(network, rule="window") if system == "full" else cast(TTCDForCausalLM, network)
