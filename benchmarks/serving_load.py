"""A server under load: many clients, each with its own memory and its own fact, against one client alone.

    python benchmarks/serving_load.py [--clients 50] [--minutes 5] [--job]

Each client's document holds an access code that no other has. Its memory is made here, brought to the server, and kept
only where the model names the right code when it is asked alone; so that under load a wrong code can only be another's
memory, or a fault. Every answer is streamed and checked: no error, its own code, nobody else's. Figures: answers and
tokens per second against one client alone, time to the first token and to the whole answer. With --job, a document is
compacted in the background meanwhile. `--clients 3 --minutes 0.1` shows in a minute that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from common import filler_text, model_label, record
from openai import AsyncOpenAI

import ttmem

QUESTION = "\n\nQuestion: What is the access code of the archive?\nAnswer:"
PLACES = "cellar attic library workshop boathouse stable laundry chapel kitchen nursery study granary".split()
THINGS = "lamps maps ropes ledgers barrels sails tools lenses bells crates drawings instruments".split()
DRAWS = 20
"""Documents tried for one client before giving up."""


@dataclass
class Tally:
    """What one phase saw."""

    seconds: float = 0.0
    answers: int = 0
    tokens: int = 0
    errors: int = 0
    wrong: int = 0
    others: int = 0
    changed: int = 0
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "answers": self.answers,
            "answers_per_second": self.answers / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "errors": self.errors,
            "error_kinds": self.kinds,
            "wrong_codes": self.wrong,
            "codes_of_others": self.others,
            "answers_unlike_the_one_alone": self.changed,
            "first_token_seconds": spread(self.first),
            "answer_seconds": spread(self.whole),
        }


@dataclass(frozen=True)
class Client:
    """A client's memory on the server, the code in it, and the answer it gets when nobody else asks."""

    memory: str
    code: str
    alone: str


def spread(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"p50": values[0], "p95": values[0]} if values else {}
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": cuts[9], "p95": cuts[18]}


