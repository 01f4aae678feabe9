"""One training loop: an objective, named parameters, a number of steps or of minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ttmem.errors import BudgetError
from ttmem.progress import Progress
from ttmem.training.metrics import Metrics
from ttmem.training.optimizers import make_optimizers
from ttmem.training.parallel import placed_like, whole
from ttmem.training.schedules import STABLE, learning_rate_factor


class Objective(Protocol):
    """What is minimized. Its data depend on the step alone, so that a resumed run sees what it would have seen."""

    def loss(self, step: int) -> Tensor:
        """The scalar to minimize at `step`."""
        ...

    def state(self) -> dict[str, Any]:
        """What `loss` has learned about the run so far, as JSON; empty where it keeps nothing."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        ...


class Stateless:
    """The state of an objective whose loss depends on nothing but the step."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    The length is `steps`, or `minutes` of wall-clock time where given: then the figures depend on the machine.
    """

    steps: int = 1000
    minutes: float | None = None
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup: int = 0
    """Steps over which the learning rate rises."""
    floor: float = 0.0
    """The part of the learning rate that is left at the end of a schedule that falls."""
    stable: float = STABLE
    """The part of the run after which the schedule "wsd" begins to fall."""
    clip: float = 1.0
    """Gradients are clipped to this norm."""
    checkpoint_every: int = 100
    report_every: int = 10

    def __post_init__(self) -> None:
        """Raise BudgetError for a value outside its range, before any computing."""
        for name in ("steps", "warmup"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("lr", "clip"):
            self._require(name, getattr(self, name) > 0, "above 0")
        self._require("floor", 0 <= self.floor <= 1, "from 0 to 1")
        self._require("stable", 0 <= self.stable < 1, "at least 0 and below 1")
        self._require("weight_decay", self.weight_decay >= 0, "at least 0")
        for name in ("checkpoint_every", "report_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("minutes", self.minutes is None or self.minutes > 0, "above 0")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise BudgetError(f"the setting {name} is {getattr(self, name)}; it must be {wanted}")

    def done(self, step: int, seconds: float) -> float:
        """The part of the run that is over after `step` steps and `seconds`; 1 or more where it has ended."""
        if self.minutes is not None:
            return seconds / (60.0 * self.minutes)
        return step / self.steps if self.steps else 1.0


@dataclass
class TrainState:
    """Where a run stands: with the parameters and moments by name, enough to go on as if it had not stopped."""

    step: int = 0
    seconds: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)


def train(
    parameters: Mapping[str, nn.Parameter],
    objective: Objective,
    settings: TrainSettings,
    progress: Progress | None = None,
    state: TrainState | None = None,
    checkpoint: Callable[[TrainState], None] | None = None,
    report: Callable[[Metrics], None] | None = None,
) -> TrainState:
    """Train `parameters` in place, from `state` where one is given. Returns the state at the end.

    `checkpoint` gets the state every `checkpoint_every` steps, `report` the metrics every `report_every`; their time
    counts as the run's. Sharded parameters (see `parallel`) are whole in a state: all processes have to call this.
    Raises BudgetError at a loss or gradient that is NaN or infinite, before parameters or a checkpoint have it.
    """
    optimizers = make_optimizers(settings.optimizer, parameters, settings.lr, settings.weight_decay)
    step, earlier = 0, 0.0
    if state is not None:
        step, earlier = state.step, state.seconds
        objective.restore(state.objective)
        _restore(state.tensors, parameters, optimizers)
    start = time.perf_counter()
    done = settings.done(step, earlier)
    with (progress or Progress()).stage("training", 1000) as advance:
        shown = 0
        while True:
            advance(int(1000 * min(done, 1.0)) - shown)
            shown = int(1000 * min(done, 1.0))
            if done >= 1.0:
                break
            factor = learning_rate_factor(
                settings.schedule, done, step, settings.warmup, settings.floor, settings.stable
            )
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = settings.lr * factor
            loss = objective.loss(step)
            loss.backward()
            norm = whole(torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip)).item()
            if not math.isfinite(norm):  # as it is where the loss is not, and on all processes alike
                raise _not_finite(step + 1, norm, loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            seconds = earlier + time.perf_counter() - start
            done = settings.done(step, seconds)
            if report is not None and (step % settings.report_every == 0 or done >= 1.0):
                report(Metrics(step, loss.item(), settings.lr * factor, norm, seconds))
            if checkpoint is not None and step % settings.checkpoint_every == 0 and done < 1.0:
                checkpoint(_state(step, seconds, parameters, optimizers, objective))
    return _state(step, earlier + time.perf_counter() - start, parameters, optimizers, objective)


def _not_finite(step: int, norm: float, loss: float) -> BudgetError:
    """Nothing learns from NaN, and every later step would be NaN too."""
    return BudgetError(
        f"the gradient's norm is {norm}, with a loss of {loss}, at step {step}: the training stops here, and what was "
        "saved before can be gone on from; try a lower learning rate, more warmup or float32, and look at the data of "
        "this step"
    )


def _state(
    step: int,
    seconds: float,
    parameters: Mapping[str, nn.Parameter],
    optimizers: list[Optimizer],
    objective: Objective,
) -> TrainState:
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"parameter/{name}"] = whole(parameter.detach()).clone()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = whole(value.detach()).clone()
    return TrainState(step, seconds, tensors, objective.state())


@torch.no_grad()
def _restore(
    tensors: dict[str, Tensor], parameters: Mapping[str, nn.Parameter], optimizers: list[Optimizer]
) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(placed_like(tensors[f"parameter/{name}"], parameter))
        prefix = f"optimizer/{name}/"
        moments = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for optimizer in optimizers:
            if moments and any(parameter is own for group in optimizer.param_groups for own in group["params"]):
                optimizer.state[parameter] = {
                    key: placed_like(value.clone(), parameter) for key, value in moments.items()
                }
