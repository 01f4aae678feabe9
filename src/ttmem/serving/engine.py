"""The engine: one thread owns the model and advances all answers together, one token per step.

Each step runs one forward for every running sequence (`memory/batch.py`): the next token of those that write, and a
share of the prompts of those that have just come. Sequences join and leave at any step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Any

import torch
from torch import Tensor

from ttmem.errors import MemoryMismatchError
from ttmem.memory import Memory
from ttmem.memory.batch import BatchCache, Row
from ttmem.models import Model
from ttmem.serving.errors import ApiError, refused, too_busy
from ttmem.serving.logs import failure
from ttmem.serving.metrics import Metrics
from ttmem.serving.sampling import Sampler, Sampling, choose
from ttmem.serving.settings import Limits
from ttmem.serving.text import TextStream, decoder

log = logging.getLogger("ttmem.serving")


@dataclass(frozen=True)
class Piece:
    """More text of an answer."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end of an answer: "stop" (an end token or a stop string) or "length"; tokens written, the last included."""

    reason: str
    tokens: int


@dataclass(frozen=True)
class Failed:
    """An answer that cannot be finished."""

    error: ApiError


Event = Piece | Finished | Failed


@dataclass(eq=False)
class Request:
    """One answer to write. `emit` is called in the engine's thread and must return at once."""

    prompt: list[int]
    memory: Memory | None
    max_tokens: int
    emit: Callable[[Event], None]
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        """What it may come to hold behind its document."""
        return len(self.prompt) + self.max_tokens


@dataclass(eq=False)
class Running:
    """A request that has joined the batch. `fed`: tokens of its prompt that have run; `last`: the token to run next."""

    request: Request
    row: Row
    sampler: Sampler
    text: TextStream
    fed: int = 0
    last: int = 0
    written: int = 0

    @property
    def reading(self) -> bool:
        """Whether its prompt is not yet read to the end."""
        return self.fed < len(self.request.prompt)


