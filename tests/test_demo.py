"""The demo's document and questions."""

from __future__ import annotations

from ttmem.demo import document, questions


def test_the_document_answers_its_questions_in_order() -> None:
    text = document()
    assert text == text.strip() + "\n" or text == text.strip()
    assert len(text) > 5000
    asked = questions()
    assert len(asked) >= 10
    assert len({item.question for item in asked}) == len(asked)
    for item in asked:
        assert item.question.endswith("?")
        assert item.answer in " ".join(text.split())
        assert item.answer not in item.question
