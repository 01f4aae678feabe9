"""The metrics of a run: one line per report, and none twice after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from ttmem.training.loop import TrainSettings, train
from ttmem.training.metrics import Metrics, MetricsFile


class Slope:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor([4.0]))

    def loss(self, step: int) -> Tensor:
        return (3.0 * self.weight).sum()

    def state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None:
        pass


def test_what_is_reported() -> None:
    found: list[Metrics] = []
    settings = TrainSettings(steps=7, lr=0.5, schedule="constant", warmup=4, clip=1.0, report_every=3)
    problem = Slope()
    train({"weight": problem.weight}, problem, settings, report=found.append)
    assert [metrics.step for metrics in found] == [3, 6, 7]
    assert [metrics.rate for metrics in found] == [0.5 * 3 / 4, 0.5, 0.5]
    assert [metrics.gradient_norm for metrics in found] == [3.0] * 3
    assert found[0].loss > found[1].loss > found[2].loss
    assert found[0].seconds <= found[2].seconds


def test_a_resumed_run_goes_on_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    first = MetricsFile(path)
    for step in (10, 20, 30):
        first(Metrics(step, 1.0, 0.1, 2.0, 3.0))
    with path.open("a") as file:
        file.write('3\n{"loss": 1}\n')
        file.write('{"step": 40, "lo')
    with path.open("ab") as raw:
        raw.write(b"\xff\n")
    again = MetricsFile(path, step=20)  # the state of step 20: what comes next is step 21
    again(Metrics(21, 0.5, 0.1, 2.0, 3.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 1.0), (20, 1.0), (21, 0.5)]
