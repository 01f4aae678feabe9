"""Tokens to text as they come, with stop strings; requests to tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from threading import Lock
from typing import Any

from ttmem.conversation import render_chat, turns_behind
from ttmem.errors import QuestionError
from ttmem.models import Model

UNFINISHED = "�"
"""What a decoder writes for bytes that do not yet make a character."""


class TextStream:
    """The text of one answer, token by token. The pieces together are the decoded answer, cut before a stop string.

    Text is held back while it ends within a character, or as a stop string begins.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, tuple(stops)
        self.ids: list[int] = []
        self.start = self.read = 0  # tokens from `start` on are decoded anew; up to `read` their text is taken
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        self.ids.append(token)
        before = self._decode(self.ids[self.start : self.read])
        after = self._decode(self.ids[self.start :])
        if after.endswith(UNFINISHED) or len(after) <= len(before):
            return ""
        self.start, self.read = self.read, len(self.ids)
        return self._release(after[len(before) :], final=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        before = self._decode(self.ids[self.start : self.read])
        after = self._decode(self.ids[self.start :])
        self.start = self.read = len(self.ids)
        return self._release(after[len(before) :], final=True)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _release(self, text: str, final: bool) -> str:
        self.held += text
        found = [(self.held.find(stop), stop) for stop in self.stops]
        places = [place for place, _ in found if place >= 0]
        if places:
            self.stopped = True
            certain, self.held = self.held[: min(places)], ""
            return certain
        keep = 0 if final else max((_overlap(self.held, stop) for stop in self.stops), default=0)
        certain, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, all of it excluded."""
    for count in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:count]):
            return count
    return 0


class Encoder:
    """Requests to tokens, one at a time: a tokenizer must not encode in two threads at once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.lock = Lock()

    def text(self, text: str) -> list[int]:
        """Raw text; what looks like a special token is read as plain text."""
        check_unicode(text)
        with self.lock:
            return self.model.encode(text)

    def chat(self, messages: list[dict[str, str]], behind_document: bool) -> list[int]:
        """Messages in the model's chat template, up to where the reply begins."""
        for message in messages:
            check_unicode(message["content"])
        with self.lock:
            return render_chat(self.model, messages, behind_document)

    def behind(self, messages: list[dict[str, str]], folded: int, document: bool) -> list[int]:
        """The tokens of a chat that follow its first `folded` messages. Raises ModelError where the chat template
        renders earlier messages anew when later ones come."""
        for message in messages:
            check_unicode(message["content"])
        with self.lock:
            return turns_behind(self.model, messages, folded, document)


def decoder(model: Model) -> Any:
    """A tokenizer of its own for the engine's thread."""
    return copy.deepcopy(model.tokenizer)


def check_unicode(text: str) -> None:
    """Raise QuestionError for lone surrogates, which no encoding can write."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise QuestionError("not valid text: it holds a lone surrogate, which no encoding can write")
