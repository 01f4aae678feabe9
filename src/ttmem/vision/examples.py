"""Images with questions and answers as tokens, and their batches: what training and tests hand to a Qwen3-VL.

The model's processor does the same for prompts. It needs torchvision even where there is no video; this needs a
tokenizer and an image processor alone, and knows which tokens count in the loss.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ttmem.errors import VisionError
from ttmem.training.packing import Predictions, TokenSequence, pad
from ttmem.vision.grids import read_grids
from ttmem.vision.installation import check

INSTALL = "pip install 'ttmem[vision]'"
BROKEN = (OSError, ValueError, SyntaxError, EOFError, struct.error)
"""What pillow raises for files that are damaged, or that are no pictures."""


@dataclass
class ImageText:
    """One image and the text around it.

    pixels: [N, values per patch], N patches group after group. grid: (time, height, width) in patches. text: token ids
    with one placeholder per visual token, and how much the prediction of each counts.
    """

    pixels: Tensor
    grid: tuple[int, int, int]
    text: TokenSequence


class ImageTextEncoder:
    """Makes `ImageText` for a model: its placeholders, as many as the merge size says, in its tokenizer's ids.

    image_processor: the model's, with its merge size set. Raises VisionError where it disagrees with the model.
    An answer ends with the tokenizer's end-of-text token, so that a model learns to stop.
    """

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any) -> None:
        self.merge_size = check(model, image_processor)
        self.config, self.tokenizer, self.image_processor = model.config, tokenizer, image_processor

    def __call__(self, image: Any, question: str, answer: str | None = None) -> ImageText:
        """image: a PIL image, or an array or tensor with values from 0 to 255, [H, W] in grey or with channels.

        Without an answer, the text is what `generate` goes on from. Raises VisionError for what is not one picture,
        and for an answer where the tokenizer has no token to end it.
        """
        pixels, grid = self.patches(image)
        text = TokenSequence()
        text.read(self.prompt(question, grid))
        if answer is not None:
            ids = self.answer(answer)
            text.predict(ids, [1.0] * len(ids))
        return ImageText(pixels, grid, text)

    def patches(self, image: Any) -> tuple[Tensor, tuple[int, int, int]]:
        """[N, values per patch] of one picture, and its grid."""
        try:
            found = self.image_processor(images=[_with_channels(image)], return_tensors="pt")
        except (ValueError, TypeError, ArithmeticError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise VisionError(
                f"the image processor takes no {_described(image)} ({reason}). Hand in one picture: a PIL image, or an "
                "array [H, W], [H, W, 3] or [3, H, W] with values from 0 to 255."
            ) from error
        grids = read_grids(found["image_grid_thw"], self.merge_size)
        if len(grids) != 1:
            raise VisionError(f"{_described(image)} is {len(grids)} pictures; hand in one at a time.")
        return found["pixel_values"], grids[0]

    def answer(self, text: str) -> list[int]:
        """Token ids of an answer with its end."""
        if self.tokenizer.eos_token_id is None:
            raise VisionError(
                "the tokenizer has no end-of-text token (eos_token is None), so that an answer has no end to learn. "
                "Set it to the model's: tokenizer.eos_token = ..."
            )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]

    def prompt(self, question: str, grid: tuple[int, int, int]) -> list[int]:
        """Token ids up to the answer: in the tokenizer's chat template where it has one."""
        config = self.config
        image = [config.vision_start_token_id, config.image_token_id, config.vision_end_token_id]
        if self.tokenizer.chat_template:
            content = [{"type": "image"}, {"type": "text", "text": question}]
            message = [{"role": "user", "content": content}]
            written = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer(written, add_special_tokens=False)["input_ids"]
        else:
            ids = image + self.tokenizer(question + "\n", add_special_tokens=False)["input_ids"]
        if ids.count(config.image_token_id) != 1:
            raise VisionError(
                f"the prompt holds {ids.count(config.image_token_id)} image placeholders (token "
                f"{config.image_token_id}) instead of one: tokenizer or chat template are not this model's, or the "
                "question holds one"
            )
        tokens = grid[0] * grid[1] * grid[2] // self.merge_size**2
        place = ids.index(config.image_token_id)
        return ids[:place] + [config.image_token_id] * tokens + ids[place + 1 :]


