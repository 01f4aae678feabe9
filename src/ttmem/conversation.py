"""A conversation on one memory, in the model's own chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jinja2.exceptions import TemplateError

from ttmem.errors import ModelError, QuestionError
from ttmem.generation import check_text, stream_tokens
from ttmem.memory import Memory
from ttmem.models import Model

FIRST_EXCHANGE = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "-"}]
"""Rendered before the real turns and cut off again: what a template puts before a first turn (a start token, a default
system message) belongs before the document, and between document and question it costs small models their recall."""


@dataclass
class Conversation:
    """Turns behind a document's memory. The cache holds what was said; the memory itself is never written.

    Each turn renders the whole conversation with the model's template and runs only the tokens that are not yet cached.
    Where a template renders earlier turns anew (some drop the reasoning of past replies), the cache is cut back to the
    part that still agrees.
    """

    model: Model
    memory: Memory
    system: str | None = None
    max_new_tokens: int = 256
    generate: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory.check_model(self.model)
        if not self.model.tokenizer.chat_template:
            raise ModelError(f"{self.model.name} has no chat template: ask single questions instead")
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.cache = self.memory.cache()
        self.cached: list[int] = []

    def say(self, message: str) -> str:
        """The reply to a message."""
        return "".join(self.stream(message))

    def stream(self, message: str) -> Iterator[str]:
        """The reply to a message, piece by piece. A turn that is not read to its end, or fails, is forgotten."""
        check_text(message)
        self.messages.append({"role": "user", "content": message})
        finished = False
        try:
            prompt = self._prompt()
            self._cut_back(prompt)
            new = prompt[len(self.cached) :]
            generated = yield from stream_tokens(
                self.model, self.memory, new, self.max_new_tokens, cache=self.cache, **self.generate
            )
            self.messages.append({"role": "assistant", "content": self.model.decode(generated).strip()})
            self.cached = (prompt + generated)[: self._cache_length()]
            finished = True
        finally:
            if not finished:
                self.messages.pop()
                self._keep(len(self.cached))

    def _prompt(self) -> list[int]:
        """The tokens behind the memory, up to where the next reply begins."""
        return self._render(self.messages)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Messages as tokens behind a document."""
        return render_chat(self.model, messages, True, add_generation_prompt)

    def _cut_back(self, prompt: list[int]) -> None:
        """Drop cached tokens from the first that differs from `prompt` on; at least one token must be left to run."""
        agree = 0
        for a, b in zip(self.cached, prompt[:-1], strict=False):
            if a != b:
                break
            agree += 1
        self._keep(agree)

    def _cache_length(self) -> int:
        """New tokens the cache holds behind the document."""
        return int(self.cache.get_seq_length()) - self.memory.document_length

    def _keep(self, count: int) -> None:
        """Cut the cache back to its first `count` new tokens."""
        drop = self._cache_length() - count
        if drop:
            self.cache.crop(-drop)
        self.cached = self.cached[:count]


def render_chat(
    model: Model, messages: list[dict[str, str]], behind_document: bool, add_generation_prompt: bool = True
) -> list[int]:
    """Messages in the model's chat template as tokens, up to where the next reply begins.

    Behind a document, and without a system message of their own, they begin as later turns do (`FIRST_EXCHANGE`).
    Raises ModelError where the tokenizer has no chat template, QuestionError where the template refuses the messages.
    """
    if not model.tokenizer.chat_template:
        raise ModelError(f"{model.name} has no chat template: ask single questions instead")
    text = _template(model, messages, add_generation_prompt)
    if behind_document and messages[0]["role"] != "system":
        opening = _template(model, FIRST_EXCHANGE, add_generation_prompt=False)
        behind = _template(model, FIRST_EXCHANGE + messages, add_generation_prompt)
        if behind.startswith(opening):
            text = "\n\n" + behind[len(opening) :]
    return list(model.tokenizer(text, add_special_tokens=False).input_ids)


def turns_behind(model: Model, messages: list[dict[str, str]], count: int, behind_document: bool) -> list[int]:
    """The tokens that follow the first `count` messages, up to where the next reply begins.

    Raises ModelError where the template renders earlier turns anew when later ones come.
    """
    whole = render_chat(model, messages, behind_document)
    if count == 0:
        return whole
    before = render_chat(model, messages[:count], behind_document, add_generation_prompt=False)
    if whole[: len(before)] != before:
        raise ModelError(
            f"{model.name}'s chat template renders earlier turns anew when later ones come, so they cannot be "
            "compacted apart"
        )
    return whole[len(before) :]


def _template(model: Model, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    try:
        return str(
            model.tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
        )
    except TemplateError as error:
        raise QuestionError(f"{model.name}'s chat template refuses these messages: {error}") from error
