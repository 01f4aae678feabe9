"""`/v1/chat/completions`, `/v1/completions` and `/v1/models`: OpenAI's API over memories."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ttmem.errors import ModelError, QuestionError
from ttmem.memory import Memory
from ttmem.serving.conversations import Conversations, Turns
from ttmem.serving.engine import Engine, Event, Failed, Finished, Piece, Request
from ttmem.serving.errors import ApiError, SafeJSON, refused
from ttmem.serving.library import Library
from ttmem.serving.metrics import Metrics
from ttmem.serving.sampling import Sampling
from ttmem.serving.schemas import AUTO, AnswerRequest, AutoOptions, ChatRequest, CompletionRequest
from ttmem.serving.settings import Limits
from ttmem.serving.store import Record, Store
from ttmem.serving.text import Encoder

CHAT_TOKENS, COMPLETION_TOKENS = 256, 16
"""Tokens of an answer where the request names none (OpenAI's own default for completions)."""

EVENT_STREAM = "text/event-stream"
NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass
class Usage:
    """Tokens of a request, all its answers together. The document's are apart: no answer runs them."""

    prompt: int = 0
    written: int = 0
    document: int = 0
    kept: float = 0.0

    @classmethod
    def behind(cls, memory: Memory | None) -> Usage:
        if memory is None:
            return cls()
        return cls(document=memory.document_length, kept=round(memory.entries / memory.heads, 2))

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "document_tokens": self.document,
            "memory_tokens": self.kept,
        }