def document(code: str, draw: random.Random, sentences: int) -> str:
    """An inventory with the code in the middle."""
    lines = []
    for _ in range(sentences):
        place, thing = draw.choice(PLACES), draw.choice(THINGS)
        count, year = draw.randint(2, 40), draw.randint(1900, 1999)
        lines.append(f"The {place} holds {count} {thing}, counted in {year}.")
    lines.insert(sentences // 2, f"The access code of the archive is {code}.")
    return " ".join(lines)


async def prepare(api: AsyncOpenAI, http: httpx2.AsyncClient, model: ttmem.Model, arguments: Any) -> list[Client]:
    """One memory per client, each asked alone."""
    draw = random.Random(arguments.seed)
    codes = iter(draw.sample(range(1000, 10000), 9000))
    clients: list[Client] = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(arguments.clients):
            for _ in range(DRAWS):
                code = str(next(codes))
                text = document(code, draw, arguments.sentences)
                memory = ttmem.compact(
                    model, text, ratio=arguments.ratio, method=arguments.method, measure=False, preset="quick"
                )
                path = Path(folder) / "memory.ttmem"
                memory.save(path)
                answer = await http.post("/v1/memories/import", files={"file": ("m.ttmem", path.read_bytes())})
                answer.raise_for_status()
                id = answer.json()["id"]
                said, *_ = await ask(api, id, arguments.tokens)
                if code in said:
                    clients.append(Client(id, code, said))
                    break
                await http.delete(f"/v1/memories/{id}")
            else:
                raise SystemExit(f"the model finds no code in a memory by {arguments.method} at {arguments.ratio}x")
            print(f"client {index + 1} of {arguments.clients} ready", file=sys.stderr)
    return clients


async def ask(api: AsyncOpenAI, memory: str, tokens: int) -> tuple[str, int, float, float]:
    """One streamed answer: text, its tokens, seconds to the first piece and to the end."""
    start, first, text, written = time.perf_counter(), 0.0, "", 0
    stream = await api.completions.create(
        model=MODEL,
        prompt=QUESTION,
        max_tokens=tokens,
        stop="\n",
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"memory": memory},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            written = chunk.usage.completion_tokens
        elif chunk.choices[0].text:
            first = first or time.perf_counter() - start
            text += chunk.choices[0].text
    end = time.perf_counter() - start
    return text, written, first or end, end


MODEL = "model"


async def client(api: AsyncOpenAI, own: Client, all: list[Client], tokens: int, until: float, tally: Tally) -> None:
    """Ask, check, ask again."""
    while time.perf_counter() < until:
        try:
            text, written, first, whole = await ask(api, own.memory, tokens)
        except Exception as error:
            tally.errors += 1
            kind = type(error).__name__
            tally.kinds[kind] = tally.kinds.get(kind, 0) + 1
            continue
        tally.answers += 1
        tally.tokens += written
        tally.first.append(first)
        tally.whole.append(whole)
        tally.wrong += own.code not in text
        tally.others += any(other.code in text for other in all if other is not own)
        tally.changed += text != own.alone


async def phase(api: AsyncOpenAI, asking: list[Client], all: list[Client], seconds: float, tokens: int) -> Tally:
    tally, start = Tally(), time.perf_counter()
    await asyncio.gather(*(client(api, own, all, tokens, start + seconds, tally) for own in asking))
    tally.seconds = time.perf_counter() - start
    return tally


async def background_job(http: httpx2.AsyncClient, model: ttmem.Model) -> str:
    """A compaction that takes a while; returns its id."""
    body = {"text": filler_text(1500, model.encode), "preset": "quick", "name": "background"}
    answer = await http.post("/v1/memories", json=body)
    answer.raise_for_status()
    return str(answer.json()["id"])


async def load(url: str, arguments: Any) -> dict[str, Any]:
    model = ttmem.load_model(arguments.model)
    api = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    async with httpx2.AsyncClient(base_url=url, timeout=600) as http:
        clients = await prepare(api, http, model, arguments)
        alone = await phase(api, clients[:1], clients, arguments.alone, arguments.tokens)
        job = await background_job(http, model) if arguments.job else None
        together = await phase(api, clients, clients, 60 * arguments.minutes, arguments.tokens)
        shown = (await http.get(f"/v1/memories/{clients[0].memory}")).json()
        figures = {
            "model": model_label(arguments.model or model.name),
            "method": arguments.method,
            "ratio": arguments.ratio,
            "document_tokens": shown["details"]["document"]["tokens"],
            "clients": len(clients),
            "alone": alone.figures(),
            "together": together.figures(),
            "answers_per_second_relative_to_alone": (together.answers / together.seconds)
            / (alone.answers / alone.seconds),
            "tokens_per_second_relative_to_alone": (together.tokens / together.seconds)
            / (alone.tokens / alone.seconds),
        }
        if job is not None:
            figures["background_job"] = (await http.get(f"/v1/memories/{job}")).json()["status"]
    return figures


def start_server(arguments: Any, folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`ttmem serve` on a free port; its log goes to the folder."""
    command = [sys.executable, "-m", "ttmem.cli.main", "serve", "--port", "0", "--data", str(folder / "data")]
    command += ["--name", MODEL, "--max-running", str(arguments.running)]
    if arguments.model:
        command += ["--model", arguments.model]
    log = folder / "log"
    process = subprocess.Popen(command, stderr=log.open("w"), text=True)
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and json.loads(line).get("event") == "listening":
                return process, json.loads(line)["url"]
        time.sleep(0.2)
    raise SystemExit(log.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="the bundled one when left out")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--alone", type=float, default=60, help="seconds of the one client alone")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer at most")
    parser.add_argument("--sentences", type=int, default=12, help="of a document beside its code")
    parser.add_argument("--method", default="kvzip+")
    parser.add_argument("--ratio", type=float, default=2)
    parser.add_argument("--running", type=int, default=64, help="answers the server writes together")
    parser.add_argument("--job", action="store_true", help="compact a document meanwhile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serving_load", help="of the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(arguments, Path(folder))
        try:
            figures = asyncio.run(load(url, arguments))
        finally:
            process.terminate()
            process.wait()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("model", "name")}
    record(arguments.name, {**figures, "settings": settings}, seed=arguments.seed)


if __name__ == "__main__":
    main()
