"""Knowing a model and a tokenizer again, without reading every weight."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAMPLES = 4096
CONFIG_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rope_parameters",
    "sliding_window",
    "layer_types",
)
PROBES = ("Hello, world", "  12 + 34 = 46\n", "naïve café — 東京", "<|im_start|>[INST]")


def fingerprint_model(network: PreTrainedModel) -> str:
    """SHA-256 over the configuration that shapes the cache and over every weight, sampled.

    Of each tensor at least 4,096 evenly spaced elements count (all, where there are fewer), rounded to bf16, so that
    the same checkpoint in fp32 and in bf16 has one fingerprint, and a fine-tuned one, whose weights differ everywhere,
    another.
    """
    config = network.config.get_text_config(decoder=True).to_dict()
    digest = hashlib.sha256(
        json.dumps({key: config.get(key) for key in CONFIG_KEYS}, sort_keys=True, default=str).encode()
    )
    for name, weight in sorted(network.state_dict().items()):
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        sample = flat[::step].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the vocabulary and over how a few probe texts are cut."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for probe in PROBES:
        digest.update(json.dumps(tokenizer(probe, add_special_tokens=False).input_ids).encode())
    return digest.hexdigest()