def _with_channels(image: Any) -> Any:
    """A grey picture [H, W], [1, H, W] or [H, W, 1] as [3, H, W], which image processors want; all else as it is."""
    if isinstance(image, Tensor | np.ndarray) and image.ndim == 3 and 1 in (image.shape[0], image.shape[2]):
        image = image[0] if image.shape[0] == 1 else image[..., 0]
    if isinstance(image, Tensor) and image.dim() == 2:
        return image.expand(3, -1, -1)
    if isinstance(image, np.ndarray) and image.ndim == 2:
        return np.broadcast_to(image, (3, *image.shape))
    return image


def _described(image: Any) -> str:
    shape = getattr(image, "shape", None)
    return type(image).__name__ if shape is None else f"{type(image).__name__} {list(shape)}"


@dataclass
class ImageTextBatch:
    """B examples, padded on the right. inputs: what the model takes. weights [B, L]: what counts in the loss."""

    inputs: dict[str, Tensor]
    weights: Tensor


def collate(examples: Sequence[ImageText], config: Any, pad_id: int) -> ImageTextBatch:
    """Examples as one batch for a model with this config. Raises VisionError for no examples, and for no pad_id."""
    if not examples:
        raise VisionError("there are no examples to make a batch of; hand in at least one.")
    if pad_id is None:
        raise VisionError(
            "pad_id is None: the tokenizer has no padding token. Padding is not looked at, so any token will do but a "
            "picture's: hand in tokenizer.eos_token_id."
        )
    batch = pad([example.text for example in examples], pad_id)
    inputs = {
        "input_ids": batch.ids,
        "mm_token_type_ids": (batch.ids == config.image_token_id).int(),
        "pixel_values": torch.cat([example.pixels for example in examples]),
        "image_grid_thw": torch.tensor([example.grid for example in examples]),
    }
    return ImageTextBatch(inputs, batch.weights)


def predict(model: Any, batch: ImageTextBatch) -> Predictions:
    """Run a Qwen3-VL; logits are computed only for tokens that count.

    Raises VisionError for a batch in which none does: its loss would be a mean over nothing, NaN.
    """
    if not bool((batch.weights[:, 1:] > 0).any()):
        raise VisionError(
            f"no token of this batch of {len(batch.weights)} counts in the loss. Give the ImageTextEncoder an answer "
            "to at least one of its questions; to let a model go on from questions alone, call generate."
        )
    device = model.get_output_embeddings().weight.device
    inputs = {name: value.to(device) for name, value in batch.inputs.items()}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    ids, weights = inputs["input_ids"], batch.weights.to(device)
    counts = weights[:, 1:] > 0
    logits = model.get_output_embeddings()(hidden[counts])
    return Predictions(logits, ids[:, :-1][counts], ids[:, 1:][counts], weights[:, 1:][counts])


def load_image(path: str | PathLike[str]) -> Any:
    """A picture in RGB. Raises VisionError where pillow is missing, and for a file that is no picture or a huge one."""
    try:
        from PIL import Image
    except ImportError as error:
        raise VisionError(f"reading images needs pillow: {INSTALL}") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Image.DecompressionBombError as error:
        raise VisionError(
            f"{path}: too large to be read safely ({error}). Make it smaller, or raise PIL.Image.MAX_IMAGE_PIXELS."
        ) from error
    except BROKEN as error:
        raise VisionError(f"{path}: cannot be read as a picture ({error})") from error


def load_image_processor(path: str | PathLike[str]) -> Any:
    """The image processor of a Qwen3-VL's folder, on pillow: it needs no torchvision. Raises VisionError."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise VisionError(f"image processors need pillow: {INSTALL}") from error
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return Qwen2VLImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise VisionError(f"{path}: there is no image processor to load ({error})") from error
