"""What a training run says about itself: a line per report, in a file and beside the progress bar."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ttmem.memory.file import atomic_write


@dataclass(frozen=True)
class Metrics:
    """Of one step: its loss (nats), learning rate, norm of the gradient before clipping, and the run's seconds."""

    step: int
    loss: float
    rate: float
    gradient_norm: float
    seconds: float


class MetricsFile:
    """JSON lines, one per report. A resumed run drops the lines of steps that it is going to do again."""

    def __init__(self, path: Path, step: int = 0) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self._lines() if line["step"] <= step]
        atomic_write(path, lambda fresh: fresh.write_text("".join(json.dumps(line) + "\n" for line in kept)))

    def _lines(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut short by a crash
            if isinstance(record, dict) and "step" in record:
                found.append(record)
        return found

    def __call__(self, metrics: Metrics) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(metrics)) + "\n")
