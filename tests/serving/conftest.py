"""A tiny model in a folder, memories of it, and real servers in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from ttmem import Memory, Model, compact, load_model
from ttmem.serving.app import create_app
from ttmem.serving.keys import Keys
from ttmem.serving.settings import Limits, ServeSettings

ALICE, BOB, WATCHER = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "watcher"))
TEXTS = {
    "ferry": "The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays, from the east quay.",
    "lamps": "Nobody may carry paraffin below. The lamps are the mate's: Ines Holm lights them at four.",
}


@dataclass
class Server:
    """A running server and ways to talk to it."""

    url: str
    app: FastAPI
    settings: ServeSettings
    clients: list[Any] = field(default_factory=list)

    def http(self, key: str | None = None, **options: Any) -> httpx2.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        client = httpx2.Client(base_url=self.url, headers=headers, timeout=120, **options)
        self.clients.append(client)
        return client

    def openai(self, key: str = "none") -> OpenAI:
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)
        self.clients.append(client)
        return client

    def bring(self, path: Path, name: str | None = None, key: str | None = None) -> dict[str, Any]:
        """Import a memory file."""
        data = {} if name is None else {"name": name}
        with open(path, "rb") as file:
            answer = self.http(key).post("/v1/memories/import", files={"file": file}, data=data)
        assert answer.status_code == 201, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def wait(self, id: str, key: str | None = None, until: tuple[str, ...] = ("ready", "failed", "cancelled")) -> Any:
        """Poll a memory until it has come to its end."""
        client, deadline = self.http(key), time.monotonic() + 240
        while time.monotonic() < deadline:
            found = client.get(f"/v1/memories/{id}").json()
            if found["status"] in until:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{id} is still {found}")


@contextmanager
def running(settings: ServeSettings, model: Model, keys: Keys | None = None) -> Iterator[Server]:
    """A real server on a free port, in a thread."""
    app = create_app(settings, model, keys)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http="h11", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    found = Server(f"http://127.0.0.1:{port}", app, settings)
    try:
        yield found
    finally:
        for client in found.clients:
            client.close()
        server.should_exit = True
        thread.join(timeout=60)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, make_network: Any, make_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_network("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served(model_folder: Path) -> Model:
    return load_model(str(model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def memories(served: Model) -> dict[str, Memory]:
    return {name: compact(served, text, ratio=3, method="kvzip+", measure=False) for name, text in TEXTS.items()}


@pytest.fixture(scope="session")
def files(memories: dict[str, Memory], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    for name, memory in memories.items():
        memory.save(folder / f"{name}.ttmem")
    return {name: folder / f"{name}.ttmem" for name in memories}


@pytest.fixture(scope="session")
def make_settings(model_folder: Path) -> Callable[..., ServeSettings]:
    """(data, limits={}, **settings) -> settings of a server for the tiny model."""

    def settings(data: Path, limits: dict[str, Any] | None = None, **others: Any) -> ServeSettings:
        options: dict[str, Any] = {"model": str(model_folder), "dtype": "float32", "device": "cpu"}
        options |= {"job_threads": 1, "job_niceness": 0}
        return ServeSettings(data=data, limits=Limits(**(limits or {})), **{**options, **others})

    return settings


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# keys of the tests\nalice {ALICE}\n\n{BOB}\nmetrics {WATCHER}\n")
    return path


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, make_settings: Any, served: Model, files: dict[str, Path]
) -> Iterator[Server]:
    """A server without keys, with the memories `ferry` and `lamps`."""
    with running(make_settings(tmp_path_factory.mktemp("data")), served) as server:
        for name, path in files.items():
            server.bring(path, name)
        yield server


@pytest.fixture(scope="module")
def keyed(
    tmp_path_factory: pytest.TempPathFactory,
    make_settings: Any,
    served: Model,
    files: dict[str, Path],
    key_file: Path,
) -> Iterator[Server]:
    """A server with keys; Alice has the memory `ferry`."""
    settings = make_settings(tmp_path_factory.mktemp("keyed"), key_file=key_file)
    with running(settings, served) as server:
        server.bring(files["ferry"], "ferry", ALICE)
        yield server
