"""`load`: a saved model with its mergers, or a checkpoint whose mergers are replaced on purpose."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoConfig, Qwen3VLForConditionalGeneration

from ttmem.errors import VisionError
from ttmem.vision.installation import check, install
from ttmem.vision.settings import BLOCK, MergerSettings, settings_of


class Qwen3VLWithMergers(Qwen3VLForConditionalGeneration):
    """A Qwen3-VL with the mergers that its config describes, so that `from_pretrained` finds them in place."""

    def __init__(self, config: Any) -> None:
        settings = settings_of(config.vision_config)
        if settings is None:
            raise VisionError(f"the vision config has no block {BLOCK!r}: this checkpoint has its model's own mergers")
        super().__init__(config)
        delattr(config.vision_config, BLOCK)
        self.installation = install(self, settings)


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

    Raises VisionError for a folder without a Qwen3-VL, one with its model's own mergers and no settings, settings that
    differ from the checkpoint's without `reinitialise`, weights that are missing, and a processor that disagrees.
    """
    if not (Path(path) / "config.json").is_file():
        raise VisionError(f"{path}: there is no model in this folder (no config.json)")
    config = AutoConfig.from_pretrained(path)
    if config.model_type != "qwen3_vl":
        raise VisionError(f"{path}: a model of type {config.model_type!r}; mergers are for 'qwen3_vl'")
    saved = settings_of(config.vision_config)
    wanted = settings or saved
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
        model.installation.uninstall()
    model.installation = install(model, wanted, processor, seed=seed)
    return model


def _read(path: str | PathLike[str], network: Any, options: dict[str, Any]) -> Any:
    model, report = network.from_pretrained(path, output_loading_info=True, **options)
    wrong = sorted({*map(str, report["missing_keys"]), *map(str, report["unexpected_keys"])})
    if wrong or report["mismatched_keys"]:
        raise VisionError(f"{path}: weights do not fit the config: {', '.join(wrong[:5]) or report['mismatched_keys']}")
    return model
