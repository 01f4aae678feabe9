"""One sequence of each MAD task: token ids, and for each position the token that counts, or IGNORE.

Training and test sequences differ for the recall tasks: in training every next token is a target, in tests only the
values of keys that the sequence has shown before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from ttmem.errors import TaskError
from ttmem.tasks.mad.settings import MadSetting

IGNORE = -100
"""The target of a position that does not count, as torch's cross entropy has it."""
MAP_SEED = 12345
"""Of memorisation's keys and values, the same in every sequence of every run."""

Ids = NDArray[np.int64]
Instance = tuple[Ids, Ids]
Motif = tuple[int, ...]


def _halves(symbols: int) -> tuple[Ids, Ids]:
    """Symbols of keys and symbols of values."""
    return np.arange(symbols // 2), np.arange(symbols // 2, symbols)


def _shifted(ids: list[int], counts: list[int], training: bool) -> Instance:
    """Inputs and the next tokens: all of them in training, in tests those that count."""
    tokens, targets = np.array(ids), np.array(counts)
    return tokens[:-1], (tokens if training else targets)[1:]


def recall(setting: MadSetting, rng: Generator, training: bool) -> Instance:
    """Key, value, key, value, ...: a key seen before has the value that it had. The last pair's key is such a one.

    With noise (the noisy task), a pair is two noise symbols with that probability; one pair at least is none.
    """
    symbols = setting.vocabulary - setting.noise_vocabulary
    key_symbols, value_symbols = _halves(symbols)
    pairs = setting.length // 2 - 1
    keys, values = rng.choice(key_symbols, pairs).tolist(), rng.choice(value_symbols, pairs).tolist()
    noisy = rng.random(pairs) < setting.noise
    noisy[rng.integers(pairs)] = False
    noise = rng.integers(symbols, symbols + max(1, setting.noise_vocabulary), (pairs, 2)).tolist()
    known: dict[int, int] = {}
    ids: list[int] = []
    counts: list[int] = []
    for key, fresh, is_noise, symbols_of_noise in zip(keys, values, noisy.tolist(), noise, strict=True):
        if is_noise:
            ids += symbols_of_noise
            counts += [IGNORE, IGNORE]
            continue
        seen = key in known
        value = known.setdefault(key, fresh)
        ids += [key, value]
        counts += [IGNORE, value if seen else IGNORE]
    asked = list(known)[rng.integers(len(known))]
    return _shifted([*ids, asked, known[asked]], [*counts, IGNORE, known[asked]], training)


def _motifs(symbols: Ids, most: int, fixed: bool, count: int, rng: Generator) -> list[Motif]:
    """Sequences of different symbols, of any length up to `most`, or all of that length."""
    orders = rng.random((count, len(symbols))).argsort(axis=1)[:, :most]
    sizes = np.full(count, most) if fixed else rng.integers(1, most + 1, count)
    return [tuple(row[:size]) for row, size in zip(symbols[orders].tolist(), sizes.tolist(), strict=True)]


def fuzzy(setting: MadSetting, rng: Generator, training: bool) -> Instance:
    """Recall with keys and values of several tokens, of any length up to the longest (in tests, keys of just that).

    The last pair repeats one that was planted; what the pairs do not fill is padding in front.
    """
    symbols, padding = setting.vocabulary - 1 - setting.noise_vocabulary, setting.vocabulary - 1
    key_symbols, value_symbols = _halves(symbols)
    if setting.noise_vocabulary < 0:
        raise TaskError(f"MAD's noise_vocabulary is {setting.noise_vocabulary}; it must be at least 0.")
    longest = setting.key_tokens + setting.value_tokens
    many = setting.length // 2 + 1
    (asked, *keys) = _motifs(key_symbols, setting.key_tokens, not training, many, rng)
    (answer, *values) = _motifs(value_symbols, setting.value_tokens, False, many, rng)
    size = len(asked) + len(answer)
    room = setting.length - size - longest
    planted_at = rng.integers(max(1, room - longest))  # so early that no pair before it can end the loop
    known: dict[Motif, Motif] = {}
    ids: list[int] = []
    counts: list[int] = []
    for drawn, fresh in zip(keys, values, strict=True):
        if len(ids) >= room:
            break
        key = asked if len(ids) >= planted_at and asked not in known else drawn
        seen = key in known
        value = known.setdefault(key, answer if key == asked else fresh)
        ids += [*key, *value]
        counts += [IGNORE] * len(key) + (list(value) if seen else [IGNORE] * len(value))
    ids += [*asked, *answer]
    counts += [IGNORE] * len(asked) + list(answer)
    front = setting.length + 1 - len(ids)
    return _shifted([padding] * front + ids, [IGNORE] * front + counts, training)


@lru_cache(maxsize=8)
def memorised(vocabulary: int) -> dict[int, int]:
    """The values of all keys: one token each, without repetition, the same for every sequence."""
    rng = np.random.default_rng(MAP_SEED)
    keys, values = _halves(vocabulary - 1)
    return dict(zip(rng.permutation(keys).tolist(), rng.permutation(values).tolist(), strict=False))


def memorisation(setting: MadSetting, rng: Generator, training: bool) -> Instance:
    """Key, blank, key, blank, ...: at each blank the key's value, which no sequence ever shows."""
    values = memorised(setting.vocabulary)
    keys = rng.choice(np.array(list(values)), setting.length // 2)
    ids = np.full((len(keys), 2), setting.vocabulary - 1)
    targets = np.full((len(keys), 2), IGNORE)
    ids[:, 0], targets[:, 1] = keys, [values[key] for key in keys.tolist()]
    return ids.reshape(-1), targets.reshape(-1)


def compression(setting: MadSetting, rng: Generator, training: bool) -> Instance:
    """Random tokens and a last one behind which all are to be decoded from a single vector; see `AutoEncoder`."""
    last = setting.vocabulary - 1
    ids = np.append(rng.integers(0, last, setting.length - 1), last)
    return ids, ids.copy()


def copying(setting: MadSetting, rng: Generator, training: bool) -> Instance:
    """Tokens among blanks, a token that asks for them, and as many blanks at which they are to be said in order."""
    ask, blank = setting.vocabulary - 1, setting.vocabulary - 2
    blanks = setting.length - 2 * setting.copies - 1
    tokens = rng.integers(0, blank, setting.copies)
    before = np.bincount(rng.integers(0, setting.copies, blanks), minlength=setting.copies)
    hidden = [part for gap, token in zip(before, tokens, strict=True) for part in (*[blank] * gap, int(token))]
    ids = np.array([*hidden, ask, *[blank] * setting.copies])
    targets = np.full(len(ids), IGNORE)
    targets[-setting.copies :] = tokens
    return ids, targets


GENERATORS: dict[str, Callable[[MadSetting, Generator, bool], Instance]] = {
    "recall": recall,
    "noisy": recall,
    "fuzzy": fuzzy,
    "memorisation": memorisation,
    "compression": compression,
    "copying": copying,
}


def check(setting: MadSetting) -> None:
    """Raise TaskError for a setting of which no sequence can be made."""
    if setting.task not in GENERATORS:
        raise TaskError(f"MAD has no task {setting.task!r}; it has {', '.join(GENERATORS)}.")
    for name in ("train_examples", "test_examples", "key_tokens", "value_tokens"):
        if getattr(setting, name) < 1:
            raise TaskError(f"MAD's {name} is {getattr(setting, name)}; it must be at least 1.")
    if setting.noise_vocabulary < 0:
        raise TaskError(f"MAD's noise_vocabulary is {setting.noise_vocabulary}; it must be at least 0.")
    longest = setting.key_tokens + setting.value_tokens
    special = {"recall": 0, "noisy": 0, "fuzzy": 1, "memorisation": 1, "compression": 1, "copying": 2}[setting.task]
    symbols = setting.vocabulary - special - setting.noise_vocabulary
    shortest = {
        "recall": 4,
        "noisy": 4,
        "fuzzy": 3 * longest,
        "memorisation": 2,
        "compression": 2,
        "copying": 2 * setting.copies + 1,
    }[setting.task]
    paired = setting.task in ("recall", "noisy", "memorisation")
    needed = 2 * max(setting.key_tokens, setting.value_tokens) if setting.task == "fuzzy" else 2
    if setting.length < shortest or (paired and setting.length % 2):
        raise TaskError(
            f"{setting.task} cannot be made with {setting.length} tokens: it takes {shortest} or more"
            + (", an even number." if paired else ".")
        )
    if symbols < needed:
        raise TaskError(
            f"{setting.task} cannot be made from a vocabulary of {setting.vocabulary}: without special symbols and "
            f"noise, {symbols} are left, and it takes {needed}."
        )
    if not 0 <= setting.noise < 1 or (setting.noise and not setting.noise_vocabulary):
        raise TaskError(
            f"a noise of {setting.noise} with {setting.noise_vocabulary} noise symbols: it has to be from 0 to "
            "below 1, and above 0 there have to be symbols."
        )
    if setting.task == "copying" and setting.copies < 1:
        raise TaskError("copying needs at least one token to copy.")
