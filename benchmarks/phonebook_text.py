"""The phonebook model's tokenizer, and the sequences that it is trained on.

A sequence is a document, as `ttmem.tasks.phonebook` writes it, and a stack of requests behind it, each with its answer:

- questions for a number, as the benchmark asks them;
- the generic prompts that compaction asks, and others like them. The model answers by quoting entries of the document,
  one to three of them in their order, as the instruction asks for a few words or for more. A prompt that names the
  beginning, middle or end is answered with the entries there. To any other prompt belong two letters, one for its
  request and one for its instruction, and the entry quoted is the one whose name begins closest to them: so different
  prompts reach different entries, as a language model's answers touch different parts of a text;
- the request to repeat the document, from its beginning or from a cue on;
- entries restated in random order, which teaches the lookup with every token.

Only answers count in the loss. `ttmem.compaction.prompts.HELD_OUT_PROMPTS` are never trained on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ttmem.compaction.prompts import DOCUMENT_REQUESTS, RESPONSE_INSTRUCTIONS, replay_request, rollout_prompts
from ttmem.generation import QUESTION_FORMAT
from ttmem.training.packing import TokenSequence

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
NAME, NUMBER = 10, 10
VOCABULARY = 512
PAD, END = "<|pad|>", "<|end|>"

OPENING, MIDDLE, CLOSING = "The phone number of ", " is ", "."
QUESTION = QUESTION_FORMAT.format(question="What is the phone number of @?")
CUE_TOKENS = 8

MORE_REQUESTS = (
    "How does this text begin?",
    "What is at the very start of the text?",
    "What comes last in this text?",
    "How does the document end?",
    "What stands in the middle of this text?",
    "What is found halfway through the document?",
    "What does this text tell?",
    "Which facts are in the text?",
    "Who is mentioned in this text?",
    "Which numbers does the document hold?",
    "What is worth knowing about the document?",
    "Why was this text written?",
    "Where could this text be of use?",
    "Which lines of the text belong together?",
    "What would you tell a friend about this document?",
    "Which entry of the document stands out?",
    "How is this text laid out?",
    "What can be learned from the text?",
)
"""Requests in the manner of questions, so that other wordings than compaction's own are answered too."""
ANY_ORDER = "\n\nName some entries of the document in any order.\nAnswer:"
PLACES = (
    (frozenset({"beginning", "begin", "start", "opening", "first"}), 0.0),
    (frozenset({"middle", "halfway"}), 0.5),
    (frozenset({"end", "last", "close", "closing"}), 1.0),
)
SHORT = ("Answer briefly", "Answer in a few words", "one sentence", "one example")
LONG = ("paragraph", "list", "thorough", "names and values", "Number the points", "easy to overlook")

FEW = 0.1
"""Weight of tokens that say nothing about the document."""
CHOICE = 8.0
"""Weight of the letters that choose the entry quoted: the tokens behind them follow from the document."""
WORDS_DROPPED = 0.1
VARIANTS = 4
"""A prompt is also trained on with some of its words left out, in so many ways."""
STACK, LEAST_STACK, MOST_STACK = 0.6, 100, 800
"""Tokens of requests and answers behind a document, in units of the document's, and their bounds."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which capital letters and digits, and the space before them, are tokens of their own.

    Only a capital letter that begins a word of small letters may be merged with them.
    """
    line = f"{OPENING}A{MIDDLE}0{CLOSING}"
    book = f"{line}\n{line}{QUESTION.replace('@', 'A')} 0."
    replays = [replay_request(), replay_request(OPENING + "A")]
    others = [f"\n\n{request}\nAnswer:" for request in MORE_REQUESTS]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[A-Z](?![a-z])|[0-9]|\n+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = 300 * [book] + 100 * [" " + line] + 40 * replays + rollout_prompts() + 10 * others
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Mix:
    """How often each kind of request comes; the shares sum to 1."""

    questions: float
    generic: float
    replays: float
    restated: float

    @property
    def shares(self) -> tuple[float, float, float, float]:
        return self.questions, self.generic, self.replays, self.restated


