"""The same arguments give the same example: in any order, in any process, at any length."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from ttmem.errors import TaskError
from ttmem.tasks import GROUPS, make_task
from ttmem.tasks.sizing import count_tokens

GENERATED = ["phonebook", "facts", *GROUPS["ruler"], *GROUPS["babi"]]
DIGEST = """
import hashlib
from ttmem.tasks import GROUPS, make_task
names = ["phonebook", "facts", *GROUPS["ruler"], *GROUPS["babi"]]
examples = [repr(make_task(name).example(str.split, 900, 4, 11)) for name in {order}(names)]
print(hashlib.sha256("".join(sorted(examples)).encode()).hexdigest())
"""


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def digest(order: str, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", DIGEST.format(order=order)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_every_process_makes_the_same_examples() -> None:
    examples = [repr(make_task(name).example(encode, 900, 4, 11)) for name in GENERATED]
    here = hashlib.sha256("".join(sorted(examples)).encode()).hexdigest()
    assert here == digest("list", "1") == digest("reversed", "2")


@pytest.mark.parametrize("name", GENERATED)
def test_examples_do_not_depend_on_what_was_made_before(name: str) -> None:
    task = make_task(name)
    first = task.example(encode, 1000, 2, 5)
    task.example(encode, 2000, 3, 5)
    assert task.example(encode, 1000, 2, 5) == first
    assert make_task(name).example(encode, 1000, 2, 5) == first
    others = [task.example(encode, 1000, index, seed) for index, seed in ((3, 5), (2, 6))]
    assert first not in others
    assert others[0] != others[1]


@pytest.mark.parametrize("name", GENERATED)
def test_a_tokenizer_with_merges_is_filled_as_well(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Token counts of pieces do not add up there: the whole must still fit, and nearly fill the length."""

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    example = make_task(name).example(tokens, 9000, 0, 0)
    assert 8300 < count_tokens(tokens, example) <= 9000
    assert all(reference in example.document for question in example.questions for reference in question.references[:1])


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("length", [1, 20])
def test_impossible_lengths_end_with_an_error(name: str, length: int) -> None:
    with pytest.raises(TaskError, match=f"{name} cannot be built with {length} tokens"):
        make_task(name).example(encode, length, 0, 0)
