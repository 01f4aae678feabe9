"""Other patch mergers for vision-language models: groups of patches to one visual token each."""

from ttmem.vision.examples import (
    ImageText,
    ImageTextBatch,
    ImageTextEncoder,
    collate,
    load_image,
    load_image_processor,
    predict,
)
from ttmem.vision.installation import Installation, check, install
from ttmem.vision.saving import Qwen3VLWithMergers, load
from ttmem.vision.settings import KINDS, MergerSettings
from ttmem.vision.stages import STAGES, Stage, stage_parameters

__all__ = [
    "KINDS",
    "STAGES",
    "ImageText",
    "ImageTextBatch",
    "ImageTextEncoder",
    "Installation",
    "MergerSettings",
    "Qwen3VLWithMergers",
    "Stage",
    "check",
    "collate",
    "install",
    "load",
    "load_image",
    "load_image_processor",
    "predict",
    "stage_parameters",
]
