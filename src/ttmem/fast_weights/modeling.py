"""`TTCDForCausalLM`: a decoder of the Llama family whose chosen layers carry a fast-weight rule.

Parameters have the names they have in Llama, so that pretrained layers fit in; what a rule adds is beside them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ttmem.errors import ModelError
from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import TTCDConfig
from ttmem.fast_weights.layout import arrange
from ttmem.fast_weights.rules import UNPACKED, make_layer
from ttmem.fast_weights.state import FastWeightCache
from ttmem.models.initialise import reset_missing

CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""How this transformers names the cache in outputs: renamed in 5.24."""
INCLUSIVE = (
    "scan='inclusive' reads tokens that come later, so it cannot be used with a cache: hand in the whole text, with "
    "use_cache=False in `generate`"
)


class TTCDPreTrainedModel(PreTrainedModel):
    config_class = TTCDConfig
    config: TTCDConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["TTCDLayer", "InPlaceLayer", "LaCTLayer", "DeltaLayer", "WindowLayer"]
    _supports_sdpa = True
    keeps_fast_weights = True
    cache_keyword = CACHE_FIELD

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_missing(module)


class TTCDModel(TTCDPreTrainedModel):
    """The decoder without its head. See `TTCDForCausalLM`."""

    def __init__(self, config: TTCDConfig) -> None:
        config.check()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(make_layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: FastWeightCache | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """See `TTCDForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("hand in either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch, tokens = inputs_embeds.shape[:2]
        state = self._state(cache if cache is not None else past_key_values, use_cache)
        if state is not None:
            state.match_batch(batch)
        rows, layout, positions = arrange(
            (batch, tokens),
            inputs_embeds.device,
            attention_mask,
            position_ids,
            counts=0 if state is None else state.counts,
            seen=0 if state is None else state.seen,
            unpack=self.config.rule in UNPACKED,
        )
        hidden = inputs_embeds if rows is None else rows.arrange(inputs_embeds)
        cos, sin = self.rotary_emb(hidden, position_ids=positions)
        completes = state is None or layout.completes(self.config.chunk_size)
        context = Context(layout, cos, sin, hidden, completes)
        outputs = [hidden]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, context, None if state is None else state.layers[index])
            outputs.append(hidden)
        hidden = self.norm(hidden)
        if state is not None:
            state.counts = layout.next_counts()
            state.seen += tokens
        if rows is not None:
            hidden = rows.restore(hidden)
        recorded: tuple[Tensor, ...] | None = None
        if output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states:
            recorded = (*(x if rows is None else rows.restore(x) for x in outputs[:-1]), hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=recorded, **{CACHE_FIELD: state})

    def _state(self, cache: Any, use_cache: bool | None) -> FastWeightCache | None:
        """The state to go on from, a new one, or None. Raises ModelError for a cache that cannot hold one.

        A step of training makes none. `generate` does so in training mode too: from the second token on, it hands in
        the last one alone.
        """
        recording = self.training and torch.is_grad_enabled()
        if cache is None:
            if use_cache and self.config.scan == "inclusive":
                raise ModelError(INCLUSIVE)
            wanted = self.config.use_cache if use_cache is None else use_cache
            if not wanted or recording or self.config.scan == "inclusive":
                return None
            return FastWeightCache(len(self.layers))
        if recording and any(layer.gradient_checkpointing for layer in self.layers):
            raise ModelError(
                "gradient checkpointing runs the layers a second time, which would find the state as they left it: "
                "train without a cache, or without gradient checkpointing"
            )
        if not isinstance(cache, FastWeightCache):
            raise ModelError(
                f"{type(cache).__name__} holds no fast weights, and this model keeps some: hand in a "
                "ttmem.fast_weights.FastWeightCache, or none; `ttmem read` reads documents into it"
            )
        if self.config.scan == "inclusive":
            raise ModelError(INCLUSIVE)
        if len(cache.layers) != len(self.layers):
            raise ModelError(f"the state has {len(cache.layers)} layers, and the model has {len(self.layers)}")
        return cache


class TTCDForCausalLM(TTCDPreTrainedModel, GenerationMixin):
    """A language model with fast weights.

    Built from a `TTCDConfig` for training from scratch, by `ttmem.fast_weights.install` from a pretrained model, or by
    `from_pretrained`. Logits of cached decoding, in any split, of padded and of packed batches are those of one forward
    over each text alone, up to rounding.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__(config)
        self.model = TTCDModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: FastWeightCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: FastWeightCache | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the tokens after input_ids [B, T].

        attention_mask [B, T], or [B, seen + T]: 0 for padding, at either end. position_ids [B, T]: 0 begins a document,
        so that rows can be packed; fast weights, convolutions and attention start anew there. Without them, each row
        counts its own tokens.
        cache: a `FastWeightCache` to go on from; without one, and with use_cache, a new one is returned. While
        training mode records gradients, none is made. past_key_values: its older name.
        Raises ModelError for another kind of cache, one behind gradient checkpointing, or a mask that does not fit.
        """
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache if cache is not None else past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = output.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        state = {CACHE_FIELD: output.get(CACHE_FIELD)}
        result = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=output.hidden_states, **state)
        return result if return_dict is not False else result.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Tells `generate` to leave the making of the cache to `forward`."""
        return False

    def new_state(self) -> FastWeightCache:
        """An empty state, to be handed to `forward` or `generate` as the cache."""
        return FastWeightCache(len(self.model.layers))

    @torch.no_grad()
    def read(self, input_ids: Tensor, state: FastWeightCache | None = None, piece: int = 2048) -> FastWeightCache:
        """Read ids [B, T] into a state, a piece at a time, so that activations stay small whatever T is."""
        state = self.new_state() if state is None else state
        for part in input_ids.split(piece, dim=1):
            self(input_ids=part, cache=state, logits_to_keep=1)
        return state