class Engine:
    """Queue, batch and thread. `start` before use, `stop` at the end."""

    def __init__(self, model: Model, limits: Limits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.cache = BatchCache(model)
        self.decoder = decoder(model)
        self._wake = Condition()
        self._stopping = False
        self._thread: Thread | None = None

    def start(self) -> None:
        self._thread = Thread(target=self._work, name="ttmem-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread; requests that are not answered fail with 429, since the server is going away."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        left = [*(running.request for running in self.running), *self.waiting]
        self.running, self.waiting = [], deque()
        for request in left:
            request.emit(Failed(too_busy("the server is stopping", "server_stopping")))

    def submit(self, requests: list[Request]) -> None:
        """Queue requests, all or none. Raises ApiError 429 when the queue is full, 400 for one that can never run."""
        for request in requests:
            if request.tokens > self.limits.batch_tokens:
                raise ApiError(
                    400,
                    "too_many_tokens",
                    f"prompt and answer come to {request.tokens} tokens; this server takes {self.limits.batch_tokens}",
                    "max_tokens",
                )
        with self._wake:
            if self._stopping:
                raise too_busy("the server is stopping", "server_stopping")
            if len(self.waiting) + len(requests) > self.limits.waiting:
                raise too_busy(f"{len(self.waiting)} requests are waiting: try again in a moment")
            self.waiting.extend(requests)
            self._measure()
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """Forget a request whose client has left. Nothing is emitted for it any more."""
        with self._wake:
            request.cancelled = True
            if request in self.waiting:
                self.waiting.remove(request)
            self._measure()
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self.waiting or self.running):
                    self._wake.wait()
                if self._stopping:
                    return
                self._admit()
            try:
                self._step()
            except Exception as error:
                self._fail_all(error)

    def _admit(self) -> None:
        """Let requests join while there is room for all they may come to hold."""
        for running in [running for running in self.running if running.request.cancelled]:
            self._remove(running)
        held = sum(running.request.tokens for running in self.running)
        while self.waiting and len(self.running) < self.limits.running:
            if held + self.waiting[0].tokens > self.limits.batch_tokens:
                break
            request = self.waiting.popleft()
            held += request.tokens
            try:
                row = self.cache.join(request.memory)
            except MemoryMismatchError as error:
                request.emit(Failed(refused(error, "memory_unusable", 409, "memory")))
                continue
            text = TextStream(self.decoder, request.stops)
            self.running.append(Running(request, row, Sampler(request.sampling), text))
        self._measure()

    def _step(self) -> None:
        """One forward, and what follows from it for each sequence."""
        parts = self._share()
        if not parts:
            return
        start = time.perf_counter()
        logits = self.cache.run([(running.row, tokens) for running, tokens in parts])
        self.metrics.step(len(parts), sum(len(tokens) for _, tokens in parts), time.perf_counter() - start)
        for running, tokens in parts:
            if running.reading:
                running.fed += len(tokens)
        ready = [i for i, (running, _) in enumerate(parts) if not running.reading]
        self._write([parts[i][0] for i in ready], logits[ready])

    def _share(self) -> list[tuple[Running, list[int]]]:
        """The step's tokens: one of each sequence that writes, then prompts in the order they came, while they fit."""
        parts = [(running, [running.last]) for running in self.running if not running.reading]
        room = max(self.limits.step_tokens - len(parts), 1)
        for running in self.running:
            if running.reading and room > 0:
                tokens = running.request.prompt[running.fed : running.fed + room]
                parts.append((running, tokens))
                room -= len(tokens)
        return parts

    def _write(self, ready: list[Running], logits: Tensor) -> None:
        """The next token of each, its text, and the end of those that have come to it."""
        for running, token in zip(ready, choose(logits, [r.sampler for r in ready]), strict=True):
            request = running.request
            if request.cancelled:
                continue
            if token is None:
                self._remove(running)
                request.emit(Failed(ApiError(409, "memory_unusable", "the model's logits behind it are not finite")))
                continue
            running.last = token
            running.written += 1
            if running.written == 1:
                self.metrics.first_token(time.monotonic() - request.arrived)
            ended = token in self.model.eos_token_ids
            text = "" if ended else running.text.add(token)
            reason = "stop" if ended or running.text.stopped else None
            if reason is None and running.written >= request.max_tokens:
                reason = "length"
            if reason is not None:
                text += running.text.finish()
                if running.text.stopped:
                    reason = "stop"
                self._remove(running)
            if text:
                request.emit(Piece(text))
            if reason is not None:
                request.emit(Finished(reason, running.written))

    def _remove(self, running: Running) -> None:
        self.running.remove(running)
        self.cache.leave(running.row)

    def _fail_all(self, error: Exception) -> None:
        """A step that failed has left the cache in an unknown state: start afresh, and say so to those it was for."""
        log.error("step_failed", extra={"fields": failure(error)})
        failed, self.running = self.running, []
        self.cache = BatchCache(self.model)
        for running in failed:
            running.request.emit(Failed(ApiError(500, "internal_error", "the server failed at this answer")))

    def _measure(self) -> None:
        self.metrics.queue(len(self.running), len(self.waiting))


def check_engine(model: Model) -> None:
    """Compare two sequences in one batch with the plain model. Raises ModelError where batches would go wrong."""
    from ttmem.errors import ModelError

    vocabulary = model.network.get_input_embeddings().num_embeddings
    sequences = [[(37 * i + 11 * n) % vocabulary for i in range(n)] for n in (5, 9)]
    cache = BatchCache(model)
    rows = [cache.join(None) for _ in sequences]
    cache.run([(row, ids[:-1]) for row, ids in zip(rows, sequences, strict=True)])
    found = cache.run([(row, ids[-1:]) for row, ids in zip(rows, sequences, strict=True)])
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    for logits, ids in zip(found, sequences, strict=True):
        with torch.no_grad():
            output: Any = model.network(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        expected = output.logits[0, -1].float()
        difference = ((logits - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()
        if not difference <= tolerance:
            raise ModelError(
                f"{model.architecture} cannot be served: its logits in a batch differ by {difference:.2g} (relative) "
                "from its own"
            )
