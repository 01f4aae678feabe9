"""A tiny random Qwen3-VL with two deepstack mergers, its inputs, and the real processors where they can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

IMAGE, VIDEO, START, END = 300, 301, 302, 303
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Ids 300 to 303 of the tokenizer below, whose vocabulary has 300 tokens."""
GRID = (6, 12)
"""Divides by 2 and by 3."""
PATCH, FRAMES, CHANNELS, WIDTH, OUT = 4, 2, 3, 24, 32


def build_network(merge_size: int = 2, seed: int = 0) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "vocab_size": 304,
        "hidden_size": OUT,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": rope,
        "initializer_range": 0.1,
        "pad_token_id": 256,
        "bos_token_id": None,
        "eos_token_id": 257,
    }
    vision = {
        "depth": 3,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_heads": 2,
        "in_channels": CHANNELS,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "out_hidden_size": OUT,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "spatial_merge_size": merge_size,
        "initializer_range": 0.1,
    }
    torch.manual_seed(seed)
    network = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
    )
    return network.eval()


def build_inputs(merge_size: int, grids: tuple[tuple[int, int, int], ...] = ((1, *GRID),), seed: int = 0) -> Any:
    """One row with the images one after the other and three tokens behind them."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    for time, height, width in grids:
        ids += [START, *[IMAGE] * (time * height * width // merge_size**2), END]
    tokens = torch.tensor([[*ids, 5, 6, 7]])
    patches = sum(time * height * width for time, height, width in grids)
    return {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.randn(patches, CHANNELS * FRAMES * PATCH**2, generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }


@pytest.fixture(scope="session")
def make_vision_network() -> Callable[..., Any]:
    """(merge_size=2, seed=0) -> a fresh fp32 Qwen3-VL with its own mergers."""
    return build_network


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., Any]:
    """(merge_size, grids) -> inputs with as many placeholders as the merge size says."""
    return build_inputs


@pytest.fixture
def make_image_processor() -> Callable[..., Any]:
    """(merge_size=2) -> the real image processor, on pillow."""
    pytest.importorskip("PIL")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def make(merge_size: int = 2, **changes: Any) -> Any:
        settings = {"patch_size": PATCH, "temporal_patch_size": FRAMES, "merge_size": merge_size}
        size = {"shortest_edge": PATCH**2, "longest_edge": 10_000}
        return Qwen2VLImageProcessorPil(**{**settings, "size": size, **changes})

    return make


@pytest.fixture
def make_video_processor() -> Callable[..., Any]:
    """(merge_size=2) -> the real video processor. Resizing is what it needs torchvision for, and not done here."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    def make(merge_size: int = 2) -> Any:
        return Qwen3VLVideoProcessor(patch_size=PATCH, temporal_patch_size=FRAMES, merge_size=merge_size)

    return make


@pytest.fixture
def vision_tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with Qwen3-VL's four special tokens; no chat template."""
    tokenizer = make_tokenizer(None)
    filler = [f"<|{i}|>" for i in range(IMAGE - len(tokenizer))]
    tokenizer.add_tokens([*filler, *SPECIAL], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [IMAGE, VIDEO, START, END]
    return tokenizer
