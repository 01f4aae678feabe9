"""Sets of MAD sequences, and the accuracy that MAD reports."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ttmem.errors import TaskError
from ttmem.tasks.mad.instances import GENERATORS, IGNORE, check
from ttmem.tasks.mad.settings import MadSetting

SPLITS = ("train", "test")


@dataclass(frozen=True)
class MadData:
    """inputs, targets [examples, tokens] int64; a target is IGNORE where nothing counts."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: str) -> MadData:
        return MadData(self.inputs.to(device), self.targets.to(device))


def make_data(setting: MadSetting, split: str, seed: int) -> MadData:
    """The training or the test set. Example i is the same for the same seed, however many there are.

    Raises TaskError where the setting cannot be made, or for a split that is neither.
    """
    check(setting)
    if split not in SPLITS:
        raise TaskError(f"MAD has the splits {' and '.join(SPLITS)}, not {split!r}.")
    if seed < 0:
        raise TaskError(f"the seed is {seed}; it must be at least 0.")
    training = split == "train"
    generate = GENERATORS[setting.task]
    count = setting.train_examples if training else setting.test_examples
    made = [
        generate(setting, np.random.default_rng([seed, SPLITS.index(split), index]), training)
        for index in range(count)
    ]
    inputs, targets = (torch.from_numpy(np.stack(part).astype(np.int64)) for part in zip(*made, strict=True))
    return MadData(inputs, targets)


def class_accuracy(predictions: Tensor, targets: Tensor, classes: int) -> float:
    """Mean over classes of the part of their targets that was predicted, as MAD reports it.

    predictions, targets: int64 of one shape. A class counts where it was a target or was predicted at a counting place,
    so a token said in vain lowers the mean. 0 where nothing counts.
    """
    counts = targets != IGNORE
    right = targets[counts][predictions[counts] == targets[counts]]
    hits = torch.bincount(right, minlength=classes).double()
    asked = torch.bincount(targets[counts], minlength=classes).double()
    said = torch.bincount(predictions[counts], minlength=classes).double()
    present = (asked + said) > 0
    if not present.any():
        return 0.0
    return (hits[present] / asked[present].clamp_min(1.0)).mean().item()
