"""Malformed bodies, slow and vanishing clients, full disks, processes killed at any moment: nothing lost, no 5xx."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttmem import Memory, Model
from ttmem.serving.store import Store

from .conftest import TEXTS, Server, running

STAGES = ("converting", "loading", "reading", "reconstruction", "teacher", "stage 1", "stage 2")
JOB = {
    "text": TEXTS["ferry"],
    "name": "job",
    "tokens": 8,
    "preset": "paper",
    "settings": {
        "rollouts": 2,
        "rollout_tokens": 3,
        "top_k": 4,
        "pool": 32,
        "fit_updates": 3,
        "fit_positions": 8,
        "distill_updates": 3,
    },
    "measure": False,
}

# Worker that dies when a stage of its job begins, and takes the server with it where it is told to.
DYING_WORKER = """
import os, signal, sys
from ttmem.serving import worker
show = worker.PipeProgress.show
def dying(self, name, total):
    if name.startswith(sys.argv[1]):
        if sys.argv[2] == "server":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return show(self, name, total)
worker.PipeProgress.show = dying
worker.main()
"""

SERVER = """
import json, resource, sys
from pathlib import Path
from ttmem.serving.server import serve
from ttmem.serving.settings import Limits, ServeSettings
options = json.loads(sys.argv[1])
if "file_bytes" in options:
    resource.setrlimit(resource.RLIMIT_FSIZE, (options["file_bytes"],) * 2)
serve(ServeSettings(data=Path(options["data"]), model=options["model"], dtype="float32", device="cpu", port=0,
                    job_threads=1, job_niceness=0, worker=tuple(options["worker"])))
"""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3000),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["tiny", "tiny+ferry", "ferry", "auto", "user", "system", "text", "\ud800", "\0", "quick", "full"]),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
FIELDS = {
    "/v1/chat/completions": "model messages memory stream temperature top_p max_tokens stop seed n stream_options",
    "/v1/completions": "model prompt memory stream temperature top_p max_tokens stop seed n echo logprobs",
    "/v1/memories": "text name ratio tokens fidelity preset method settings seed measure",
}
messages = st.lists(
    st.fixed_dictionaries({}, optional={"role": scalars, "content": values, "name": scalars}), max_size=3
)


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    """A route and a body that is nearly right: known fields, mostly with senseless values."""
    route = draw(st.sampled_from(sorted(FIELDS)))
    body = draw(st.dictionaries(st.sampled_from(FIELDS[route].split()), values, max_size=8))
    if draw(st.booleans()):
        body |= {"model": "tiny", "max_tokens": draw(st.integers(1, 3))}
        body |= {"messages": draw(messages)} if "chat" in route else {"prompt": draw(values)}
    return route, body


@settings(max_examples=100)
@given(case=bodies())
def test_no_body_is_a_fault(server: Server, case: tuple[str, Any]) -> None:
    send(server, *case)


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of requests, on a busy machine more than one test is given
@settings(max_examples=10_000)
@given(case=bodies())
def test_none_of_thousands_of_bodies_is_a_fault(server: Server, case: tuple[str, Any]) -> None:
    send(server, *case)


def send(server: Server, route: str, body: Any) -> None:
    """A body that is answered, or refused in OpenAI's shape."""
    answer = server.clients[0].post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if answer.status_code == 202:
        server.clients[0].delete(f"/v1/memories/{answer.json()['id']}")


@settings(max_examples=40)
@given(data=st.binary(max_size=300), kind=st.sampled_from(["application/json", "multipart/form-data; boundary=b", "x"]))
def test_no_bytes_are_a_fault(server: Server, data: bytes, kind: str) -> None:
    for route in (*FIELDS, "/v1/memories/import"):
        if kind.startswith("multipart"):
            data = FORM + data + b"\r\n--b--\r\n"
        answer = server.clients[0].post(route, content=data, headers={"Content-Type": kind})
        assert answer.status_code < 500
        if answer.status_code == 202:
            server.clients[0].delete(f"/v1/memories/{answer.json()['id']}")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b"\xff\xfe",
        b"",
        b"null",
    ],
)
def test_bodies_made_to_break_a_parser(server: Server, body: bytes) -> None:
    for route in FIELDS:
        answer = server.http().post(route, content=body, headers={"Content-Type": "application/json"})
        assert 400 <= answer.status_code < 500
        assert "error" in answer.json()


