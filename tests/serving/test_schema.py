"""Every route, driven by the server's own OpenAPI schema: requests that fit it and such that do not; never a 5xx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ttmem import Model

from .conftest import TEXTS, Server, running

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
EXAMPLES = 200
"""Per route, of requests that fit the schema, and of those that do not where its parameters and body can be wrong."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any, make_settings: Any, served: Model, files: dict[str, Path]) -> Iterator[Server]:
    """A server of this module's own, since memories are deleted too. Its jobs die at once."""
    data = tmp_path_factory.mktemp("schema")
    with running(make_settings(data, worker=("false",)), served) as server:
        server.bring(files["ferry"], "ferry")
        yield server


def test_the_schema_tells_every_body(server: Server) -> None:
    paths = server.http().get("/openapi.json").json()["paths"]
    told = {
        path: set(operations["post"]["requestBody"]["content"])
        for path, operations in paths.items()
        if "post" in operations and not path.endswith("/cancel")
    }
    json, form = "application/json", "multipart/form-data"
    assert told == {
        "/v1/chat/completions": {json},
        "/v1/completions": {json},
        "/v1/memories": {json, form},
        "/v1/memories/import": {form},
    }


def name_what_is_there(case: Any, memory: bool) -> None:
    """Other names are refused before anything else is looked at."""
    for parameter in {"reference", "id"} & set(case.path_parameters or {}):
        case.path_parameters[parameter] = "tiny" if "models" in case.path else "ferry"
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "tiny+ferry" if memory else "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_is_a_fault(alone: Server, files: dict[str, Path], mode: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{alone.url}/openapi.json")
    sent: Counter[int] = Counter()
    for operation in (result.ok() for result in schema.get_all_operations()):
        if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue  # every text fits a path

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
        @given(case=operation.as_strategy(mode), known=st.booleans(), memory=st.booleans())
        def send(case: Any, known: bool, memory: bool) -> None:
            if known:
                name_what_is_there(case, memory)
            answer = case.call(timeout=60)
            sent[answer.status_code] += 1
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)

        send()
        if "ferry" not in {memory["name"] for memory in alone.http().get("/v1/memories").json()["data"]}:
            alone.bring(files["ferry"], "ferry")
    assert sum(sent.values()) >= 4 * EXAMPLES, sent
    assert sent[200], sent
    question = {"model": "tiny+ferry", "prompt": TEXTS["ferry"], "max_tokens": 2}
    assert alone.http().post("/v1/completions", json=question).status_code == 200
