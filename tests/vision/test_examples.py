"""Pictures with text as tokens, and their batches."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttmem import VisionError
from ttmem.vision import ImageTextEncoder, MergerSettings, collate, install, load_image, load_image_processor, predict

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)


def picture(height: int = 24, width: int = 48) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture
def parts(
    make_vision_network: Callable[..., Any], make_image_processor: Callable[..., Any], vision_tokenizer: Any
) -> tuple[Any, Any, Any]:
    """(network with 3 x 3 mergers, tokenizer, image processor)"""
    network, processor = make_vision_network(), make_image_processor()
    install(network, MergerSettings("ttr-conv", 3), processor)
    return network, vision_tokenizer, processor


def test_placeholders_and_weights(parts: tuple[Any, Any, Any]) -> None:
    network, tokenizer, processor = parts
    example = ImageTextEncoder(network, tokenizer, processor)(picture(), "What is it?", "the boat")
    assert example.grid == (1, 6, 12)
    assert example.pixels.shape == (72, 96)
    ids, weights = example.text.ids, example.text.weights
    assert ids[:10] == [302, *[300] * 8, 303]
    answer = [*tokenizer("the boat")["input_ids"], 257]
    assert ids[-len(answer) :] == answer
    assert weights == [0.0] * (len(ids) - len(answer)) + [1.0] * len(answer)
    assert tokenizer.decode(ids[10 : -len(answer)]) == "What is it?\n"


def test_chat_templates(parts: tuple[Any, Any, Any]) -> None:
    network, tokenizer, processor = parts
    tokenizer.chat_template = TEMPLATE
    ids = ImageTextEncoder(network, tokenizer, processor)(picture(), "hi").text.ids
    assert ids[:11] == [256, 302, *[300] * 8, 303]
    assert tokenizer.decode(ids[11:]) == "hi<|im_end|>"
    with pytest.raises(VisionError, match="2 image placeholders"):
        ImageTextEncoder(network, tokenizer, processor)(picture(), "hi<|image_pad|>")


def test_a_processor_that_disagrees_is_refused(parts: tuple[Any, Any, Any]) -> None:
    network, tokenizer, processor = parts
    processor.merge_size = 2
    with pytest.raises(VisionError, match="disagree"):
        ImageTextEncoder(network, tokenizer, processor)


def test_a_batch_gives_what_each_example_gives(parts: tuple[Any, Any, Any]) -> None:
    """Pictures of different sizes and texts of different lengths: padding and packing change no prediction."""
    network, tokenizer, processor = parts
    encode = ImageTextEncoder(network, tokenizer, processor)
    examples = [
        encode(picture(), "What?", "the boat"),
        encode(picture(12, 24), "Which quay is it on?", "e"),
        encode(picture(36, 12), "", "nine on Mondays"),
    ]
    together = predict(network, collate(examples, network.config, 256))
    alone = [predict(network, collate([example], network.config, 256)) for example in examples]
    torch.testing.assert_close(together.logits, torch.cat([p.logits for p in alone]), rtol=1e-3, atol=1e-4)
    assert torch.equal(together.targets, torch.cat([p.targets for p in alone]))
    full = network(**collate(examples[:1], network.config, 256).inputs).logits[0, -5:-1]
    torch.testing.assert_close(alone[0].logits[-4:], full, rtol=1e-3, atol=1e-4)
    together.loss().backward()
    assert network.model.visual.merger.compress.a.grad.any()


def test_pictures_from_files(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(picture()[..., 0]).save(tmp_path / "grey.png")
    assert load_image(tmp_path / "grey.png").size == (48, 24)
    assert load_image(tmp_path / "grey.png").mode == "RGB"
    (tmp_path / "text.png").write_text("no picture")
    for name in ("text.png", "missing.png"):
        with pytest.raises(VisionError, match=name):
            load_image(tmp_path / name)


def test_without_pillow_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.split(".")[0] == "PIL":
            raise ImportError("No module named 'PIL'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    for function in (load_image, load_image_processor):
        with pytest.raises(VisionError, match=r"pip install 'ttmem\[vision\]'"):
            function(tmp_path)
