"""What MAD runs: a baseline of each task, one change of difficulty at a time, and the sweep over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ttmem.errors import TaskError


@dataclass(frozen=True)
class MadSetting:
    """One task at one difficulty.

    vocabulary: all token ids, special ones and noise included. length: tokens of a sequence; a model is given all of
    them, but for the last one in recall and noisy recall, which is a target only.
    noise: part of the key-value pairs that are noise instead, from `noise_vocabulary` symbols of its own.
    copies: tokens to copy. key_tokens, value_tokens: the longest keys and values of fuzzy recall.
    """

    task: str
    vocabulary: int
    length: int
    train_examples: int = 12_800
    test_examples: int = 1_280
    noise: float = 0.0
    noise_vocabulary: int = 0
    copies: int = 0
    key_tokens: int = 1
    value_tokens: int = 1


_BASELINES = {
    "recall": MadSetting("recall", 16, 128),
    "noisy": MadSetting("noisy", 32, 128, noise=0.2, noise_vocabulary=16),
    "fuzzy": MadSetting("fuzzy", 16, 128, key_tokens=3, value_tokens=3),
    "memorisation": MadSetting("memorisation", 256, 32, train_examples=256),
    "compression": MadSetting("compression", 16, 32),
    "copying": MadSetting("copying", 16, 256, copies=16),
}
_EXAMPLES = (6400, 3200, 1600, 800)
_CHANGES: dict[str, dict[str, tuple[Any, ...]]] = {
    "recall": {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train_examples": _EXAMPLES},
    "noisy": {
        "vocabulary": (48, 80, 144),
        "length": (256, 512, 1024),
        "train_examples": _EXAMPLES,
        "noise": (0.4, 0.6, 0.8),
    },
    "fuzzy": {"vocabulary": (32, 64, 128), "length": (256, 512, 1024), "train_examples": _EXAMPLES},
    "memorisation": {"vocabulary": (512, 1024, 2048, 4096, 8192)},
    "compression": {"vocabulary": (32, 64, 128), "length": (64, 128, 256), "train_examples": _EXAMPLES},
    "copying": {
        "vocabulary": (32, 64, 128),
        "length": (512, 1024),
        "train_examples": _EXAMPLES,
        "copies": (32, 64, 96),
    },
}
TASKS = tuple(_BASELINES)


@dataclass(frozen=True)
class Sweep:
    """How every setting is trained: each rate with each weight decay, and the best test accuracy counts."""

    rates: tuple[float, ...] = (1e-4, 5e-4, 1e-3)
    weight_decays: tuple[float, ...] = (0.0, 0.1)
    batch: int = 128
    epochs: int = 200
    lowest_rate: float = 1e-6
    """Where the cosine ends."""
    seed: int = 12345


FULL = Sweep()
REDUCED = Sweep(rates=(2e-3,), weight_decays=(0.0,), batch=32, epochs=12)
"""For a CPU, with the settings of `reduced`: 1,200 steps instead of 20,000."""


def baseline(task: str) -> MadSetting:
    """The task as MAD runs it before anything is changed. Raises TaskError for an unknown name."""
    if task not in _BASELINES:
        raise TaskError(f"MAD has no task {task!r}; it has {', '.join(TASKS)}.")
    return _BASELINES[task]


def grid(tasks: Iterable[str] = TASKS) -> list[MadSetting]:
    """All settings: the baseline of each task, and it with one change at a time. 66 for all six tasks."""
    settings = []
    for task in tasks:
        first = baseline(task)
        settings.append(first)
        for name, values in _CHANGES[task].items():
            settings += [replace(first, **{name: value}) for value in values]
    return settings


def reduced(tasks: Iterable[str] = TASKS, every: bool = False) -> list[MadSetting]:
    """The baselines, or `every` setting, with fewer sequences, so that a run takes a CPU one to five minutes."""
    settings = grid(tasks) if every else map(baseline, tasks)
    return [replace(one, train_examples=min(one.train_examples, 3200), test_examples=320) for one in settings]


def reduced_sweep(setting: MadSetting) -> Sweep:
    """`REDUCED`; for memorisation with as many steps as in full, 400: its 256 sequences are few enough for a CPU."""
    if setting.task != "memorisation":
        return REDUCED
    steps = FULL.epochs * (setting.train_examples // FULL.batch)
    return replace(REDUCED, epochs=steps // (setting.train_examples // REDUCED.batch))
