"""Figures for Prometheus. Counts and seconds only: no names, ids or owners."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The figures of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("ttmem_requests", "HTTP requests", ["route", "method", "status"], registry=registry)
        self._seconds = Histogram(
            "ttmem_request_seconds", "Of HTTP requests", ["route"], buckets=SECONDS, registry=registry
        )
        self._first = Histogram("ttmem_first_token_seconds", "From arrival", buckets=SECONDS, registry=registry)
        self._steps = Histogram(
            "ttmem_step_seconds", "Of one forward of all sequences", buckets=SECONDS, registry=registry
        )
        self._batch = Histogram("ttmem_step_sequences", "Sequences of a step", buckets=SIZES, registry=registry)
        self._processed = Counter("ttmem_processed_tokens", "Tokens run through the model", registry=registry)
        self._prompt = Counter("ttmem_prompt_tokens", "Prompt tokens of answered requests", registry=registry)
        self._written = Counter("ttmem_completion_tokens", "Tokens written for answered requests", registry=registry)
        self._running = Gauge("ttmem_running_sequences", "Sequences decoded now", registry=registry)
        self._waiting = Gauge("ttmem_waiting_requests", "Requests in the queue", registry=registry)
        self._jobs = Counter("ttmem_jobs", "Compactions that ended", ["outcome"], registry=registry)
        self._job_seconds = Histogram(
            "ttmem_job_seconds", "Of compactions", buckets=(1, 10, 60, 300, 900, 3600, 14400), registry=registry
        )
        self._loaded = Gauge("ttmem_loaded_bytes", "Of memories held in RAM", registry=registry)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def step(self, sequences: int, tokens: int, seconds: float) -> None:
        self._steps.observe(seconds)
        self._batch.observe(sequences)
        self._processed.inc(tokens)

    def answered(self, prompt: int, written: int) -> None:
        self._prompt.inc(prompt)
        self._written.inc(written)

    def queue(self, running: int, waiting: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)

    def job(self, outcome: str, seconds: float) -> None:
        self._jobs.labels(outcome).inc()
        self._job_seconds.observe(seconds)

    def loaded(self, count: int) -> None:
        self._loaded.set(count)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
