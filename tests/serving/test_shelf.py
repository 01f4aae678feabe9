"""Documents in, memories out, over a real server with real compactions in child processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ttmem import Memory, Model, compact
from ttmem.compaction.settings import PRESETS

from .conftest import TEXTS

TINY = {"rollouts": 2, "rollout_tokens": 3, "top_k": 4, "pool": 32, "replay_pool": 32}


def sse(text: str) -> list[Any]:
    """The events of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]


@pytest.mark.slow
def test_a_document_becomes_the_memory_that_compact_gives(server: Any, served: Model, tmp_path: Path) -> None:
    client = server.http()
    body = {"text": TEXTS["ferry"], "name": "job", "ratio": 3, "preset": "quick", "settings": TINY, "measure": False}
    made = client.post("/v1/memories", json=body)
    assert made.status_code == 202, made.text
    id = made.json()["id"]
    early = client.post("/v1/completions", json={"model": "tiny+job", "prompt": "Who?"})
    assert (early.status_code, early.json()["error"]["code"]) in ((409, "memory_queued"), (409, "memory_running"))
    followed = sse(client.get(f"/v1/memories/{id}/events").text)
    assert followed[-1]["status"] == "ready", followed[-1]
    fractions = [event["progress"]["fraction"] for event in followed if event["progress"]]
    assert fractions == sorted(fractions)
    found = server.wait(id)
    first = ["converting", "loading the model", "reading the document"]
    seen = [[part["stage"] for part in event["progress"]["stages"]] for event in followed if event["progress"]]
    # Events are samples: a tiny job may end before its last stages are seen. What it took is told by the timings.
    assert all(stages[:3] == first[: len(stages)] for stages in seen)
    assert list(server.app.state.store.timings("latent/quick"))[:3] == first
    assert found["losses"] == followed[-1]["losses"] == {}  # nothing is trained
    assert "losses" not in client.get("/v1/memories").json()["data"][-1]
    assert found["details"]["document"]["tokens"] == len(served.encode(TEXTS["ferry"]))
    file = tmp_path / "memory.ttmem"
    file.write_bytes(client.get("/v1/memories/job/file").content)
    memory = Memory.load(file)
    assert memory.tokens is None  # not kept unless asked for
    assert found["details"]["document_kept"] is False
    kept = client.post("/v1/memories", json={**body, "name": "kept", "keep_document": True}).json()["id"]
    assert server.wait(kept)["details"]["document_kept"] is True
    for name, whole in (("job", 409), ("kept", 200)):
        full = {"model": "tiny", "memory": name, "context": "full", "prompt": "Who?", "max_tokens": 2}
        assert client.post("/v1/completions", json=full).status_code == whole
    from dataclasses import replace

    expected = compact(
        served, TEXTS["ferry"], ratio=3, settings=replace(PRESETS["quick"], **TINY), name="job", measure=False
    )
    for ours, theirs in zip(memory.compacted, expected.compacted, strict=True):
        assert ours.lengths == theirs.lengths
        assert (ours.keys - theirs.keys).abs().max() < 1e-4
    answer = client.post("/v1/completions", json={"model": "tiny", "memory": id, "prompt": "Who?"})
    assert answer.status_code == 200
    assert client.delete(f"/v1/memories/{id}").json()["deleted"] is True
    for path in ("", "/file", "/events"):
        assert client.get(f"/v1/memories/{id}{path}").status_code == 404
    assert client.post("/v1/completions", json={"model": "tiny+job", "prompt": "Who?"}).status_code == 404


@pytest.mark.slow
def test_losses_are_followed_and_kept(server: Any) -> None:
    client = server.http()
    trained = {**TINY, "distill_updates": 5, "fit_updates": 7, "fit_positions": 8}
    body = {"text": TEXTS["ferry"], "tokens": 8, "preset": "paper", "settings": trained, "measure": False}
    id = client.post("/v1/memories", json=body).json()["id"]
    followed = sse(client.get(f"/v1/memories/{id}/events").text)
    losses = followed[-1]["losses"]
    assert {stage: points[-1][0] for stage, points in losses.items()} == {
        "stage 1: attention fitting": 7,
        "stage 2: distillation": 5,
    }
    assert all(points[0][0] == 1 and all(loss > 0 for _, loss in points) for points in losses.values())
    assert client.get(f"/v1/memories/{id}").json()["losses"] == losses
    assert "losses" not in client.get(f"/v1/memories/{id}").json()["details"]
    assert client.delete(f"/v1/memories/{id}").status_code == 200
    assert id not in server.app.state.jobs.curves


