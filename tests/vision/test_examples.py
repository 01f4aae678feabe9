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


GREY = picture()[..., 0]


@pytest.mark.parametrize(
    "grey",
    [
        GREY,
        GREY[:, ::-1][:, ::-1],
        GREY.astype(np.float32),
        GREY.astype(np.int64),
        GREY[..., None],
        GREY[None],
        torch.from_numpy(GREY.copy()),
        torch.from_numpy(GREY.astype(np.float32)),
        torch.from_numpy(GREY.copy())[None],
    ],
    ids=lambda grey: f"{type(grey).__name__} {grey.dtype} {list(grey.shape)}",
)
def test_grey_arrays_are_pictures(grey: Any, parts: tuple[Any, Any, Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    encode = ImageTextEncoder(*parts)
    example, expected = encode(grey, "What?"), encode(image.fromarray(GREY), "What?")
    assert example.grid == (1, 6, 12)
    torch.testing.assert_close(example.pixels, expected.pixels)


@pytest.mark.parametrize("shape", [(3, 48), (24, 3), (1, 48), (3, 3)])
def test_thin_grey_arrays_are_not_taken_for_channels(shape: tuple[int, int], parts: tuple[Any, Any, Any]) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    encode = ImageTextEncoder(*parts)
    example, expected = encode(grey, "What?"), encode(image.fromarray(grey), "What?")
    assert example.grid == expected.grid
    torch.testing.assert_close(example.pixels, expected.pixels)


@pytest.mark.parametrize(
    "wrong",
    [None, 3, np.zeros(5), np.zeros((0, 0)), np.zeros((24, 48, 2)), np.zeros((1, 4001)), np.zeros((24, 48)).tolist()],
    ids=lambda wrong: type(wrong).__name__ + str(list(getattr(wrong, "shape", []))),
)
def test_what_is_no_picture_is_refused(wrong: Any, parts: tuple[Any, Any, Any]) -> None:
    with pytest.raises(VisionError, match=r"takes no .*Hand in one picture") as caught:
        ImageTextEncoder(*parts)(wrong, "What?")
    assert len(str(caught.value)) < 500


def test_several_pictures_are_refused(parts: tuple[Any, Any, Any]) -> None:
    with pytest.raises(VisionError, match="is 2 pictures"):
        ImageTextEncoder(*parts)(np.stack([picture(), picture()]), "What?")


def test_tokens_that_the_tokenizer_lacks(parts: tuple[Any, Any, Any]) -> None:
    """None among the ids would fail far from here."""
    network, tokenizer, processor = parts
    encode = ImageTextEncoder(network, tokenizer, processor)
    example = encode(picture(), "What?", "the boat")
    tokenizer.eos_token = tokenizer.pad_token = None
    with pytest.raises(VisionError, match="no end-of-text token"):
        encode(picture(), "What?", "the boat")
    assert None not in encode(picture(), "What?").text.ids  # no answer, no end
    with pytest.raises(VisionError, match="pad_id is None"):
        collate([example], network.config, tokenizer.pad_token_id)


def test_batches_with_nothing_to_learn_are_refused(parts: tuple[Any, Any, Any]) -> None:
    """Their loss would be NaN. One answer among them is enough."""
    network, tokenizer, processor = parts
    encode = ImageTextEncoder(network, tokenizer, processor)
    asked, answered = encode(picture(), "What?"), encode(picture(), "What?", "e")
    for examples in ([asked], [asked, asked]):
        with pytest.raises(VisionError, match=f"no token of this batch of {len(examples)} counts"):
            predict(network, collate(examples, network.config, 256))
    assert predict(network, collate([asked, answered], network.config, 256)).loss().isfinite()
    with pytest.raises(VisionError, match="no examples"):
        collate([], network.config, 256)


def test_huge_pictures_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pillow takes for an attack: more than twice its limit."""
    image = pytest.importorskip("PIL.Image")
    image.fromarray(picture()).save(tmp_path / "huge.png")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 24 * 48 // 2 - 1)
    with pytest.raises(VisionError, match=r"huge\.png: too large .*MAX_IMAGE_PIXELS"):
        load_image(tmp_path / "huge.png")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("form", ["png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm", "tga"])
def test_damaged_pictures_are_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pillow raises for them; some it reads all the same."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 100_000)
    file, generator = tmp_path / f"picture.{form}", np.random.default_rng(0)
    image.fromarray(picture()).save(file)
    whole, refused = file.read_bytes(), 0
    for _ in range(60):
        damaged = bytearray(whole[: generator.integers(1, len(whole))])
        for _ in range(3):
            damaged[generator.integers(0, min(len(damaged), 60))] = generator.integers(0, 256)
        file.write_bytes(damaged)
        try:
            load_image(file)
        except VisionError:
            refused += 1
    assert refused


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
