"""The phonebook model's network: a small Llama, started so that its first layer already sees the last few tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

POSITIONS = 8192
ROPE_BASE = 1e6
"""High, so that half of a head's pairs hardly turn within a document: they can compare names at any distance."""
EMBEDDING = 0.3
"""Standard deviation of the token embeddings, and about what each layer adds to them."""
OFFSETS = (1, 2, 3, 4)
"""How many tokens back each query head of the first layer looks at the start."""
FOCUS = 6.0
"""Advantage of that token, in nats per pair of a head that turns fast enough to tell neighbours apart."""
FAST = 0.03
"""Radians per token from which a pair does."""


def build_network(tokenizer: PreTrainedTokenizerBase, seed: int) -> LlamaForCausalLM:
    """A network with four layers of four query and two key/value heads, about 0.66 million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    network = LlamaForCausalLM(config)
    initialize(network, torch.Generator().manual_seed(seed))
    return network


@torch.no_grad()
def initialize(network: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Random weights of a size that lets all layers speak at once, and a first layer that looks back.

    Lookup needs names to be gathered over several tokens before they can be compared; with attention that starts out
    even over all tokens, a small model spends most of its training on finding that.
    """
    width = network.config.hidden_size
    for name, parameter in network.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            size = EMBEDDING / math.sqrt(parameter.shape[1])
        elif "embed" in name:
            size = EMBEDDING
        else:
            size = 1.0 / math.sqrt(width)
        if parameter.ndim == 2:
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    network.model.norm.weight.fill_(1.0 / (EMBEDDING * math.sqrt(width)))  # the logits start near unit variance
    look_back(network, OFFSETS)


@torch.no_grad()
def look_back(network: LlamaForCausalLM, offsets: tuple[int, ...]) -> None:
    """Make each query head of the first layer attend mostly to the token `offset` places before its own.

    The embeddings' first component is the same for all tokens. Queries and keys made of it alone, turned by RoPE,
    score a token at distance t - s by the sum over pairs of cos(f (t - s - offset)), which is largest at the offset.
    """
    network.model.embed_tokens.weight[:, 0] = 1.0
    # What the first layer's norm makes of the first component, on average.
    constant = 1.0 / math.sqrt(EMBEDDING**2 + 1.0 / network.config.hidden_size)
    attention, head = network.model.layers[0].self_attn, network.config.head_dim
    frequencies = network.model.rotary_emb.inv_freq
    size = (frequencies > FAST) * math.sqrt(FOCUS * math.sqrt(head)) / constant
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(0.1)
    for query, offset in zip(attention.q_proj.weight.split(head), offsets, strict=True):
        query[:, 0] = _turned(size, -offset * frequencies)
    for key in attention.k_proj.weight.split(head):
        key[:, 0] = _turned(size, 0.0 * frequencies)


def _turned(size: Tensor, angles: Tensor) -> Tensor:
    """Pairs of length `size` at `angles`, in the halves in which Llama keeps a pair's two components."""
    return torch.cat([size * angles.cos(), size * angles.sin()])