def test_the_budget_is_told_for_ready_memories(server: Any, memories: dict[str, Memory]) -> None:
    client = server.http()
    for _ in range(2):  # worked out, then from the cache
        found = client.get("/v1/memories/ferry/budget").json()
        assert found["id"] == client.get("/v1/memories/ferry").json()["id"]
        assert [tuple(layer["entries"]) for layer in found["layers"]] == [
            layer.lengths for layer in memories["ferry"].compacted
        ]
    queued = client.post("/v1/memories", json={"text": TEXTS["lamps"]}).json()["id"]
    answer = client.get(f"/v1/memories/{queued}/budget")
    assert answer.status_code == 409
    client.delete(f"/v1/memories/{queued}")
    assert client.get(f"/v1/memories/{queued}/budget").status_code == 404


def test_jobs_are_cancelled_and_deleted(server: Any) -> None:
    client = server.http()
    ids = [
        client.post("/v1/memories", json={"text": TEXTS["lamps"], "preset": "thorough"}).json()["id"] for _ in range(3)
    ]
    assert server.wait(ids[0], until=("running",))["progress"] is not None
    assert client.delete(f"/v1/memories/{ids[1]}").status_code == 200  # while it is queued
    assert client.post(f"/v1/memories/{ids[0]}/cancel").json()["status"] == "cancelled"
    assert client.post(f"/v1/memories/{ids[0]}/cancel").status_code == 409
    answer = client.post("/v1/completions", json={"model": f"tiny+{ids[0]}", "prompt": "Who?"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "memory_cancelled")
    assert server.wait(ids[2], until=("running",))  # the next has its turn
    assert client.delete(f"/v1/memories/{ids[2]}").status_code == 200
    deadline = time.monotonic() + 30
    while list(server.app.state.store.jobs.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(server.app.state.store.jobs.iterdir())
    listed = [memory["id"] for memory in client.get("/v1/memories").json()["data"]]
    assert ids[0] in listed
    assert ids[1] not in listed


def test_a_file_is_taken_as_it_is_and_given_back(server: Any, files: dict[str, Path]) -> None:
    client = server.http()
    brought = server.bring(files["lamps"], "again")
    assert brought["status"] == "ready"
    assert brought["details"]["method"] == "kvzip+"
    assert client.get("/v1/memories/again/file").content == files["lamps"].read_bytes()
    with open(files["lamps"], "rb") as file:
        taken = client.post("/v1/memories/import", files={"file": file}, data={"name": "again"})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert client.delete("/v1/memories/again").status_code == 200


def test_files_that_are_not_sound_are_refused(
    server: Any, files: dict[str, Path], tmp_path: Path, make_full: Any, gemma: Model, memories: dict[str, Memory]
) -> None:
    client, sound = server.http(), files["ferry"].read_bytes()
    make_full(gemma).save(tmp_path / "other.ttmem")
    deep = b'{"__metadata__":{"ttmem":"' + b"[" * 100_000 + b'"}}'
    bad = {
        "empty": b"",
        "cut": sound[:-7],
        "altered": sound[:-3] + b"xyz",
        "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
        "deep": len(deep).to_bytes(8, "little") + deep,
        "another model's": (tmp_path / "other.ttmem").read_bytes(),
    }
    before = client.get("/v1/memories").json()
    for name, data in bad.items():
        answer = client.post("/v1/memories/import", files={"file": ("x.ttmem", data)})
        assert answer.status_code == 400, (name, answer.text)
        assert str(tmp_path) not in answer.text
        assert str(server.settings.data) not in answer.text
    forged = Memory(memories["ferry"].layers[:-1], memories["ferry"].document_length, memories["ferry"].info)
    forged.save(tmp_path / "forged.ttmem")  # says it is of this model, and has a layer less
    answer = client.post("/v1/memories/import", files={"file": ("x", (tmp_path / "forged.ttmem").read_bytes())})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "memory_mismatch_error")
    assert client.get("/v1/memories").json() == before
    assert not list(server.app.state.store.incoming.iterdir())


def test_a_file_that_is_damaged_later_is_told_and_stays(server: Any, files: dict[str, Path]) -> None:
    id = server.bring(files["ferry"])["id"]
    path = server.app.state.store.memory_file(id)
    data = bytearray(path.read_bytes())
    data[-5] ^= 255
    path.write_bytes(data)
    client = server.http()
    for code in ("memory_unusable", "memory_failed"):
        answer = client.post("/v1/completions", json={"model": "tiny", "memory": id, "prompt": "Who?"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, code)
    assert client.get(f"/v1/memories/{id}").json()["error"]["code"] == "memory_damaged"
    assert path.exists()
    assert client.delete(f"/v1/memories/{id}").status_code == 200
    assert not path.exists()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": ""}, 400, "invalid_request"),
        ({"text": "  \n "}, 400, "document_error"),
        ({"text": "word " * 5000}, 400, "document_error"),
        ({"text": "a\ud800b"}, 400, None),
        ({"text": "short text here", "ratio": 0.5}, 400, "invalid_request"),
        ({"text": "short text here", "ratio": 1000}, 400, "budget_error"),
        ({"text": "short text here", "ratio": 2, "tokens": 9}, 400, "invalid_request"),
        ({"text": "short text here", "preset": "best"}, 400, "budget_error"),
        ({"text": "short text here", "method": "magic"}, 400, "budget_error"),
        ({"text": "short text here", "settings": {"rollouts": 481}}, 400, "budget_error"),
        ({"text": "short text here", "settings": {"rollouts": True}}, 400, "budget_error"),
        ({"text": "short text here", "settings": {"pool": 10**12}}, 400, "budget_error"),
        ({"text": "short text here", "settings": {"nothing": 1}}, 400, "budget_error"),
        ({"text": "short text here", "settings": {"merging": "equal"}}, 400, "budget_error"),
        ({"text": "short text here", "name": "auto"}, 400, "name_reserved"),
        ({"text": "short text here", "name": "mem-1"}, 400, "name_reserved"),
        ({"text": "short text here", "name": "../x"}, 400, "invalid_request"),
        ({"text": "short text here", "name": "ferry", "ratio": 2}, 409, "name_taken"),
        ({"text": "short text here", "path": "/etc/passwd"}, 400, "invalid_request"),
        ([1], 400, "invalid_request"),
    ],
)
def test_refusals(server: Any, body: Any, status: int, code: str | None) -> None:
    head = {"Content-Type": "application/json"}
    answer = server.http().post("/v1/memories", content=json.dumps(body), headers=head)
    assert answer.status_code == status, answer.text
    assert code is None or answer.json()["error"]["code"] == code
    assert not list(server.app.state.store.incoming.iterdir())


@pytest.mark.parametrize(
    ("filename", "data", "fields", "status"),
    [
        ("x.exe", b"MZ", {}, 415),
        ("x.txt", b"\xff\xfe\x00a", {}, 400),
        ("x.md", b"a\0b", {}, 400),
        ("x.txt", b"some text", {"ratio": "many"}, 400),
        ("x.txt", b"some text", {"settings": "{"}, 400),
        ("x.txt", b"some text", {"other": "1"}, 400),
    ],
)
def test_refused_uploads(server: Any, filename: str, data: bytes, fields: dict[str, str], status: int) -> None:
    answer = server.http().post("/v1/memories", files={"file": (filename, data)}, data=fields)
    assert answer.status_code == status, answer.text


def test_forms_without_a_file(server: Any) -> None:
    client = server.http()
    for path in ("/v1/memories", "/v1/memories/import"):
        assert client.post(path, files={"other": ("x.txt", b"text")}).status_code == 400
        assert client.post(path, content=b"plain", headers={"Content-Type": "text/plain"}).status_code == 415
        broken = client.post(path, content=b"--x\r\n", headers={"Content-Type": "multipart/form-data; boundary=x"})
        assert broken.status_code == 400
