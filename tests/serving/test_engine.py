"""Answers written together are the answers written alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ttmem import Memory, Model
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.settings import Budget
from ttmem.generation import greedy_answers
from ttmem.serving.engine import Engine, Event, Failed, Finished, Piece, Request, check_engine
from ttmem.serving.errors import ApiError
from ttmem.serving.metrics import Metrics
from ttmem.serving.sampling import Sampling
from ttmem.serving.settings import Limits


class Answer:
    """A request with its events collected."""

    def __init__(self, prompt: list[int], memory: Memory | None, max_tokens: int = 12, **options: Any) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.request = Request(prompt, memory, max_tokens, self.events.put, **options)
        self.pieces: list[str] = []

    def wait(self) -> Finished | Failed:
        while isinstance(event := self.events.get(timeout=120), Piece):
            self.pieces.append(event.text)
        return event

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@pytest.fixture(params=[Limits(), Limits(running=3, step_tokens=8)], ids=["wide", "narrow"])
def engine(request: pytest.FixtureRequest, any_model: Model) -> Iterator[Engine]:
    engine = Engine(any_model, request.param, Metrics())
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def memories(any_model: Model, make_prepared: Any) -> list[Memory]:
    texts = ("The lamp is lit at four by Ines.", "Soup on deck!", "x y z")
    prepared = [make_prepared(any_model, text) for text in texts]
    return [KVzipPlus()(one, Budget(max(4, one.document.length // 2), 2.0)) for one in prepared]


def prompt(count: int, seed: int) -> list[int]:
    return [(29 * i + 13 * seed + 40) % 250 for i in range(count)]


def test_a_model_that_batches_passes(any_model: Model) -> None:
    check_engine(any_model)


def test_batched_answers_are_those_of_generate(engine: Engine, any_model: Model, memories: list[Memory]) -> None:
    asked = [(memory, prompt(3 + 5 * i, i)) for i in range(4) for memory in memories]
    answers = [Answer(ids, memory) for memory, ids in asked]
    for answer in answers:
        engine.submit([answer.request])
    for (memory, ids), answer in zip(asked, answers, strict=True):
        finished = answer.wait()
        (expected,) = greedy_answers(any_model, memory, [ids], 12)
        assert isinstance(finished, Finished)
        assert answer.text == any_model.decode(expected)
        assert finished.tokens == len(expected)
        assert finished.reason == ("stop" if expected[-1] in any_model.eos_token_ids else "length")
    assert engine.cache.held == 0


def test_a_seed_gives_the_same_whatever_else_runs(engine: Engine, memories: list[Memory]) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=7)
    texts = []
    for others in (0, 1, 6):
        crowd = [Answer(prompt(4, i), memories[i % 3], sampling=Sampling(1.5)) for i in range(others)]
        seeded = Answer(prompt(5, 99), memories[0], sampling=sampling)
        for answer in [*crowd[: others // 2], seeded, *crowd[others // 2 :]]:
            engine.submit([answer.request])
        for answer in [*crowd, seeded]:
            assert isinstance(answer.wait(), Finished)
        texts.append(seeded.text)
    assert len(set(texts)) == 1
    other = Answer(prompt(5, 99), memories[0], sampling=Sampling(temperature=1.0, top_p=0.9, seed=8))
    engine.submit([other.request])
    other.wait()
    assert other.text != texts[0]


def test_a_stop_string_ends_an_answer(engine: Engine, memories: list[Memory]) -> None:
    whole = Answer(prompt(6, 3), memories[1], 20)
    engine.submit([whole.request])
    whole.wait()
    stop = whole.text[4:6]
    cut = Answer(prompt(6, 3), memories[1], 20, stops=("never said", stop))
    engine.submit([cut.request])
    assert isinstance(finished := cut.wait(), Finished)
    assert finished.reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_without_a_memory(engine: Engine, any_model: Model) -> None:
    ids = prompt(9, 5)
    answer = Answer(ids, None)
    engine.submit([answer.request])
    answer.wait()
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 9)}
    output = any_model.network.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert answer.text == any_model.decode(output[0, 9:].tolist())


def test_who_leaves_frees_the_place(model: Model) -> None:
    engine = Engine(model, Limits(running=1, waiting=2), Metrics())
    engine.start()
    left, waiting, gone = (Answer(prompt(4, i), None, 1500) for i in range(3))
    quick = Answer(prompt(4, 9), None, 3)
    engine.submit([left.request])
    assert isinstance(left.events.get(timeout=60), Piece)
    engine.submit([waiting.request, gone.request])
    with pytest.raises(ApiError) as full:
        engine.submit([quick.request])
    assert full.value.status_code == 429
    for answer in (left, waiting, gone):
        engine.cancel(answer.request)
    engine.submit([quick.request])
    assert isinstance(quick.wait(), Finished)
    assert waiting.events.empty()
    assert gone.events.empty()
    engine.stop()
    with pytest.raises(ApiError):
        engine.submit([quick.request])


def test_what_can_never_run_is_refused_and_what_is_running_is_told_of_the_end(model: Model) -> None:
    engine = Engine(model, Limits(batch_tokens=1000), Metrics())
    with pytest.raises(ApiError) as refused:
        engine.submit([Answer(prompt(4, 0), None, 997).request])
    assert refused.value.status_code == 400
    answer = Answer(prompt(4, 0), None, 900)
    engine.submit([answer.request])
    engine.start()
    answer.events.get(timeout=60)
    engine.stop()
    assert isinstance(failed := answer.wait(), Failed)
    assert failed.error.status_code == 429


def test_a_failing_step_fails_its_answers_and_no_later_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, Limits(), Metrics())
    engine.start()
    failing = Answer([10**6], None)  # no such token: the embedding raises
    engine.submit([failing.request])
    assert isinstance(failing.wait(), Failed)
    answer = Answer(prompt(4, 0), None)
    engine.submit([answer.request])
    assert isinstance(answer.wait(), Finished)
    engine.stop()


def test_a_memory_that_makes_no_sense_harms_only_its_own(model: Model, memories: list[Memory], make_full: Any) -> None:
    memory = make_full(model)
    for layer in memory.layers:
        layer.values.fill_(3e38)
    engine = Engine(model, Limits(), Metrics())
    sound, absurd = Answer(prompt(4, 0), None), Answer(prompt(4, 0), memory)
    engine.submit([sound.request, absurd.request])
    engine.start()
    assert isinstance(failed := absurd.wait(), Failed)
    assert failed.error.status_code == 409
    assert isinstance(sound.wait(), Finished)
    engine.stop()
