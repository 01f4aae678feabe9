"""Conversations that compact themselves: older turns become a memory, the latest stay as they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ttmem.compaction.chain import Chain
from ttmem.compaction.document import Document
from ttmem.compaction.extend import METHODS
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import preset_settings
from ttmem.conversation import Conversation, render_chat, turns_behind
from ttmem.errors import BudgetError
from ttmem.memory.merging import check_joinable
from ttmem.models import Model
from ttmem.progress import Progress

WHOLE = 0.0
"""The ratio of a part that is kept whole and does not age: the system message."""


FIRST_USER = {"role": "user", "content": "-"}


def with_system(system: str | None, *messages: dict[str, str]) -> list[dict[str, str]]:
    """Messages behind a system message, where there is one."""
    return ([] if system is None else [{"role": "system", "content": system}]) + list(messages)


def system_alone(render: Callable[[list[dict[str, str]]], list[int]], system: str | None) -> list[int]:
    """The tokens of the system message; none without one, or where the template puts it into the first turn."""
    if system is None:
        return []
    try:
        alone = render(with_system(system))
    except Exception:  # templates raise what they like for a conversation without a user
        return []
    turn = render(with_system(system, FIRST_USER))
    return alone if turn[: len(alone)] == alone else []


@dataclass(frozen=True)
class Folding:
    """When and how older turns are compacted.

    threshold: tokens of turns that are kept whole, at most; beyond it, all but the latest turns are folded. keep:
    tokens of the latest turns that then stay whole, as far as whole exchanges fit. ratios: how much smaller a folded
    part is, by how often there has been folding since: the first when it is folded, the last for all that is older.
    """

    threshold: int = 2048
    keep: int = 512
    ratios: tuple[float, ...] = (8.0, 16.0, 32.0)
    preset: str = "quick"
    method: str = "latent"

    def __post_init__(self) -> None:
        if not 0 <= self.keep < self.threshold:
            raise BudgetError(f"{self.keep} tokens to keep of {self.threshold}: keep at least 0, and fewer than those")
        if self.method not in METHODS:
            raise BudgetError(f"the method {self.method!r} cannot fold turns; {', '.join(METHODS)} can")
        if not self.ratios or not all(ratio >= 1 for ratio in self.ratios) or list(self.ratios) != sorted(self.ratios):
            raise BudgetError(f"the ratios are {self.ratios}: they must be 1 or more, and not fall with age")


@dataclass(frozen=True)
class Fold:
    """One folding: messages and tokens it took, what they are kept at, and all that is folded by now.

    parts: (tokens, ratio) of every folded part, oldest first. entries: KV pairs of all folded parts and what lies
    before them. seconds: that the folding took.
    """

    messages: int
    tokens: int
    ratio: float
    parts: tuple[tuple[int, float], ...]
    entries: int
    seconds: float


@dataclass
class LongConversation(Conversation):
    """A conversation whose older turns are compacted once it has become long, instead of cut or summarised.

    The system message, where the template renders it apart, and the latest turns stay whole. Folded turns lie behind
    the document, each part compacted behind those before it; the older a part, the smaller. `folds` says what was done.
    Memory and positions of the document are never changed. Turns use positions as before, so the model's limit still
    ends a conversation.
    """

    folding: Folding = field(default_factory=Folding)
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    document: bool = True
    """Whether `memory` is of a document; if not, of what the template puts first (see `start`)."""
    chain: Chain = field(init=False, repr=False)
    folds: list[Fold] = field(init=False, repr=False)
    folded: int = field(init=False, repr=False)
    """Messages that the memory holds."""

    @classmethod
    def start(cls, model: Model, system: str | None = None, **settings: Any) -> LongConversation:
        """A conversation without a document. What the template puts first is kept whole: the system message, or its
        first token where there is none. `settings`: the other fields.
        """

        def render(messages: list[dict[str, str]]) -> list[int]:
            return render_chat(model, messages, behind_document=False, add_generation_prompt=False)

        head = system_alone(render, system) or render(with_system(system, FIRST_USER))[:1]
        memory = Prepared(model, Document("opening", "", torch.tensor(head))).full
        return cls(model, memory, system=system, document=False, **settings)

    def reset(self) -> None:
        """Forget all turns, folded ones too."""
        if hasattr(self, "chain"):
            self.memory = self.chain.base
        check_joinable(self.memory)
        settings, method = preset_settings(self.folding.preset), self.folding.method
        self.chain = Chain(self.model, self.memory, settings, method, self.seed, self.progress)
        opening = self._opening()
        if opening and self.document:  # what `start` does for a conversation without a document
            self.chain.append(torch.tensor(opening), WHOLE)
            self.memory = self.chain.memory()
        self.folds = []
        super().reset()
        self.folded = len(self.messages) if opening else 0

    def _opening(self) -> list[int]:
        """The system message as tokens, where the template renders it apart from the turns; empty where it does not."""
        return system_alone(lambda messages: self._render(messages, add_generation_prompt=False), self.system)

    def _prompt(self) -> list[int]:
        """What is not folded, after folding where it has become too long."""
        self.fold_when_long()
        return self._behind(self.folded)

    def fold_when_long(self) -> Fold | None:
        """Fold if more tokens than the threshold are not folded. Done before each reply."""
        if not any(message["role"] == "user" for message in self.messages):
            return None
        return self.fold() if len(self._behind(self.folded)) > self.folding.threshold else None

    def _behind(self, count: int) -> list[int]:
        """The tokens that follow the first `count` messages, up to where the next reply begins."""
        whole = turns_behind(self.model, self.messages, count, self.document)
        return whole if count else whole[len(self._before(0)) :]

    def _before(self, count: int) -> list[int]:
        """The tokens of the first `count` messages; without any, of what the memory holds of the template."""
        if count:
            return self._render(self.messages[:count], add_generation_prompt=False)
        return [] if self.document else self._render(self.messages)[:1]

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        return render_chat(self.model, messages, self.document, add_generation_prompt)

    def fold(self) -> Fold | None:
        """Compact all turns but the latest now. Returns what was done, None where there is nothing to fold.

        Nothing has changed if it is interrupted.
        """
        start = time.perf_counter()
        until = self._fold_until()
        if until <= self.folded:
            return None
        before = self._before(self.folded)
        ids = self._before(until)[len(before) :]
        chain, ratios = self._aged(), self.folding.ratios
        chain.append(torch.tensor(ids), ratios[0])
        memory = chain.memory()
        fold = Fold(
            messages=until - self.folded,
            tokens=len(ids),
            ratio=ratios[0],
            parts=tuple((len(part.ids), part.ratio) for part in chain.parts if part.ratio != WHOLE),
            entries=memory.entries,
            seconds=time.perf_counter() - start,
        )
        self.chain, self.memory, self.folded = chain, memory, until
        self.cache, self.cached = memory.cache(), []
        self.folds.append(fold)
        return fold

    def save(self, folder: Path) -> None:
        """Write what is folded into a folder, for `restore`. The messages themselves are the caller's to keep."""
        self.chain.save(folder)

    def restore(self, folder: Path, messages: list[dict[str, str]], folded: int) -> None:
        """Go on with a conversation of these messages, the first `folded` of which were saved in `folder`."""
        self.chain.load(folder)
        self.memory = self.chain.memory()
        self.messages, self.folded = list(messages), folded
        self.cache, self.cached = self.memory.cache(), []

    def _fold_until(self) -> int:
        """How many messages are to be folded: whole exchanges, so that what follows them fits `keep`."""
        ends = [i + 1 for i, message in enumerate(self.messages[:-1]) if message["role"] == "assistant"]
        for end in ends:
            if end > self.folded and len(self._behind(end)) <= self.folding.keep:
                return end
        return ends[-1] if ends else 0

    def _aged(self) -> Chain:
        """A copy of the chain in which every part has the ratio of an age one higher."""
        chain = Chain(
            self.model,
            self.chain.base,
            self.chain.settings,
            self.chain.method,
            self.seed,
            self.progress,
            list(self.chain.parts),
        )
        ratios = self.folding.ratios
        for index in range(len(chain.parts)):
            if chain.parts[index].ratio == WHOLE:
                continue
            age = len(chain.parts) - index
            ratio = ratios[min(age, len(ratios) - 1)]
            if ratio != chain.parts[index].ratio:
                chain.recompact(index, ratio)
        return chain