@dataclass
class Answers:
    """The answers to one HTTP request, under way: which sequence wrote what, as it comes."""

    requests: list[Request]
    events: asyncio.Queue[tuple[int, Event]]
    usage: Usage
    kind: str
    model: str
    conversation: dict[str, Any] | None = None
    """What of a conversation that compacts itself is folded."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Events with the index of their answer, until all have ended. Raises ApiError where one cannot be."""
        left = len(self.requests)
        while left:
            index, event = await self.events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                self.usage.written += event.tokens
                left -= 1
            yield index, event

    def envelope(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        body = {"id": f"{self.kind}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        told = {} if self.conversation is None else {"conversation": self.conversation}
        return {**body, "choices": choices, "usage": usage, **told}


class Answering:
    """Routes that answer, for one model."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        encoder: Encoder,
        library: Library,
        conversations: Conversations,
        store: Store,
        limits: Limits,
    ) -> None:
        self.name, self.engine, self.encoder, self.library = name, engine, encoder, library
        self.conversations, self.store, self.limits = conversations, store, limits
        self.metrics: Metrics = engine.metrics
        self.vocabulary: int = engine.model.network.get_input_embeddings().num_embeddings
        self.started = int(time.time())

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.get("/v1/models")
        async def models(request: HttpRequest) -> Response:
            """The model, and each ready memory as `MODEL+MEMORY`."""
            records = await to_thread.run_sync(self.store.page, request.state.owner, -1, None, "ready")
            return SafeJSON({"object": "list", "data": [self.model(), *map(self.model, records)]})

        @router.get("/v1/models/{id:path}")
        async def model(request: HttpRequest, id: str) -> Response:
            reference = self.reference(id, None)
            if reference is None:
                return SafeJSON(self.model())
            return SafeJSON(self.model(await self.find(request.state.owner, reference, "model")))

        @router.post("/v1/chat/completions")
        async def chat(request: HttpRequest, body: ChatRequest) -> Response:
            messages = [message.plain() for message in body.messages]
            told = None
            if body.memory == AUTO:
                turns = await self.conversation(request.state.owner, body, messages)
                memory, prompt, told = turns.memory, turns.prompt, turns.told
            elif body.auto is not None:
                raise ApiError(400, "not_auto", f"the field auto is for memory: {AUTO!r}", "auto")
            else:
                memory = await self.memory(request.state.owner, body)
                prompt = await self.encoded(self.encoder.chat, messages, memory is not None)
            limit = body.max_completion_tokens or body.max_tokens
            answers = self.answers("chatcmpl", body, [prompt], memory, limit, CHAT_TOKENS, told)
            return await self.respond(request, body, answers, ChatShape())

        @router.post("/v1/completions")
        async def completions(request: HttpRequest, body: CompletionRequest) -> Response:
            memory = await self.memory(request.state.owner, body)
            prompts = [await self.tokens(prompt) for prompt in prompt_list(body.prompt, self.limits.prompts)]
            answers = self.answers("cmpl", body, prompts, memory, body.max_tokens, COMPLETION_TOKENS)
            return await self.respond(request, body, answers, CompletionShape())

        return router

    def model(self, record: Record | None = None) -> dict[str, Any]:
        """One entry of the list of models."""
        if record is None:
            return {"id": self.name, "object": "model", "created": self.started, "owned_by": "ttmem"}
        id = f"{self.name}+{record.name or record.id}"
        return {"id": id, "object": "model", "created": int(record.created), "owned_by": "ttmem", "memory": record.id}

    def reference(self, model: str, memory: str | None) -> str | None:
        """The memory that a request names by its model or its own field. Raises ApiError for another model, or two."""
        base, plus, named = model, "", ""
        if model != self.name and model.startswith(self.name + "+"):
            base, plus, named = self.name, "+", model[len(self.name) + 1 :]
        if base != self.name or (plus and not named):
            raise ApiError(404, "model_not_found", f"there is no such model; this server has {self.name}", "model")
        if named and memory is not None and memory != named:
            message = "the model's name and the field memory name different memories"
            raise ApiError(400, "two_memories", message, "memory")
        reference = named or memory
        if reference == AUTO:
            message = 'memory: "auto" is for chats; a document beside it is named by the model, MODEL+NAME'
            raise ApiError(400, "not_supported", message, "memory")
        return reference

    async def find(self, owner: str, reference: str, param: str) -> Record:
        return await to_thread.run_sync(self.store.find, owner, reference, param)

    async def memory(self, owner: str, body: AnswerRequest) -> Memory | None:
        """The memory a request asks."""
        reference = self.reference(body.model, body.memory)
        if reference is None:
            if body.full:
                raise ApiError(400, "no_memory", "context: full needs a memory, whose document is to be read", "memory")
            return None
        param = "memory" if body.memory is not None else "model"
        return await self.library.get(await self.find(owner, reference, param))

    async def conversation(self, owner: str, body: ChatRequest, messages: list[dict[str, str]]) -> Turns:
        """A conversation that compacts itself, about the document that the model's name names, or none."""
        if body.full:
            message = "context: full reads a memory's document; a conversation with memory: auto has none of its own"
            raise ApiError(400, "not_supported", message, "context")
        reference = self.reference(body.model, None)
        document = None if reference is None else await self.find(owner, reference, "model")
        return await self.conversations.turns(owner, document, messages, body.auto or AutoOptions())

    async def tokens(self, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens, checked."""
        if isinstance(prompt, str):
            return await self.encoded(self.encoder.text, prompt)
        if prompt and max(prompt) >= self.vocabulary:
            raise ApiError(400, "invalid_prompt", f"the model has tokens 0 to {self.vocabulary - 1}", "prompt")
        return prompt

    async def encoded(self, encode: Any, *arguments: Any) -> list[int]:
        try:
            ids: list[int] = await to_thread.run_sync(encode, *arguments)
        except (QuestionError, ModelError) as error:
            raise refused(error, "invalid_prompt") from error
        return ids

    def answers(
        self,
        kind: str,
        body: AnswerRequest,
        prompts: list[list[int]],
        memory: Memory | None,
        limit: int | None,
        default: int,
        conversation: dict[str, Any] | None = None,
    ) -> Answers:
        """Queue one sequence per prompt. Raises ApiError: 400 for what does not fit, 429 when the queue is full.

        In full context the document is run before each prompt, and its memory is not used.
        """
        document: list[int] = []
        if body.full and memory is not None:
            document, memory = self.document(memory), None
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def emit(index: int, event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(events.put_nowait, (index, event))

        requests = []
        for index, prompt in enumerate(prompts):
            sampling = Sampling(
                body.temperature or 0.0, 1.0 if body.top_p is None else body.top_p, seed_of(body.seed, index)
            )
            most = self.allowed(len(prompt), len(document), memory, limit, default)
            requests.append(Request(document + prompt, memory, most, partial(emit, index), sampling, body.stops))
        self.engine.submit(requests)
        usage = Usage(document=len(document)) if document else Usage.behind(memory)
        usage.prompt = sum(len(request.prompt) for request in requests)
        return Answers(requests, events, usage, kind, body.model, conversation)

    def document(self, memory: Memory) -> list[int]:
        """The tokens of a memory's document. Raises ApiError 409 where they were not kept, or are not the model's."""
        if memory.tokens is None:
            message = "this memory was made without keep_document: there is no document to answer from in full context"
            raise ApiError(409, "document_not_kept", message, "context")
        if int(memory.tokens.max()) >= self.vocabulary:
            raise ApiError(409, "memory_unusable", "the document's tokens are not this model's", "context")
        return [int(token) for token in memory.tokens.tolist()]

    def allowed(self, prompt: int, document: int, memory: Memory | None, limit: int | None, default: int) -> int:
        """Tokens an answer may have behind a document that is run (0: none is) or a memory.

        Raises ApiError 400 for an empty prompt and where positions do not reach.
        """
        if prompt == 0:
            raise ApiError(400, "invalid_prompt", "the prompt is empty", "prompt")
        if limit is not None and limit > self.limits.answer_tokens:
            message = f"this server writes answers of up to {self.limits.answer_tokens} tokens, not {limit}"
            raise ApiError(400, "too_many_tokens", message, "max_tokens")
        before = prompt + (document if memory is None else memory.document_length)
        positions = self.engine.model.max_positions
        room = min(self.limits.batch_tokens - document - prompt, (positions or 2**31) - before)
        if room < (limit or 1):
            raise ApiError(
                400,
                "context_length_exceeded",
                f"document and prompt take {before} positions and the answer {limit or 1}: the model reaches "
                f"{positions}, this server {self.limits.batch_tokens} tokens per request; ask for less",
            )
        return limit or min(default, room)

    async def respond(self, request: HttpRequest, body: AnswerRequest, answers: Answers, shape: Any) -> Response:
        if not body.stream:
            async with self.attended(request, answers):
                return SafeJSON(await shape.whole(answers))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return StreamingResponse(
            self.events(request, answers, shape, include_usage), media_type=EVENT_STREAM, headers=NO_BUFFER
        )

    async def events(
        self, request: HttpRequest, answers: Answers, shape: Any, include_usage: bool
    ) -> AsyncIterator[bytes]:
        """Server-sent events. An answer that fails midway ends with an error event."""
        async with self.attended(request, answers):
            try:
                for chunk in shape.opening(answers):
                    yield sse(chunk)
                async for index, event in answers:
                    yield sse(shape.chunk(answers, index, event))
                if include_usage:
                    yield sse(answers.envelope(shape.chunks, [], answers.usage.body()))
            except ApiError as error:
                yield sse(error.body())
            yield b"data: [DONE]\n\n"

    @asynccontextmanager
    async def attended(self, request: HttpRequest, answers: Answers) -> AsyncIterator[None]:
        """Whoever leaves, by closing the connection or otherwise, frees the place of what they asked for."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            for sequence in answers.requests:
                self.engine.cancel(sequence)
            answers.events.put_nowait((0, Failed(ApiError(499, "client_left", "the client has left"))))

        watching = asyncio.create_task(watch())
        try:
            yield
            self.metrics.answered(answers.usage.prompt, answers.usage.written)
        finally:
            watching.cancel()
            for sequence in answers.requests:
                self.engine.cancel(sequence)


class ChatShape:
    """OpenAI's chat objects."""

    chunks = "chat.completion.chunk"

    async def whole(self, answers: Answers) -> dict[str, Any]:
        texts, reasons = await collect(answers)
        message = {"role": "assistant", "content": texts[0]}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reasons[0]}
        return answers.envelope("chat.completion", [choice], answers.usage.body())

    def opening(self, answers: Answers) -> list[dict[str, Any]]:
        return [self._chunk(answers, {"role": "assistant", "content": ""}, None)]

    def chunk(self, answers: Answers, index: int, event: Piece | Finished) -> dict[str, Any]:
        if isinstance(event, Piece):
            return self._chunk(answers, {"content": event.text}, None)
        return self._chunk(answers, {}, event.reason)

    def _chunk(self, answers: Answers, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return answers.envelope(
            self.chunks, [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        )


class CompletionShape:
    """OpenAI's completion objects, one choice per prompt."""

    chunks = "text_completion"

    async def whole(self, answers: Answers) -> dict[str, Any]:
        texts, reasons = await collect(answers)
        choices = [self._choice(i, text, reason) for i, (text, reason) in enumerate(zip(texts, reasons, strict=True))]
        return answers.envelope("text_completion", choices, answers.usage.body())

    def opening(self, answers: Answers) -> list[dict[str, Any]]:
        return []

    def chunk(self, answers: Answers, index: int, event: Piece | Finished) -> dict[str, Any]:
        text, reason = (event.text, None) if isinstance(event, Piece) else ("", event.reason)
        return answers.envelope(self.chunks, [self._choice(index, text, reason)])

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


async def collect(answers: Answers) -> tuple[list[str], list[str]]:
    """All answers to their ends: texts and finish reasons."""
    texts, reasons = [""] * len(answers.requests), [""] * len(answers.requests)
    async for index, event in answers:
        if isinstance(event, Piece):
            texts[index] += event.text
        elif isinstance(event, Finished):
            reasons[index] = event.reason
    return texts, reasons


def prompt_list(prompt: Any, most: int) -> list[Any]:
    """The prompts of a completion request: texts or lists of tokens."""
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = prompt if many else [prompt]
    if len(prompts) > most:
        raise ApiError(400, "too_many_prompts", f"{len(prompts)} prompts; this server takes {most} at once", "prompt")
    return list(prompts)


def seed_of(seed: int | None, index: int) -> int | None:
    """Each prompt of a request has a seed of its own."""
    return None if seed is None else (seed + index) % 2**63


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n\n"
