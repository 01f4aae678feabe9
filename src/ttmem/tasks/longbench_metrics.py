"""LongBench's metrics, each (answer, reference) -> 0..1, with the results of the benchmark's own scorer."""

from __future__ import annotations

import difflib
import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ttmem.errors import TaskError

JIEBA_INSTALL = "pip install jieba"
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # full width
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)
TINY = 1e-8
"""What keeps ROUGE's F finite; part of the published figures."""


def qa_f1(answer: str, reference: str) -> float:
    """F1 of the words, lower case, without punctuation and articles (SQuAD's)."""
    return _f1(_english_words(answer), _english_words(reference))


def qa_f1_zh(answer: str, reference: str) -> float:
    """F1 of the words that jieba finds, without punctuation."""
    return _f1(_chinese_words(answer), _chinese_words(reference))


def rouge_l(answer: str, reference: str) -> float:
    """F of summary-level ROUGE-L, as the package `rouge` computes it.

    Sentences end at full stops. Of each reference sentence those words count that lie on its longest common
    subsequence with any sentence of the answer; a word counts once in the whole text, in lengths as in matches.
    """
    said, wanted = _sentences(answer), _sentences(reference)
    if not said or not wanted:
        return 0.0
    matched = {word for each in wanted for sentence in said for word in _common_subsequence(each, sentence)}
    precision = len(matched) / len({word for sentence in said for word in sentence})
    recall = len(matched) / len({word for sentence in wanted for word in sentence})
    return 2.0 * precision * recall / (precision + recall + TINY)


def rouge_l_zh(answer: str, reference: str) -> float:
    """ROUGE-L of the words that jieba finds."""
    return rouge_l(" ".join(_cut(answer)), " ".join(_cut(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the answer) if the right one is among them.

    A class whose name is only a part of the right one's does not count as named.
    """
    named = [each for each in classes if each in answer and (each == reference or each not in reference)]
    return 1.0 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """Share of the answer's numbers that are the reference's ("Paragraph 7", "段落7")."""
    number = re.search(r"\d+", reference)
    return count(answer, number.group() if number else reference)


def count(answer: str, reference: str) -> float:
    """Share of the answer's numbers that equal the reference."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, reference: str) -> float:
    """Similarity of the answer's first line that is no comment or code fence, in whole percent, as in fuzzywuzzy."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100 if line and reference else 0.0


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    same = sum((Counter(said) & Counter(wanted)).values())
    return 2.0 * same / (len(said) + len(wanted)) if same else 0.0


def _english_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    bare = ("".join(word.lower().translate(NO_CHINESE_PUNCTUATION).split()) for word in _cut(text))
    return [word for word in bare if word]


def _cut(text: str) -> list[str]:
    """The words of a Chinese text. Raises TaskError when jieba is missing."""
    try:
        jieba: Any = importlib.import_module("jieba")
    except ImportError as error:
        raise TaskError(f"scoring Chinese answers needs the package 'jieba': {JIEBA_INSTALL}") from error
    return list(jieba.cut(text, cut_all=False))


def _sentences(text: str) -> list[list[str]]:
    """Sentences as lists of words. One of blanks alone is a sentence with one empty word, as in `rouge`."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A longest common subsequence; where there are several, the one that `rouge` takes."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for column, other in enumerate(second):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        lengths.append(row)
    common = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            common.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common[::-1]
