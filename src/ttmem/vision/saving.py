"""`load`: a saved model with its mergers, or a checkpoint whose mergers are replaced on purpose."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from ttmem.errors import VisionError
from ttmem.vision.installation import check, install
from ttmem.vision.settings import BLOCK, MergerSettings, require_settings, settings_of

UNREADABLE = (OSError, LookupError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError)
"""What transformers raises for weights that are missing or damaged, files and their index."""


class Qwen3VLWithMergers(Qwen3VLForConditionalGeneration):
    """A Qwen3-VL with the mergers that its config describes, so that `from_pretrained` finds them in place."""

    def __init__(self, config: Any) -> None:
        settings = settings_of(config.vision_config)
        if settings is None:
            raise VisionError(f"the vision config has no block {BLOCK!r}: this checkpoint has its model's own mergers")
        super().__init__(config)
        delattr(config.vision_config, BLOCK)
        self.installation = install(self, settings)
        self.installation.final = True


def load(
    path: str | PathLike[str],
    settings: MergerSettings | None = None,
    processor: Any = None,
    *,
    reinitialise: bool = False,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Load a Qwen3-VL with mergers from a folder that `save_pretrained` wrote.

    settings: other mergers than the checkpoint's, for example 3 x 3 for one trained at 2 x 2, or any for one with its
    model's own mergers. Weights cannot be carried over: the mergers are then new and untrained. That must be wanted,
    by `reinitialise=True`. processor: checked against the model, or set where mergers are new.
    options: of transformers' `from_pretrained`, such as dtype and device_map.

    The model's `installation` tells what it has. It can be uninstalled only where the checkpoint has its model's own
    mergers.

    Raises VisionError for a folder without a Qwen3-VL, one with its model's own mergers and no settings, settings that
    differ from the checkpoint's without `reinitialise`, weights that are missing, damaged or of other shapes than the
    config says, and a processor that disagrees.
    """
    if settings is not None:
        require_settings(settings)
    config = _config(path)
    saved = settings_of(config.vision_config)
    wanted = settings if settings is not None else saved
    if wanted is None:
        raise VisionError(
            f"{path} has its model's own mergers, none of ttmem. Load it with transformers, or name settings and "
            "reinitialise=True for new mergers."
        )
    if wanted != saved and not reinitialise:
        m = config.vision_config.spatial_merge_size
        raise VisionError(
            f"{path} has {saved.kind if saved else 'its own'} mergers of {m} x {m} patches, and {wanted} are wanted. "
            "Their weights cannot be carried over: with reinitialise=True the mergers are new and untrained."
        )
    model = _read(path, Qwen3VLForConditionalGeneration if saved is None else Qwen3VLWithMergers, options)
    if wanted == saved and not reinitialise:
        check(model, processor)
        return model
    if saved is not None:
        model.installation.put_back()
    model.installation = install(model, wanted, processor, seed=seed)
    model.installation.final = saved is not None
    return model


def _config(path: str | PathLike[str]) -> Any:
    """The config of a folder with a Qwen3-VL."""
    if not (Path(path) / "config.json").is_file():
        raise VisionError(f"{path}: there is no model in this folder (no config.json)")
    try:
        config = AutoConfig.from_pretrained(path)
    except Exception as error:  # of many kinds, for what is no JSON and for fields of other types
        raise VisionError(
            f"{path}: its config.json cannot be read ({error}). Mend it, or copy the model's folder again."
        ) from error
    if config.model_type != "qwen3_vl":
        raise VisionError(f"{path}: a model of type {config.model_type!r}; mergers are for 'qwen3_vl'")
    return config


def _read(path: str | PathLike[str], network: Any, options: dict[str, Any]) -> Any:
    """The model, if all its weights are there and no others, in the shapes that its config says."""
    # No pickles; and other sizes are refused below, by name.
    options = {**options, "use_safetensors": True, "ignore_mismatched_sizes": True}
    try:
        model, report = network.from_pretrained(path, output_loading_info=True, **options)
    except UNREADABLE as error:
        reason = str(error).split(". ")[0].rstrip(".") or type(error).__name__
        raise VisionError(
            f"{path}: its weights cannot be read ({reason}). A file is missing or damaged: copy the folder again, or "
            "write it again with save_pretrained."
        ) from error
    wrong = [f"{name} is missing" for name in report["missing_keys"]]
    wrong += [f"{name} has no place" for name in report["unexpected_keys"]]
    wrong += [f"{name} is {list(found)} instead of {list(size)}" for name, found, size in report["mismatched_keys"]]
    if wrong:
        raise VisionError(
            f"{path}: its weights do not fit its config: {', '.join(sorted(wrong)[:5])}"
            f"{f' and {len(wrong) - 5} more' if len(wrong) > 5 else ''}. Put the config back to what the weights were "
            f"trained with ({BLOCK!r} in its vision_config for mergers), or copy the folder again."
        )
    return model
