"""OpenAI's API over memories, asked by the official client."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from ttmem import Memory, Model
from ttmem.conversation import Conversation
from ttmem.generation import greedy_answers

from .conftest import TEXTS, running

QUESTION = "\n\nQuestion: When does it leave?\nAnswer:"


def expected(model: Model, memory: Memory, text: str, tokens: int) -> tuple[str, int]:
    (ids,) = greedy_answers(model, memory, [model.encode(text)], tokens)
    return model.decode(ids), len(ids)


def test_a_completion_is_the_memorys_answer(server: Any, served: Model, memories: dict[str, Memory]) -> None:
    client = server.openai()
    for name, memory in memories.items():
        text, tokens = expected(served, memory, QUESTION, 12)
        by_field = client.completions.create(model="tiny", prompt=QUESTION, max_tokens=12, extra_body={"memory": name})
        by_model = client.completions.create(model=f"tiny+{name}", prompt=QUESTION, max_tokens=12)
        for found in (by_field, by_model):
            assert found.choices[0].text == text
            assert found.usage.prompt_tokens == len(served.encode(QUESTION))
            assert found.usage.completion_tokens == tokens
            assert found.usage.total_tokens == found.usage.prompt_tokens + tokens
            assert found.usage.document_tokens == memory.document_length
            heads = sum(layer.num_heads for layer in memory.compacted)
            assert found.usage.memory_tokens == pytest.approx(memory.entries / heads, abs=0.01)


def test_a_chat_is_a_conversation(server: Any, served: Model, memories: dict[str, Memory]) -> None:
    client = server.openai()
    for system in (None, "Be brief."):
        conversation = Conversation(served, memories["ferry"], system=system, max_new_tokens=10)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        for turn in ("When does it leave?", "And on Fridays?"):
            messages.append({"role": "user", "content": turn})
            reply = conversation.say(turn)
            found = client.chat.completions.create(model="tiny+ferry", messages=messages, max_completion_tokens=10)
            assert found.choices[0].message.content == reply
            messages.append({"role": "assistant", "content": conversation.messages[-1]["content"]})


def test_without_a_memory_it_is_the_model(server: Any, served: Model) -> None:
    found = server.openai().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], max_tokens=8
    )
    assert found.usage.document_tokens == 0
    assert found.usage.memory_tokens == 0
    assert found.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("stop", [None, "e"])
def test_a_stream_is_the_answer_in_pieces(server: Any, stop: str | None) -> None:
    client = server.openai()
    options: dict[str, Any] = {"model": "tiny+lamps", "max_tokens": 40, "stop": stop, "temperature": 1.2, "seed": 5}
    whole = client.completions.create(prompt=QUESTION, **options)
    chunks = list(
        client.completions.create(prompt=QUESTION, stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    if stop:
        assert stop not in whole.choices[0].text

    messages: list[Any] = [{"role": "user", "content": "Who?"}]
    whole_chat = client.chat.completions.create(messages=messages, **options)
    deltas = list(client.chat.completions.create(messages=messages, stream=True, **options))
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == whole_chat.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == whole_chat.choices[0].finish_reason


def test_many_clients_get_their_own_answers(server: Any, served: Model, memories: dict[str, Memory]) -> None:
    client = server.openai()
    questions = [(name, f"\n\nQuestion {i}: who?\nAnswer:") for i in range(8) for name in memories]

    def ask(which: tuple[str, str]) -> str:
        name, question = which
        answer = client.completions.create(model=f"tiny+{name}", prompt=question, max_tokens=9)
        return str(answer.choices[0].text)

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, questions))
    assert found == [expected(served, memories[name], question, 9)[0] for name, question in questions]


def test_several_prompts_are_several_choices(server: Any, served: Model, memories: dict[str, Memory]) -> None:
    prompts = ["\n\nWho?", "\n\nWhen does the ferry leave?"]
    client = server.openai()
    found = client.completions.create(model="tiny+ferry", prompt=prompts, max_tokens=6)
    assert [choice.text for choice in found.choices] == [
        expected(served, memories["ferry"], prompt, 6)[0] for prompt in prompts
    ]
    tokens = client.completions.create(model="tiny+ferry", prompt=[served.encode(p) for p in prompts], max_tokens=6)
    assert [choice.text for choice in tokens.choices] == [choice.text for choice in found.choices]


def test_full_context_is_the_documents_own_answer(server: Any, served: Model, make_full: Any) -> None:
    full, client = make_full(served, TEXTS["ferry"]), server.openai()
    text, _ = expected(served, full, QUESTION, 12)
    options: dict[str, Any] = {"max_tokens": 12, "extra_body": {"context": "full"}}
    found = client.completions.create(model="tiny+ferry", prompt=[QUESTION, "\n\nWho?"], **options)
    assert [choice.text for choice in found.choices] == [text, expected(served, full, "\n\nWho?", 12)[0]]
    prompts = [served.encode(QUESTION), served.encode("\n\nWho?")]
    assert found.usage.prompt_tokens == 2 * full.document_length + sum(map(len, prompts))  # the document is run
    assert found.usage.document_tokens == full.document_length
    assert found.usage.memory_tokens == 0
    conversation = Conversation(served, full, max_new_tokens=10)
    messages: list[Any] = [{"role": "user", "content": "When does it leave?"}]
    chat = client.chat.completions.create(
        model="tiny+ferry", messages=messages, max_tokens=10, extra_body={"context": "full"}
    )
    assert chat.choices[0].message.content == conversation.say("When does it leave?")
    by_memory = client.completions.create(
        model="tiny+ferry", prompt=QUESTION, max_tokens=12, extra_body={"context": "memory"}
    )
    plain = client.completions.create(model="tiny+ferry", prompt=QUESTION, max_tokens=12)
    assert by_memory.choices == plain.choices
    assert by_memory.usage == plain.usage


def test_full_context_needs_a_sound_document(
    server: Any, served: Model, memories: dict[str, Memory], tmp_path: Path
) -> None:
    client, body = server.http(), {"prompt": "Who?", "max_tokens": 4, "context": "full"}
    memory = memories["lamps"]
    memory.save(tmp_path / "without.ttmem", keep_document=False)
    tokens = memory.tokens
    assert tokens is not None
    replace(memory, tokens=tokens * 0 + 300).save(tmp_path / "forged.ttmem")  # one beyond the vocabulary
    for name, code in (("without", "document_not_kept"), ("forged", "memory_unusable")):
        server.bring(tmp_path / f"{name}.ttmem", name)
        answer = client.post("/v1/completions", json={"model": f"tiny+{name}", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
        assert client.post("/v1/completions", json={"model": f"tiny+{name}", "prompt": "Who?"}).status_code == 200
        assert client.delete(f"/v1/memories/{name}").status_code == 200
    answer = client.post("/v1/completions", json={"model": "tiny", **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_memory")


def test_full_context_within_the_limits(
    make_settings: Any, served: Model, files: dict[str, Path], memories: dict[str, Memory], tmp_path: Path
) -> None:
    length = memories["ferry"].document_length
    limits = {"batch_tokens": length + 10}
    with running(make_settings(tmp_path / "data", limits), served) as server:
        server.bring(files["ferry"], "ferry")
        body = {"model": "tiny+ferry", "prompt": "W", "context": "full"}
        assert server.http().post("/v1/completions", json={**body, "max_tokens": 9}).status_code == 200
        answer = server.http().post("/v1/completions", json={**body, "max_tokens": 10})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert server.http().post("/v1/completions", json={**body, "max_tokens": 10, "context": "memory"}).is_success


def test_models_are_listed(server: Any) -> None:
    client = server.openai()
    listed = [model.id for model in client.models.list()]
    assert listed == ["tiny", "tiny+ferry", "tiny+lamps"]
    for name in listed:
        assert client.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny+other")


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"model": "tiny+"}, 404, "model_not_found"),
        ({"model": "tiny+nothing"}, 404, "memory_not_found"),
        ({"memory": "nothing"}, 404, "memory_not_found"),
        ({"memory": "../../etc/passwd"}, 404, "memory_not_found"),
        ({"memory": "auto"}, 400, "not_supported"),
        ({"model": "tiny+ferry", "memory": "lamps"}, 400, "two_memories"),
        ({"memroy": "ferry"}, 400, "invalid_request"),
        ({"model": "tiny+ferry", "context": "half"}, 400, "invalid_request"),
        ({"model": "tiny+ferry", "context": "full", "prompt": ""}, 400, "invalid_prompt"),
        ({"model": "tiny+ferry", "context": "full", "prompt": "x " * 3000}, 400, "context_length_exceeded"),
        ({"n": 2}, 400, "invalid_request"),
        ({"temperature": -1}, 400, "invalid_request"),
        ({"top_p": 0}, 400, "invalid_request"),
        ({"max_tokens": 0}, 400, "invalid_request"),
        ({"max_tokens": 4097}, 400, "too_many_tokens"),
        ({"max_tokens": 2047}, 400, "context_length_exceeded"),
        ({"prompt": "x " * 3000}, 400, "context_length_exceeded"),
        ({"prompt": ""}, 400, "invalid_prompt"),
        ({"prompt": []}, 400, "invalid_prompt"),
        ({"prompt": [300]}, 400, "invalid_prompt"),
        ({"prompt": ["a"] * 17}, 400, "too_many_prompts"),
        ({"prompt": "\ud800"}, 400, None),
        ({"stop": ""}, 400, "invalid_request"),
        ({"logprobs": 3}, 400, "invalid_request"),
        ({"echo": True}, 400, "invalid_request"),
        ({"seed": 2**64}, 400, "invalid_request"),
    ],
)
def test_refusals(server: Any, change: dict[str, Any], status: int, code: str | None) -> None:
    body = {"model": "tiny", "prompt": "Who?", "max_tokens": 4, **change}
    head = {"Content-Type": "application/json"}
    answer = server.http().post("/v1/completions", content=json.dumps(body), headers=head)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert code is None or error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


def test_a_client_that_leaves_frees_its_place(server: Any) -> None:
    engine = server.app.state.engine
    for stream in ("true", "false"):
        body = f'{{"model": "tiny", "prompt": "Who?", "max_tokens": 1900, "temperature": 1.5, "stream": {stream}}}'
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            deadline = time.monotonic() + 60
            while not engine.running and time.monotonic() < deadline:
                time.sleep(0.005)
            assert engine.running
        while engine.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not engine.running
        assert engine.cache.held == 0
