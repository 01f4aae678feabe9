"""Keys apart from each other, browsers kept out, nothing private in the logs, no path to the file system."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from ttmem import Model
from ttmem.serving.logs import JsonLines

from .conftest import ALICE, BOB, WATCHER, running


def test_a_key_is_needed(keyed: Any) -> None:
    for key in (None, "wrong-key-0123456789"):
        for path in ("/v1/models", "/v1/memories", "/metrics", "/v1/nothing"):
            answer = keyed.http(key).get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
    assert keyed.http().get("/healthz").json() == {"status": "ok"}


def test_another_keys_memory_is_as_if_it_were_not(keyed: Any, files: dict[str, Path]) -> None:
    """Status, body and headers are the same for what is another's and for what is nowhere."""
    alice, bob = keyed.http(ALICE), keyed.http(BOB)
    (memory,) = alice.get("/v1/memories").json()["data"]
    assert bob.get("/v1/memories").json()["data"] == []
    assert [model["id"] for model in bob.get("/v1/models").json()["data"]] == ["tiny"]

    def seen(reference: str) -> list[Any]:
        ask = {"prompt": "Who?", "max_tokens": 2}
        answers = [
            bob.get(f"/v1/memories/{reference}"),
            bob.get(f"/v1/memories/{reference}/file"),
            bob.get(f"/v1/memories/{reference}/events"),
            bob.get(f"/v1/memories/{reference}/budget"),
            bob.post(f"/v1/memories/{reference}/cancel"),
            bob.delete(f"/v1/memories/{reference}"),
            bob.get("/v1/memories", params={"after": reference}),
            bob.get(f"/v1/models/tiny+{reference}"),
            bob.post("/v1/completions", json={"model": "tiny", "memory": reference, **ask}),
            bob.post("/v1/completions", json={"model": f"tiny+{reference}", **ask}),
        ]
        assert all(answer.status_code == 404 for answer in answers)
        return [(answer.status_code, answer.text, sorted(answer.headers)) for answer in answers]

    nowhere = seen("mem-" + "0" * 24)
    assert seen(memory["id"]) == nowhere
    assert seen("ferry") == nowhere
    own = keyed.bring(files["lamps"], "ferry", BOB)  # the name is free for Bob
    assert own["id"] != memory["id"]
    assert bob.get("/v1/memories/ferry").json()["id"] == own["id"]
    assert alice.get("/v1/memories/ferry").json()["id"] == memory["id"]
    assert bob.delete("/v1/memories/ferry").status_code == 200
    assert alice.get("/v1/memories/ferry").status_code == 200


def test_metrics_count_over_all_keys_and_take_their_own(keyed: Any) -> None:
    assert keyed.http(ALICE).get("/metrics").status_code == 403
    assert keyed.http(WATCHER).get("/v1/memories").status_code == 403
    text = keyed.http(WATCHER).get("/metrics").text
    assert "ttmem_requests_total" in text
    for private in ("mem-", "alice", "ferry", ALICE):
        assert private not in text


def test_metrics_count(server: Any) -> None:
    def value(name: str) -> float:
        lines = server.http().get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    before = value("ttmem_completion_tokens_total"), value("ttmem_first_token_seconds_count")
    body = {"model": "tiny", "prompt": "Who?", "max_tokens": 5}
    usage = server.http().post("/v1/completions", json=body).json()["usage"]
    assert value("ttmem_completion_tokens_total") == before[0] + usage["completion_tokens"]
    assert value("ttmem_first_token_seconds_count") == before[1] + 1
    server.http().get("/v1/no-such-route/ferry")
    assert 'route="other"' in server.http().get("/metrics").text
    assert "no-such-route" not in server.http().get("/metrics").text


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_web_pages_are_kept_out(server: Any, origin: str) -> None:
    client = server.http()
    answer = client.get("/v1/models", headers={"Origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options("/v1/models", headers=asked).headers
    files = {"file": ("x.txt", b"a form needs no permission of the browser")}
    assert client.post("/v1/memories", files=files, headers={"Origin": origin}).status_code == 403


def test_other_names_of_this_machine_are_refused_without_keys(server: Any, keyed: Any) -> None:
    """A page whose name has been pointed at this machine would ask by that name."""
    assert server.http().get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert server.http().get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200
    assert keyed.http(ALICE).get("/v1/models", headers={"Host": "memories.example"}).status_code == 200


def test_an_origin_that_is_allowed(make_settings: Any, served: Model, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<p>hello</p>")
    settings = make_settings(tmp_path / "data", origins=("https://app.example",), static=page)
    with running(settings, served) as server:
        client = server.http()
        own = client.get("/v1/models", headers={"Origin": "https://app.example"})
        assert own.headers["access-control-allow-origin"] == "https://app.example"
        assert client.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403
        assert client.get("/v1/models", headers={"Origin": server.url}).status_code == 200
        asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/chat/completions", headers=asked).status_code == 200
        assert client.get("/").text == "<p>hello</p>"
        for path in ("/../data/ttmem.sqlite", "/%2e%2e/data/ttmem.sqlite", "/..%2fdata%2fttmem.sqlite"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    "reference", ["..%2f..%2fetc%2fpasswd", "%2e%2e", "a%00b", "x" * 5000, "%ff%fe", "'%20OR%20'1'='1", "mem-*"]
)
def test_no_reference_is_a_path_or_a_query(server: Any, reference: str) -> None:
    client = server.http()
    for path in (f"/v1/memories/{reference}", f"/v1/memories/{reference}/file", f"/v1/models/tiny+{reference}"):
        assert client.get(path).status_code in (400, 404)
    assert client.delete(f"/v1/memories/{reference}").status_code in (400, 404)


def requests_logged(caplog: pytest.LogCaptureFixture) -> int:
    """Requests that are logged, up to the one for no known route; none while that one is not."""
    routes = [record.fields["route"] for record in caplog.records if record.msg == "request"]  # type: ignore[attr-defined]
    return routes.index("other") + 1 if "other" in routes else 0


def test_nothing_private_is_logged(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    secret = "Zanzibar"
    with caplog.at_level(logging.INFO, logger="ttmem.serving"):
        client = server.http()
        client.post("/v1/completions", json={"model": "tiny", "prompt": f"{secret}?", "max_tokens": 2})
        client.post("/v1/completions", json={"model": secret, "prompt": secret, "stop": secret})
        client.post("/v1/memories", json={"text": f"{secret} ", "name": secret, "ratio": 999})
        client.get(f"/v1/memories/{secret}", headers={"Authorization": f"Bearer {secret}"})
        client.get(f"/{secret}")
        deadline = time.monotonic() + 60  # a request is logged when its answer is out
        while requests_logged(caplog) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        logging.getLogger("ttmem.serving").error("step_failed", exc_info=ValueError(secret))
        logging.getLogger("ttmem.serving").info("done")
    formatter = JsonLines()
    lines = [json.loads(formatter.format(record)) for record in caplog.records if record.name == "ttmem.serving"]
    assert len(lines) >= 7  # the last request of an earlier test may come late
    assert secret not in json.dumps(lines)
    routes = {line.get("route") for line in lines}
    assert "/v1/memories/{reference}" in routes
    assert "other" in routes
    other = logging.LogRecord("uvicorn.error", logging.ERROR, "x.py", 1, f"Exception {secret}", (), None)
    assert secret not in formatter.format(other)