def exchange(server: Server, sent: bytes, seconds: float = 20.0) -> bytes:
    """Raw bytes to the server, and all that comes back until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=seconds) as connection:
        connection.sendall(sent)
        received = b""
        while part := connection.recv(65536):
            received += part
            if b"\r\n\r\n" in received and b"Connection: close" not in sent:
                break
        return received


def test_large_slow_and_broken_requests(make_settings: Any, served: Model, tmp_path: Path) -> None:
    limits = {"body_bytes": 1000, "upload_bytes": 5000, "stall": 1.0}
    with running(make_settings(tmp_path / "data", limits=limits), served) as server:
        client = server.http()
        large = {"model": "tiny", "prompt": "x" * 2000}
        assert client.post("/v1/completions", json=large).status_code == 413
        assert client.post("/v1/memories", json={"text": "x" * 6000}).status_code == 413
        assert client.post("/v1/memories", files={"file": ("x.txt", b"y" * 6000)}).status_code == 413

        def chunks() -> Any:
            for _ in range(100):
                yield b"x" * 100

        head = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=chunks(), headers=head).status_code == 413
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        assert b" 408 " in exchange(server, post + b"Content-Length: 50\r\n\r\n{")
        assert b" 413 " in exchange(server, post + b"Content-Length: 99999999999\r\n\r\n{")
        twice = b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
        for broken in (b"GARBAGE\r\n\r\n", post + b"Content-Length: -4\r\n\r\n", twice):
            assert b" 400 " in exchange(server, broken)
        assert client.get("/healthz").status_code == 200


def test_a_client_that_reads_slowly_delays_nobody(server: Server) -> None:
    port = int(server.url.rpartition(":")[2])
    body = b'{"model": "tiny", "prompt": "Who?", "max_tokens": 1500, "temperature": 1.5, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", port))
        slow.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        slow.recv(10)
        answer = server.http().post("/v1/completions", json={"model": "tiny", "prompt": "Who?", "max_tokens": 3})
        assert answer.status_code == 200


def test_too_much_at_once_is_429(make_settings: Any, served: Model, tmp_path: Path) -> None:
    limits = {"running": 1, "waiting": 1, "jobs": 1}
    with running(make_settings(tmp_path / "data", limits=limits, worker=("sleep", "60")), served) as server:
        body = {"model": "tiny", "prompt": "Who?", "max_tokens": 1000, "temperature": 1.5}
        statuses: list[int] = []

        def ask() -> None:
            with httpx2.Client(base_url=server.url, timeout=120) as client:
                answer = client.post("/v1/completions", json=body)
                statuses.append(answer.status_code)
                if answer.status_code == 429:
                    assert answer.headers["retry-after"] == "1"
                    assert answer.json()["error"]["type"] == "rate_limit_error"

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        client = server.http()
        assert client.post("/v1/memories", json={"text": TEXTS["ferry"]}).status_code == 202
        full = client.post("/v1/memories", json={"text": TEXTS["ferry"]})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_jobs")


def test_a_server_out_of_storage_refuses_and_goes_on_answering(
    make_settings: Any, served: Model, tmp_path: Path, files: dict[str, Path]
) -> None:
    size = files["ferry"].stat().st_size
    with running(make_settings(tmp_path / "data", limits={"disk_bytes": 200_000 + size}), served) as server:
        kept = server.bring(files["ferry"], "ferry")
        refused = server.http().post("/v1/memories", json={"text": "x " * 150_000})
        assert refused.status_code in (400, 413)
        with open(files["lamps"], "rb") as file:
            data = file.read() + b"\0" * 300_000
        refused = server.http().post("/v1/memories/import", files={"file": ("x", data)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_full")
        answer = server.http().post("/v1/completions", json={"model": "tiny+ferry", "prompt": "Who?", "max_tokens": 2})
        assert answer.status_code == 200
        assert [memory["id"] for memory in server.http().get("/v1/memories").json()["data"]] == [kept["id"]]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_killed_at_a_stage_is_followed_by_one_that_goes_on(
    make_settings: Any, served: Model, tmp_path: Path, stage: str
) -> None:
    """The second worker finds that the first has been, and lives."""
    once = tmp_path / "once"
    script = tmp_path / "worker.py"
    script.write_text(
        f"import os\nif os.path.exists({str(once)!r}):\n    from ttmem.serving import worker\n    worker.main()\n"
        "else:\n"
        f"    open({str(once)!r}, 'w').close()\n" + "".join(f"    {line}\n" for line in DYING_WORKER.splitlines())
    )
    worker = (sys.executable, str(script), stage, "self")
    with running(make_settings(tmp_path / "data", worker=worker), served) as server:
        id = server.http().post("/v1/memories", json=JOB).json()["id"]
        assert server.wait(id)["status"] == "ready"
        assert 'ttmem_jobs_total{outcome="died"} 1.0' in server.http().get("/metrics").text


class Process:
    """A server in a process of its own, which can be killed."""

    def __init__(self, data: Path, model: Path, worker: tuple[str, ...] | None = None, **options: Any) -> None:
        worker = worker or (sys.executable, "-m", "ttmem.serving.worker")
        arguments = json.dumps({"data": str(data), "model": str(model), "worker": worker, **options})
        self.process = subprocess.Popen([sys.executable, "-c", SERVER, arguments], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("event") == "listening":
                self.url = entry["url"]
                self.client = httpx2.Client(base_url=self.url, timeout=120)
                break
        else:
            raise AssertionError("the server did not start")
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def wait(self, id: str) -> Any:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            found = self.client.get(f"/v1/memories/{id}").json()
            if found["status"] not in ("queued", "running"):
                return found
            time.sleep(0.1)
        raise AssertionError(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_killed_at_every_stage_finishes_its_job(tmp_path: Path, model_folder: Path) -> None:
    """Server and worker die together at one stage after the other; each start goes on with the same job."""
    id = None
    for stage in ("loading", "teacher", "stage 2"):
        server = Process(tmp_path / "data", model_folder, (sys.executable, "-c", DYING_WORKER, stage, "server"))
        if id is None:
            id = server.client.post("/v1/memories", json=JOB).json()["id"]
        server.process.wait(timeout=240)
        assert server.process.returncode == -signal.SIGKILL
        store = Store(tmp_path / "data")
        assert store.find("local", id).status == "queued"
        store.close()
    server = Process(tmp_path / "data", model_folder)
    try:
        assert server.wait(id)["status"] == "ready"
        answer = server.client.post("/v1/completions", json={"model": "tiny+job", "prompt": "Who?", "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        server.kill()


@pytest.mark.slow
def test_a_server_killed_during_uploads_and_answers_loses_nothing_finished(
    tmp_path: Path, model_folder: Path, files: dict[str, Path], memories: dict[str, Memory]
) -> None:
    server = Process(tmp_path / "data", model_folder)
    with open(files["ferry"], "rb") as file:
        kept = server.client.post("/v1/memories/import", files={"file": file}, data={"name": "ferry"}).json()["id"]
    ask = {"model": "tiny+ferry", "prompt": "\n\nWho?", "max_tokens": 10}
    before = server.client.post("/v1/completions", json=ask).json()["choices"]

    def upload() -> Any:
        yield FORM
        while server.process.poll() is None:
            yield b"word " * 1000
            time.sleep(0.01)

    cut: list[str] = []

    def failing(call: Any) -> None:
        try:
            call()
        except httpx2.TransportError as error:
            cut.append(type(error).__name__)

    head = {"Content-Type": "multipart/form-data; boundary=b"}
    long = {**ask, "max_tokens": 1900}
    calls = [
        lambda: httpx2.post(f"{server.url}/v1/memories", content=upload(), headers=head, timeout=99),
        lambda: httpx2.post(f"{server.url}/v1/completions", json=long, timeout=99),
    ]
    threads = [threading.Thread(target=failing, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60  # both are under way: bytes of the upload are in, the answer is being written
    while time.monotonic() < deadline:
        metrics = server.client.get("/metrics").text
        if "ttmem_running_sequences 1.0" in metrics:
            break
    time.sleep(0.2)
    server.kill()
    for thread in threads:
        thread.join()
    assert len(cut) == 2, "upload and answer were to be cut off by the kill"
    again = Process(tmp_path / "data", model_folder)
    try:
        listed = again.client.get("/v1/memories").json()["data"]
        assert [memory["id"] for memory in listed] == [kept]
        assert again.client.post("/v1/completions", json=ask).json()["choices"] == before
        assert os.listdir(tmp_path / "data" / "incoming") == []
        assert os.listdir(tmp_path / "data" / "jobs") == []
    finally:
        again.kill()


@pytest.mark.slow
def test_a_disk_that_takes_no_more(tmp_path: Path, model_folder: Path, files: dict[str, Path]) -> None:
    """The system itself refuses to write files larger than a limit, the database's included."""
    limit = 200_000
    server = Process(tmp_path / "data", model_folder, file_bytes=limit)
    try:
        with open(files["ferry"], "rb") as file:
            kept = server.client.post("/v1/memories/import", files={"file": file}).json()["id"]
        large = server.client.post("/v1/memories/import", files={"file": ("x", b"0" * (limit + 5000))})
        assert large.status_code == 413
        statuses = set()
        for i in range(200):  # until the database's log cannot grow any more
            text = {"text": f"{i} short text here", "name": f"n{i}", "method": "full"}
            answer = server.client.post("/v1/memories", json=text)
            assert answer.status_code < 500, answer.text
            statuses.add(answer.status_code)
            if answer.status_code == 202:
                deleted = server.client.delete(f"/v1/memories/{answer.json()['id']}")
                assert deleted.status_code in (200, 413)
        assert 413 in statuses
        ask = {"model": "tiny", "memory": kept, "prompt": "Who?", "max_tokens": 2}
        assert server.client.post("/v1/completions", json=ask).status_code == 200
    finally:
        server.kill()
    again = Process(tmp_path / "data", model_folder)
    try:
        assert again.client.get(f"/v1/memories/{kept}").json()["status"] == "ready"
    finally:
        again.kill()
