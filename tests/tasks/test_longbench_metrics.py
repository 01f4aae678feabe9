"""LongBench's metrics, against figures of the packages that its own scorer uses (rouge 1.0.1, fuzzywuzzy 0.18)."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from ttmem.errors import TaskError
from ttmem.tasks.longbench_metrics import (
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    retrieval,
    rouge_l,
    rouge_l_zh,
)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The Eiffel Tower!", "an eiffel tower", 1.0),
        ("It is in Paris, France.", "Paris", 2 * 1 * 0.2 / 1.2),
        ("yes yes yes", "yes no", 2 / 5),
        ("a the", "x", 0.0),
        ("", "x", 0.0),
    ],
)
def test_f1_of_words(answer: str, reference: str, f1: float) -> None:
    assert qa_f1(answer, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "reference", "f"),
    [
        ("the cat sat on the mat", "the cat lay on the mat", 0.7999999950000002),
        ("police killed the gunman. the end", "police kill the gunman", 0.6666666617283951),
        ("the gunman kill police", "police kill the gunman", 0.4999999950000001),
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 0.6153846106508877),
        ("a b. c d.", "c d. a b e", 0.8888888839506174),
        ("", "a", 0.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l(answer: str, reference: str, f: float) -> None:
    assert rouge_l(answer, reference) == pytest.approx(f, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "reference", "similarity"),
    [
        ("return x + 1", "return x + 2", 0.92),
        ("\n\n    for i in range(10):\nprint(i)", "for i in range(n):", 0.83),
        ("# first\n```\n// second\nabc\nxyz", "xyz", 0.0),
        ("abc", "abc", 1.0),
        ("# only a comment", "abc", 0.0),
    ],
)
def test_code(answer: str, reference: str, similarity: float) -> None:
    assert code_similarity(answer, reference) == similarity


def test_numbers() -> None:
    assert count("There are 7 of them, or 17, or 7.", "7") == pytest.approx(2 / 3)
    assert count("seven", "7") == 0
    assert retrieval("Paragraph 12", "Paragraph 12") == 1
    assert retrieval("1 or 12", "Paragraph 12") == 0.5
    assert retrieval("段落3", "段落3") == 1


def test_classes() -> None:
    classes = ("Date", "Other location", "location", "Number of something")
    assert classification("Type: Date", "Date", classes) == 1
    assert classification("Date or Number of something", "Date", classes) == 0.5
    assert classification("Other location", "Other location", classes) == 1
    assert classification("Other location", "location", classes) == 0.5
    assert classification("date", "Date", classes) == 0


def test_chinese_needs_jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TaskError, match="pip install jieba"):
        qa_f1_zh("北京", "北京")


def test_chinese_words_lose_their_punctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cutter that splits at every sign, as jieba would at least."""
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(cut=lambda text, cut_all: list(text)))
    assert qa_f1_zh("北京。", "“北京”") == 1
    assert qa_f1_zh("北京市", "北京") == pytest.approx(0.8)
    assert rouge_l_zh("天气好", "天气坏") == pytest.approx(2 / 3, abs=1e-7)
