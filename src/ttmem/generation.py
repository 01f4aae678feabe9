"""Answering from a memory: many questions in one batch, one question as a stream."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from threading import Event, Thread
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, TextIteratorStreamer

from ttmem.errors import QuestionError
from ttmem.models import Model

QUESTION_FORMAT = "\n\nQuestion: {question}\nAnswer:"
"""How a question follows the document's raw text, and where the answer begins."""


class Answering(Protocol):
    """What can be asked: a compacted memory, or what a model with fast weights has read."""

    def check_model(self, model: Model) -> None:
        """Raise MemoryMismatchError unless it belongs to `model`."""
        ...

    def cache(self) -> Any:
        """A fresh transformers cache for one generation or conversation."""
        ...

    def inputs(
        self, question_ids: Tensor | Mapping[str, Tensor], attention_mask: Tensor | None = None, cache: Any = None
    ) -> dict[str, Tensor]:
        """Keyword arguments for `generate`: the question's ids and a mask that also covers what is remembered."""
        ...


def ask(
    model: Model,
    memory: Answering,
    questions: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    question_format: str = QUESTION_FORMAT,
    **generate: Any,
) -> list[str]:
    """Answer questions about a memory's document, all in one batch that reads the memory once per step.

    Greedy unless `generate` says otherwise; it goes to transformers' `generate` (do_sample, temperature, ...). Answers
    end at the first line break: the format makes the model write further questions of its own.
    Raises MemoryMismatchError when the memory was made for another model, QuestionError when a question is empty or
    does not fit the model's positions behind the document.
    """
    memory.check_model(model)
    texts = [questions] if isinstance(questions, str) else list(questions)
    if not texts:
        return []
    prompts = [encode_question(model, question, question_format) for question in texts]
    answers = _generate(model, memory, prompts, max_new_tokens, **generate)
    return [first_line(model.decode(answer)) for answer in answers]


def stream(
    model: Model,
    memory: Answering,
    question: str,
    *,
    max_new_tokens: int = 64,
    question_format: str = QUESTION_FORMAT,
    **generate: Any,
) -> Iterator[str]:
    """Answer one question piece by piece, as the model writes it. Ends where `ask` ends."""
    memory.check_model(model)
    prompt = encode_question(model, question, question_format)
    yield from until_line_end(stream_tokens(model, memory, prompt, max_new_tokens, **generate))


def encode_question(model: Model, question: str, question_format: str = QUESTION_FORMAT) -> list[int]:
    """Token ids of a question as it follows the document. Raises QuestionError when it is blank or not text."""
    if not question.strip():
        raise QuestionError("the question is empty")
    check_text(question)
    return model.encode(question_format.format(question=question))


def check_text(question: str) -> None:
    """Raise QuestionError for a string that no encoding can write."""
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise QuestionError(f"the question is not text: {question!r} holds bytes that are not UTF-8") from error


def stream_tokens(
    model: Model, memory: Answering, prompt: list[int], max_new_tokens: int, cache: Any = None, **generate: Any
) -> Generator[str, None, list[int]]:
    """Decoded pieces of one generation behind `cache` (a fresh one by default); returns the generated ids.

    transformers generates in a thread. Its errors are raised here, and closing this generator stops it.
    """
    streamer = TextIteratorStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    closed = Event()
    answers: list[list[int]] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            stop = StoppingCriteriaList(
                [lambda ids, scores, **_: torch.full(ids.shape[:1], closed.is_set(), device=ids.device)]
            )
            answers.extend(
                _generate(
                    model,
                    memory,
                    [prompt],
                    max_new_tokens,
                    cache=cache,
                    streamer=streamer,
                    stopping_criteria=stop,
                    **generate,
                )
            )
        except BaseException as error:
            failures.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from streamer
    finally:
        closed.set()
        thread.join()
    if failures:
        raise failures[0]
    return answers[0]


def until_line_end(pieces: Generator[str, None, Any]) -> Iterator[str]:
    """Pieces up to the first line break after text has begun; leading white space is dropped."""
    begun = False
    for piece in pieces:
        text = piece if begun else piece.lstrip()
        begun = begun or bool(text)
        line, found, _ = text.partition("\n")
        if line:
            yield line
        if found and begun:
            pieces.close()
            return


def first_line(text: str) -> str:
    """The first line that is not blank, without the white space around it."""
    stripped = text.strip()
    return stripped.partition("\n")[0].strip()


def greedy_answers(
    model: Model, memory: Answering, prompts: list[list[int]], max_new_tokens: int, no_repeat: int = 0
) -> list[list[int]]:
    """Greedy token ids of several prompts in one batch; an answer includes its end token.

    Plainly the most likely token at each step, whatever penalties a model's generation config asks for; with
    `no_repeat`, the most likely one that does not repeat that many tokens of prompt and answer in a row.
    """
    return _generate(model, memory, prompts, max_new_tokens, repetition_penalty=1.0, no_repeat_ngram_size=no_repeat)


@torch.no_grad()
def _generate(
    model: Model, memory: Answering, prompts: list[list[int]], max_new_tokens: int, cache: Any = None, **generate: Any
) -> list[list[int]]:
    ids, mask = model.left_pad(prompts)
    width = ids.shape[1]
    cache = memory.cache() if cache is None else cache
    room = _room(model, cache.get_seq_length(), width)
    options = {"do_sample": False, "max_new_tokens": min(max_new_tokens, room), **generate}
    if not options["do_sample"]:  # keep a model's sampling defaults from warning about greedy decoding
        options = {"temperature": None, "top_p": None, "top_k": None, **options}
    output = model.network.generate(
        **memory.inputs(ids, mask, cache),
        **{model.cache_keyword: cache},
        pad_token_id=model.pad_token_id,
        **options,
    )
    return [cut_at_end(row, model.eos_token_ids) for row in output[:, width:].tolist()]


def _room(model: Model, cached: int, prompt: int) -> int:
    """Positions left for an answer. Raises QuestionError when the prompt leaves none."""
    if model.max_positions is None:
        return sys.maxsize
    room = model.max_positions - cached - prompt
    if room < 1:
        raise QuestionError(
            f"{prompt} tokens behind {cached} do not fit {model.name}'s {model.max_positions} positions: shorten the "
            "question, or start the conversation anew"
        )
    return room


def cut_at_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Ids up to and including the first end token."""
    for i, token in enumerate(ids):
        if token in ends:
            return ids[: i + 1]
    return ids
