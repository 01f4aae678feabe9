"""Images with questions and answers as tokens, and their batches: what training and tests hand to a Qwen3-VL.

The model's processor does the same for prompts. It needs torchvision even where there is no video; this needs a
tokenizer and an image processor alone, and knows which tokens count in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ttmem.errors import VisionError
from ttmem.training.packing import Predictions, TokenSequence, pad
from ttmem.vision.grids import read_grids
from ttmem.vision.installation import check

INSTALL = "pip install 'ttmem[vision]'"


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
    """

    def __init__(self, model: Any, tokenizer: Any, image_processor: Any) -> None:
        self.merge_size = check(model, image_processor)
        self.config, self.tokenizer, self.image_processor = model.config, tokenizer, image_processor

    def __call__(self, image: Any, question: str, answer: str | None = None) -> ImageText:
        """image: a PIL image or array. Without an answer, the text is what `generate` goes on from."""
        found = self.image_processor(images=[image], return_tensors="pt")
        grid = read_grids(found["image_grid_thw"], self.merge_size)[0]
        text = TokenSequence()
        text.read(self.prompt(question, grid))
        if answer is not None:
            ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
            text.predict(ids, [1.0] * len(ids))
        return ImageText(found["pixel_values"], grid, text)

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


@dataclass
class ImageTextBatch:
    """B examples, padded on the right. inputs: what the model takes. weights [B, L]: what counts in the loss."""

    inputs: dict[str, Tensor]
    weights: Tensor


def collate(examples: Sequence[ImageText], config: Any, pad_id: int) -> ImageTextBatch:
    """Examples as one batch for a model with this config."""
    batch = pad([example.text for example in examples], pad_id)
    inputs = {
        "input_ids": batch.ids,
        "mm_token_type_ids": (batch.ids == config.image_token_id).int(),
        "pixel_values": torch.cat([example.pixels for example in examples]),
        "image_grid_thw": torch.tensor([example.grid for example in examples]),
    }
    return ImageTextBatch(inputs, batch.weights)


def predict(model: Any, batch: ImageTextBatch) -> Predictions:
    """Run a Qwen3-VL; logits are computed only for tokens that count."""
    device = model.get_output_embeddings().weight.device
    inputs = {name: value.to(device) for name, value in batch.inputs.items()}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    ids, weights = inputs["input_ids"], batch.weights.to(device)
    counts = weights[:, 1:] > 0
    logits = model.get_output_embeddings()(hidden[counts])
    return Predictions(logits, ids[:, :-1][counts], ids[:, 1:][counts], weights[:, 1:][counts])


def load_image(path: str | PathLike[str]) -> Any:
    """A picture in RGB. Raises VisionError where pillow is missing or the file is no picture."""
    try:
        from PIL import Image
    except ImportError as error:
        raise VisionError(f"reading images needs pillow: {INSTALL}") from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
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
