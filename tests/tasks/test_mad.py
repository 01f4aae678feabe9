"""MAD: each sequence is what its task says, checked by reading it again; counts, determinism and the score."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.mad import FULL, TASKS, MadSetting, baseline, class_accuracy, grid, make_data
from ttmem.tasks.mad.instances import IGNORE, memorised


def rows(setting: MadSetting, split: str, seed: int = 0, count: int = 20) -> list[tuple[list[int], list[int]]]:
    few = replace(setting, train_examples=count, test_examples=count)
    data = make_data(few, split, seed)
    return list(zip(data.inputs.tolist(), data.targets.tolist(), strict=True))


def whole(inputs: list[int], targets: list[int]) -> list[int]:
    """The sequence before it was shifted; its last token is a target."""
    return [*inputs, targets[-1]]


def test_the_full_benchmark_has_396_runs() -> None:
    assert [len(grid([task])) for task in TASKS] == [11, 14, 11, 6, 11, 13]
    assert len(grid()) * len(FULL.rates) * len(FULL.weight_decays) == 396
    assert len(set(grid())) == 66


@pytest.mark.parametrize("setting", grid(), ids=str)
def test_every_setting_of_the_benchmark_can_be_made(setting: MadSetting) -> None:
    shifted = setting.task in ("recall", "noisy")
    for split in ("train", "test"):
        data = make_data(replace(setting, train_examples=2, test_examples=2), split, 0)
        assert data.inputs.shape == data.targets.shape == (2, setting.length - shifted)
        assert int(data.inputs.min()) >= 0
        assert int(data.inputs.max()) < setting.vocabulary
        counting = data.targets[data.targets != IGNORE]
        assert int(counting.min()) >= 0
        assert int(counting.max()) < setting.vocabulary
        assert (data.targets != IGNORE).any(dim=1).all()


@pytest.mark.parametrize("task", ["recall", "noisy"])
def test_recall_asks_for_the_values_of_keys_that_were_shown(task: str) -> None:
    setting = baseline(task)
    symbols = setting.vocabulary - setting.noise_vocabulary
    noisy_pairs = pairs = 0
    for inputs, targets in rows(setting, "test"):
        sequence, known = whole(inputs, targets), {}
        for at in range(0, setting.length, 2):
            key, value = sequence[at : at + 2]
            pairs += 1
            if key >= symbols:
                noisy_pairs += 1
                assert value >= symbols
                assert targets[at] == IGNORE
                continue
            assert key < symbols // 2 <= value < symbols
            assert targets[at] == (value if key in known else IGNORE)
            if at:
                assert targets[at - 1] == IGNORE
            assert known.setdefault(key, value) == value
        assert targets[-1] != IGNORE
    assert abs(noisy_pairs / pairs - setting.noise) < 0.05


def test_recall_trains_on_every_next_token() -> None:
    for inputs, targets in rows(baseline("noisy"), "train"):
        assert targets[:-1] == inputs[1:]


@given(
    st.integers(0, 1000),
    st.sampled_from(["train", "test"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([13, 16, 32]),
    st.integers(0, 60),
)
@settings(max_examples=60)
def test_fuzzy_recall_can_be_read_again(
    seed: int, split: str, keys: int, values: int, vocabulary: int, extra: int
) -> None:
    length = 3 * (keys + values) + extra
    setting = MadSetting("fuzzy", vocabulary, length, key_tokens=keys, value_tokens=values)
    symbols, padding = (vocabulary - 1) // 2, vocabulary - 1
    for inputs, targets in rows(setting, split, seed, 3):
        sequence = whole(inputs, targets)
        assert len(inputs) == length
        tokens = [token for token in sequence if token != padding]
        assert sequence == [padding] * (length + 1 - len(tokens)) + tokens
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected: list[int] = []
        last_seen = False
        at = 0
        while at < len(tokens):
            end = at
            while end < len(tokens) and tokens[end] < symbols:
                end += 1
            key, start = tuple(tokens[at:end]), end
            while end < len(tokens) and tokens[end] >= symbols:
                end += 1
            value = tuple(tokens[start:end])
            assert 1 <= len(key) <= keys
            assert 1 <= len(value) <= values
            assert split == "train" or len(key) == keys
            assert len(set(key)) == len(key)
            assert len(set(value)) == len(value)
            last_seen = key in known
            expected += [IGNORE] * len(key) + (list(value) if last_seen else [IGNORE] * len(value))
            assert known.setdefault(key, value) == value
            at = end
        assert last_seen, "the last key has been shown before"
        if split == "test":
            assert targets[-len(expected) + 1 :] == expected[1:]
        else:
            assert targets == sequence[1:]


def test_memorisation_asks_for_the_same_values_everywhere() -> None:
    setting = baseline("memorisation")
    known = memorised(setting.vocabulary)
    assert len(known) == len(set(known.values())) == 127
    for split in ("train", "test"):
        for inputs, targets in rows(setting, split, seed=3):
            assert inputs[1::2] == [255] * 16
            assert targets[0::2] == [IGNORE] * 16
            assert targets[1::2] == [known[key] for key in inputs[0::2]]


def test_compression_asks_for_its_own_tokens() -> None:
    for inputs, targets in rows(baseline("compression"), "test"):
        assert inputs == targets
        assert inputs[-1] == 15
        assert max(inputs[:-1]) < 15


def test_copying_asks_for_what_is_not_blank_in_order() -> None:
    setting = baseline("copying")
    for inputs, targets in rows(setting, "train"):
        ask = inputs.index(15)
        said = [token for token in inputs[:ask] if token != 14]
        assert len(said) == setting.copies
        assert inputs[ask + 1 :] == [14] * setting.copies
        assert targets == [IGNORE] * (ask + 1) + said


@pytest.mark.parametrize("task", TASKS)
def test_sets_depend_on_seed_and_split_and_nothing_else(task: str) -> None:
    torch.manual_seed(1)
    first = rows(baseline(task), "train", 5, 4)
    torch.manual_seed(2)
    assert rows(baseline(task), "train", 5, 9)[:4] == first
    assert rows(baseline(task), "train", 6, 4) != first
    assert [inputs for inputs, _ in rows(baseline(task), "test", 5, 4)] != [inputs for inputs, _ in first]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (replace(baseline("recall"), task="rhyme"), "rhyme"),
        (replace(baseline("recall"), length=127), "even"),
        (replace(baseline("recall"), length=2), "2 tokens"),
        (replace(baseline("recall"), vocabulary=1), "vocabulary of 1"),
        (replace(baseline("noisy"), noise_vocabulary=31), "1 are left"),
        (replace(baseline("noisy"), noise=1.0), "noise of 1.0"),
        (replace(baseline("recall"), noise=0.1), "noise"),
        (replace(baseline("fuzzy"), length=17), "18"),
        (replace(baseline("fuzzy"), vocabulary=6), "takes 6"),
        (replace(baseline("copying"), copies=128), "257"),
        (replace(baseline("copying"), copies=0), "at least one"),
        (replace(baseline("recall"), train_examples=0), "train_examples is 0"),
        (replace(baseline("fuzzy"), key_tokens=0), "key_tokens is 0"),
        (replace(baseline("recall"), noise_vocabulary=-4), "noise_vocabulary is -4"),
    ],
)
def test_impossible_settings_say_so(setting: MadSetting, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        make_data(setting, "train", 0)


def test_unknown_names_say_so() -> None:
    with pytest.raises(TaskError, match="rhyme"):
        baseline("rhyme")
    with pytest.raises(TaskError, match="dev"):
        make_data(baseline("recall"), "dev", 0)


def test_accuracy_is_the_mean_over_classes() -> None:
    targets = torch.tensor([[0, 0, 0, 1, IGNORE]])
    assert class_accuracy(torch.tensor([[0, 0, 0, 1, 2]]), targets, 4) == 1.0
    assert class_accuracy(torch.tensor([[0, 0, 0, 0, 2]]), targets, 4) == 0.5
    assert class_accuracy(torch.tensor([[0, 0, 0, 3, 2]]), targets, 4) == pytest.approx(1 / 3)
    assert class_accuracy(targets, torch.full_like(targets, IGNORE), 4) == 0.0
