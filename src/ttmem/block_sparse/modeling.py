"""The small language model: a transformers model with `from_pretrained`, `save_pretrained` and `generate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ttmem.block_sparse.cache import BlockSparseCache
from ttmem.block_sparse.chunks import row_starts
from ttmem.block_sparse.configuration import BlockSparseConfig
from ttmem.block_sparse.layer import BlockSparseAttention, RMSNorm
from ttmem.errors import BlockError
from ttmem.models.initialise import reset_missing

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The cache's name in outputs: renamed in transformers 5.24."""


class GatedMLP(nn.Module):
    def __init__(self, config: BlockSparseConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockSparseDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: BlockSparseConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockSparseAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, hidden: Tensor, starts: Tensor | None = None, cache: BlockSparseCache | None = None) -> Tensor:
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, hidden, self.input_layernorm, starts, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class BlockSparsePreTrainedModel(PreTrainedModel):
    config_class = BlockSparseConfig
    config: BlockSparseConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("BlockSparseDecoderLayer",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_missing(module)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """The model makes its own cache, which also holds summaries."""
        return False


class BlockSparseModel(BlockSparsePreTrainedModel):
    """Token ids [B, L] -> hidden states [B, L, hidden]."""

    def __init__(self, config: BlockSparseConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BlockSparseDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: BlockSparseCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        past_key_values: BlockSparseCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """attention_mask [B, cached + L], 1 where there is a token; rows may be padded on the left.

        Positions are counted from each row's first token; `position_ids` is accepted because `generate` passes it, and
        not read. `past_key_values` is the older name of `cache`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass one of input_ids and inputs_embeds")
        cache = past_key_values if cache is None else cache
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        if cache is None and wanted:
            cache = BlockSparseCache(len(self.layers))
        starts = self._starts(attention_mask, cache, hidden.shape[1])
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, starts=starts, cache=cache)
            states.append(hidden)
        hidden = self.norm(hidden)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
            **{CACHE: cache},
        )

    def _starts(self, mask: Tensor | None, cache: BlockSparseCache | None, length: int) -> Tensor | None:
        """Each row's first slot. Without a mask, what the cache was filled with holds."""
        if cache is None:
            return row_starts(mask, length)
        if not isinstance(cache, BlockSparseCache):
            raise BlockError(f"this model needs a BlockSparseCache, not a {type(cache).__name__}; pass none at first.")
        cached = cache.get_seq_length()
        if mask is not None or not cached:
            cache.begin_rows(row_starts(mask, cached + length))
        return cache.starts


class BlockSparseForCausalLM(BlockSparsePreTrainedModel, GenerationMixin):
    """`BlockSparseModel` with a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: BlockSparseConfig) -> None:
        super().__init__(config)
        self.model = BlockSparseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: BlockSparseCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        past_key_values: BlockSparseCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As `BlockSparseModel.forward`. labels [B, L]: the loss is that of predicting each from the tokens before it,
        -100 for none. logits_to_keep: of how many last tokens, 0 for all; or of which.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )


def register() -> None:
    """Make the model known to transformers' Auto classes."""
    AutoConfig.register(BlockSparseConfig.model_type, BlockSparseConfig, exist_ok=True)
    AutoModel.register(BlockSparseConfig, BlockSparseModel, exist_ok=True)
    AutoModelForCausalLM.register(BlockSparseConfig, BlockSparseForCausalLM, exist_ok=True)
