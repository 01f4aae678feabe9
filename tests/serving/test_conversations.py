"""Conversations that compact themselves, over HTTP: found by what was said, told in the answer, forgotten on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttmem import Memory, Model, ServeError
from ttmem.conversation import render_chat
from ttmem.long_conversation import Folding, LongConversation
from ttmem.serving.folds import FoldStore, beginnings

from .conftest import ALICE, BOB, running

AUTO: dict[str, Any] = {"threshold": 80, "keep": 30, "ratios": [2.0, 4.0], "method": "kvzip+", "wait": True}
TURNS = ["Who keeps the lamps?", "And when are they lit?", "Where is the boat kept?"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def auto(
    tmp_path_factory: pytest.TempPathFactory, make_settings: Any, served: Model, files: dict[str, Path], key_file: Path
) -> Iterator[Any]:
    settings = make_settings(tmp_path_factory.mktemp("auto"), key_file=key_file)
    with running(settings, served) as server:
        server.bring(files["ferry"], "ferry", ALICE)
        yield server


def talk(client: Any, model: str, turns: list[str], system: str | None = None, **auto: Any) -> tuple[list[Any], Any]:
    """All messages sent each time, as clients do. Returns the messages and the answers' bodies."""
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    bodies = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        body = {"model": model, "messages": messages, "memory": "auto", "max_tokens": 6, "auto": {**AUTO, **auto}}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        bodies.append(answer.json())
        content = bodies[-1]["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content + " Aye."})
    return messages, bodies


@pytest.mark.parametrize("model", ["tiny+ferry", pytest.param("tiny", marks=pytest.mark.slow)])
def test_older_turns_are_folded_and_told(auto: Any, served: Model, memories: dict[str, Memory], model: str) -> None:
    messages, bodies = talk(auto.http(ALICE), model, TURNS, system="Be brief.")
    told = [body["conversation"] for body in bodies]
    assert told[0] == {"id": None, "folded_messages": 0, "folded_tokens": 0, "parts": [], "folding": False}
    assert [fold["folded_messages"] for fold in told] == sorted(fold["folded_messages"] for fold in told)
    last = told[-1]
    assert last["folded_messages"] >= 2
    assert last["parts"][-1]["ratio"] == 2.0
    assert last["folded_tokens"] == sum(part["tokens"] for part in last["parts"])
    assert len(last["parts"]) == 2
    assert last["parts"][0]["ratio"] == 4.0
    behind = model != "tiny"
    usage, whole = bodies[-1]["usage"], render_chat(served, messages[:-1], behind)
    document = memories["ferry"].document_length if behind else 0
    assert usage["document_tokens"] + usage["prompt_tokens"] == document + len(whole)
    assert usage["prompt_tokens"] < len(whole)
    assert all("failed" not in fold for fold in told)


def test_the_answer_is_a_long_conversations(auto: Any, served: Model, memories: dict[str, Memory]) -> None:
    messages, bodies = talk(auto.http(ALICE), "tiny+ferry", TURNS[:2], ratios=[1.0])
    folding = Folding(AUTO["threshold"], AUTO["keep"], (1.0,), method="kvzip+")
    conversation = LongConversation(served, memories["ferry"], folding=folding, max_new_tokens=6)
    conversation.messages = messages[:2]
    reply = conversation.say(messages[2]["content"])
    assert bodies[-1]["conversation"]["folded_messages"] == conversation.folded == 2
    assert bodies[-1]["choices"][0]["message"]["content"].strip() == reply.strip()


@pytest.mark.slow
def test_turns_are_latently_compacted_by_default(auto: Any) -> None:
    _, bodies = talk(auto.http(ALICE), "tiny", ["Who sails at dawn, and with whom?", "Why?"], method="latent")
    told = bodies[-1]["conversation"]
    assert told["folded_messages"] == 2
    assert told["memory_tokens"] < told["folded_tokens"]


def test_a_stream_tells_it_too(auto: Any) -> None:
    client = auto.openai(ALICE)
    messages = [{"role": "user", "content": "Who rows?"}]
    extra = {"memory": "auto"}
    (first, *_) = client.chat.completions.create(
        model="tiny+ferry", messages=messages, max_tokens=3, stream=True, extra_body=extra
    )
    assert first.conversation["folded_messages"] == 0


def test_no_answer_waits_for_a_folding_unless_it_would(auto: Any) -> None:
    client = auto.http(ALICE)
    messages, bodies = talk(client, "tiny+ferry", ["Who mends the nets, and where?", "Why is that so?"], wait=False)
    assert bodies[-1]["conversation"]["folding"] is True
    assert bodies[-1]["conversation"]["folded_messages"] == 0
    assert bodies[-1]["usage"]["prompt_tokens"] > AUTO["threshold"]
    deadline = time.monotonic() + 120
    body = {"model": "tiny+ferry", "messages": messages[:-1], "memory": "auto", "max_tokens": 2}
    while time.monotonic() < deadline:
        told = client.post("/v1/chat/completions", json={**body, "auto": {**AUTO, "wait": False}}).json()
        if told["conversation"]["folded_messages"]:
            break
        time.sleep(0.2)
    assert told["conversation"]["folded_messages"] == 2
    assert told["conversation"]["folding"] is False


@pytest.mark.slow
def test_another_key_finds_nothing_of_it(auto: Any) -> None:
    alice, bob = auto.http(ALICE), auto.http(BOB)
    messages, _ = talk(alice, "tiny", TURNS[:2])
    listed = alice.get("/v1/conversations").json()["data"]
    assert listed
    assert bob.get("/v1/conversations").json()["data"] == []
    body = {"model": "tiny", "messages": messages, "memory": "auto", "max_tokens": 2}
    told = bob.post("/v1/chat/completions", json={**body, "auto": {**AUTO, "wait": False}}).json()
    assert told["conversation"]["folded_messages"] == 0
    for id in (listed[0]["id"], "none"):
        gone = bob.delete(f"/v1/conversations/{id}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "conversation_not_found")
    assert alice.delete(f"/v1/conversations/{listed[0]['id']}").json()["deleted"] is True
    assert alice.delete("/v1/conversations").json()["deleted"] == len(listed) - 1
    assert alice.get("/v1/conversations").json()["data"] == []
    left = [path for path in (auto.settings.data / "conversations").iterdir() if path.is_dir()]
    assert all(path.name not in {fold["id"] for fold in listed} for path in left)


@pytest.mark.slow
def test_a_deleted_document_takes_its_conversations_along(auto: Any, files: dict[str, Path]) -> None:
    client = auto.http(ALICE)
    id = auto.bring(files["lamps"], "lamps", ALICE)["id"]
    talk(client, "tiny+lamps", TURNS)
    before = len(client.get("/v1/conversations").json()["data"])
    client.delete(f"/v1/memories/{id}")
    assert len(client.get("/v1/conversations").json()["data"]) == before - 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"auto": {"threshold": 10, "keep": 20}}, "invalid_options"),
        ({"auto": {"ratios": []}}, "invalid_request"),
        ({"auto": {"ratios": [8, 4]}}, "invalid_options"),
        ({"auto": {"preset": "paper"}}, "invalid_request"),
        ({"auto": {"method": "snapkv"}}, "invalid_options"),
        ({"memory": None, "auto": {}}, "not_auto"),
        ({"model": "tiny+nothing"}, "memory_not_found"),
    ],
)
def test_refusals(auto: Any, change: dict[str, Any], code: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "memory": "auto", **change}
    answer = auto.http(ALICE).post("/v1/chat/completions", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["code"] == code


def test_a_saved_conversation_goes_on_as_it_was(served: Model, memories: dict[str, Memory], tmp_path: Path) -> None:
    def fresh() -> LongConversation:
        folding = Folding(80, 30, (2.0, 4.0), method="kvzip+")
        return LongConversation(served, memories["ferry"], folding=folding, max_new_tokens=4)

    first = fresh()
    for turn in TURNS:
        first.say(turn)
    assert first.folds
    first.save(tmp_path / "kept")
    second = fresh()
    second.restore(tmp_path / "kept", first.messages, first.folded)
    assert second.memory.document_length == first.memory.document_length
    for one, other in zip(first.memory.compacted, second.memory.compacted, strict=True):
        assert one.lengths == other.lengths
        assert (one.keys - other.keys).abs().max() == 0
    assert first.say("Why?") == second.say("Why?")


def add(store: FoldStore, owner: str, digest: str, messages: int, size: int, document: str | None = None) -> str:
    fresh = store.path(f"conv-{owner}-{digest[:6]}.partial")
    fresh.mkdir()
    (fresh / "memory.ttmem").write_bytes(b"x" * size)
    return store.add(fresh.name.removesuffix(".partial"), owner, document, digest, messages, {}, fresh).id


def test_the_longest_beginning_is_found(tmp_path: Path) -> None:
    store = FoldStore(tmp_path / "folds", 10_000)
    messages = [{"role": "user", "content": str(i)} for i in range(6)]
    digests = beginnings(["doc"], messages)
    assert len(set(digests)) == 6
    assert digests[:3] == beginnings(["doc"], messages[:3])
    assert set(digests).isdisjoint(beginnings(["other"], messages))
    add(store, "a", digests[1], 2, 10)
    longer = add(store, "a", digests[3], 4, 10)
    found = store.longest("a", digests)
    assert found is not None
    assert (found.id, found.messages) == (longer, 4)
    assert store.longest("a", digests[:3]).messages == 2  # type: ignore[union-attr]
    assert store.longest("b", digests) is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = FoldStore(tmp_path / "folds", 250)
    ids = [add(store, "a", digest * 10, 2, 100) for digest in "xy"]
    assert store.longest("a", ["x" * 10]) is not None  # used after y
    ids.append(add(store, "a", "z" * 10, 2, 100))
    assert [store.path(id).exists() for id in ids] == [True, False, True]
    huge = add(store, "a", "h" * 10, 2, 1000)
    assert [fold["id"] for fold in store.page("a")] == [huge]


def test_a_cache_that_is_damaged_says_so(tmp_path: Path) -> None:
    (tmp_path / "conversations.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ServeError, match="may be removed"):
        FoldStore(tmp_path, 1000)


def test_what_a_kill_leaves_is_swept(tmp_path: Path) -> None:
    store = FoldStore(tmp_path / "folds", 1000)
    kept, lost = add(store, "a", "x" * 10, 2, 10), add(store, "a", "y" * 10, 2, 10)
    store.memory_file(lost).unlink()
    (tmp_path / "folds" / "conv-half.partial").mkdir()
    store.close()
    again = FoldStore(tmp_path / "folds", 1000)
    assert [fold["id"] for fold in again.page("a")] == [kept]
    assert sorted(path.name for path in (tmp_path / "folds").iterdir() if path.is_dir()) == [kept]