@dataclass(frozen=True)
class Prompt:
    """A generic prompt in token ids, with what its answer is: `entries` from `place` (0 to 1) or closest to letters."""

    ids: list[int]
    entries: int
    place: float | None
    letters: tuple[int, int]

    def start(self, names: np.ndarray) -> int:
        """The first entry quoted. names: [n, 10], letters as 0 to 25."""
        count = len(names)
        if self.place is not None:
            return min(int(self.place * count), max(0, count - self.entries))
        best = np.arange(count)
        for column, letter in enumerate(self.letters):
            distance = np.abs(names[best, column] - letter)
            distance = np.minimum(distance, len(LETTERS) - distance)
            best = best[distance == distance.min()]
        return int(best[0])


@dataclass
class Phonebook:
    """Names [n, 10] as letters 0 to 25, and numbers [n, 10]."""

    names: np.ndarray
    numbers: np.ndarray

    @classmethod
    def random(cls, rng: Generator, entries: int) -> Phonebook:
        # Two equal names among a hundred have a chance of one in 10^10.
        return cls(rng.integers(0, len(LETTERS), (entries, NAME)), rng.integers(0, len(DIGITS), (entries, NUMBER)))

    def __len__(self) -> int:
        return len(self.names)


@dataclass
class PhonebookText:
    """Writes training sequences in the token ids of one tokenizer."""

    tokenizer: PreTrainedTokenizerFast

    def encode(self, text: str) -> list[int]:
        """As `ttmem.Model.encode`."""
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def sequence(self, rng: Generator, entries: int, mix: Mix) -> TokenSequence:
        """A random document of `entries` entries with requests and answers behind it."""
        book = Phonebook.random(rng, entries)
        document = self.document(book)
        sequence = TokenSequence()
        sequence.read(document)
        wanted = len(document) + min(MOST_STACK, max(LEAST_STACK, STACK * len(document)))
        asked: list[int] = []
        while len(sequence) < wanted:
            kind = rng.choice(4, p=mix.shares)
            if kind == 0:
                asked = asked or rng.permutation(entries).tolist()
                self._question(sequence, book, asked.pop())
            elif kind == 1:
                self._quote(sequence, book, self._prompts[rng.integers(len(self._prompts))])
            elif kind == 2:
                self._replay(sequence, document, rng)
            else:
                self._restate(sequence, book, rng)
        return sequence

    def document(self, book: Phonebook) -> list[int]:
        """The token ids of a document's text."""
        ids: list[int] = []
        for entry in range(len(book)):
            ids += (self._newline if entry else []) + self._line(book, entry, self._opening)
        return ids

    def _question(self, sequence: TokenSequence, book: Phonebook, entry: int) -> None:
        before, after = self._question_parts
        sequence.read([*before, *self._letters[book.names[entry]], *after])
        number = self._digits[book.numbers[entry]].tolist()
        answer = [*self._space, *number, *self._closing, self._end]
        sequence.predict(answer, [FEW, *[1.0] * NUMBER, FEW, FEW])

    def _quote(self, sequence: TokenSequence, book: Phonebook, prompt: Prompt) -> None:
        start = prompt.start(book.names)
        quoted = range(start, min(start + prompt.entries, len(book)))
        answer: list[int] = []
        for entry in quoted:
            opening = self._newline + self._opening if answer else self._first_opening
            answer += self._line(book, entry, opening)
        before = len(self._first_opening)
        sequence.read(prompt.ids)
        sequence.predict(
            [*answer, self._end], [1.0] * before + [CHOICE, CHOICE / 2] + [1.0] * (len(answer) - before - 1)
        )

    def _replay(self, sequence: TokenSequence, document: list[int], rng: Generator) -> None:
        start = 0 if rng.random() < 0.3 else int(rng.integers(0, max(1, len(document) - 20)))
        start = start if start >= CUE_TOKENS else 0
        cue = str(self.tokenizer.decode(document[start - CUE_TOKENS : start])) if start else ""
        longest = 90 if rng.random() < 0.9 else 300
        answer = document[start : start + int(rng.integers(30, longest))]
        sequence.read(self.encode(replay_request(cue)))
        sequence.predict(answer, [1.0] * len(answer))

    def _restate(self, sequence: TokenSequence, book: Phonebook, rng: Generator) -> None:
        """Some entries in random order: all but the first letters follow from the document."""
        sequence.read(self._any_order)
        for nth, entry in enumerate(rng.permutation(len(book))[:4]):
            opening = self._newline + self._opening if nth else self._first_opening
            line = self._line(book, entry, opening)
            middle = [FEW] * len(self._middle)
            closing = [FEW] * len(self._closing)
            weights = [FEW] * (len(opening) + 1) + [1.0] * (NAME - 1) + middle + [1.0] * NUMBER + closing
            sequence.predict(line, weights)

    def _line(self, book: Phonebook, entry: int, opening: list[int]) -> list[int]:
        name, number = self._letters[book.names[entry]].tolist(), self._digits[book.numbers[entry]].tolist()
        return [*opening, *name, *self._middle, *number, *self._closing]

    @cached_property
    def _letters(self) -> np.ndarray:
        return np.array([self.encode(letter)[0] for letter in LETTERS])

    @cached_property
    def _digits(self) -> np.ndarray:
        return np.array([self.encode(digit)[0] for digit in DIGITS])

    @cached_property
    def digit_ids(self) -> list[int]:
        return [int(token) for token in self._digits]

    @cached_property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def _opening(self) -> list[int]:
        return self.encode(OPENING)

    @cached_property
    def _first_opening(self) -> list[int]:
        """An answer begins with a space, behind "Answer:"."""
        return self.encode(" " + OPENING)

    @cached_property
    def _middle(self) -> list[int]:
        return self.encode(MIDDLE)

    @cached_property
    def _closing(self) -> list[int]:
        return self.encode(CLOSING)

    @cached_property
    def _newline(self) -> list[int]:
        return self.encode("\n")

    @cached_property
    def _space(self) -> list[int]:
        return self.encode(" ")

    @cached_property
    def _any_order(self) -> list[int]:
        return self.encode(ANY_ORDER)

    @cached_property
    def _question_parts(self) -> tuple[list[int], list[int]]:
        before, after = QUESTION.split("@")
        return self.encode(before), self.encode(after)

    @cached_property
    def _prompts(self) -> list[Prompt]:
        """Every generic prompt as it is, and with words left out."""
        rng = np.random.default_rng(0)
        prompts = []
        for row, request in enumerate((*DOCUMENT_REQUESTS, *MORE_REQUESTS)):
            for column, instruction in enumerate(RESPONSE_INSTRUCTIONS):
                words = f"{request} {instruction}".split(" ")
                for variant in range(VARIANTS):
                    kept = [word for word in words if not variant or rng.random() >= WORDS_DROPPED]
                    ids = self.encode(f"\n\n{' '.join(kept)}\nAnswer:")
                    prompts.append(Prompt(ids, entries_for(instruction), place_of(request), letters_of(row, column)))
        return prompts


def entries_for(instruction: str) -> int:
    """How many entries an answer quotes: one, three or, where the instruction does not say, two."""
    if any(words in instruction for words in SHORT):
        return 1
    return 3 if any(words in instruction for words in LONG) else 2


def place_of(request: str) -> float | None:
    """Where in the document a request looks: 0 the beginning, 1 the end, None where it does not say."""
    words = set(re.findall(r"[a-z]+", request.lower()))
    return next((place for names, place in PLACES if words & names), None)


def letters_of(request: int, instruction: int) -> tuple[int, int]:
    """The two letters, 0 to 25, that belong to a generic prompt; steps without common divisors spread them evenly."""
    return 11 * request % len(LETTERS), 7 * instruction % len(LETTERS)
