"""The loop: it learns, it stops when it should, and a resumed run is the run that was not stopped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttmem.errors import BudgetError, ResumeError
from ttmem.progress import Progress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.loop import TrainSettings, TrainState, train


class Regression:
    """A noisy linear map to be found; what it has seen so far shifts its targets, so that it must be restored."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(3, 5))
        self.bias = nn.Parameter(torch.zeros(3))
        self.truth = torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
        self.seen = 0
        self.losses: list[float] = []

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight, "bias": self.bias}

    def loss(self, step: int) -> Tensor:
        inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        self.seen += 1
        shift = 0.01 / self.seen
        loss = (inputs @ (self.weight - self.truth).T + self.bias - shift).square().mean()
        self.losses.append(loss.item())
        return loss

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns(optimizer: str) -> None:
    problem = Regression()
    settings = TrainSettings(steps=150, optimizer=optimizer, lr=0.1, warmup=5)
    state = train(problem.parameters, problem, settings)
    assert state.step == 150 == len(problem.losses)
    assert problem.losses[-1] < 0.02 * problem.losses[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(optimizer: str, tmp_path: Path) -> None:
    settings = TrainSettings(
        steps=20, optimizer=optimizer, lr=0.05, weight_decay=0.1, schedule="wsd", warmup=3, checkpoint_every=8
    )
    path = tmp_path / "state.safetensors"
    whole = Regression()
    saved: list[int] = []

    def keep_the_first(state: TrainState) -> None:
        saved.append(state.step)
        if len(saved) == 1:
            save_state(state, path, {"seed": 3})

    train(whole.parameters, whole, settings, checkpoint=keep_the_first)
    assert saved == [8, 16]
    resumed = Regression()
    state = train(resumed.parameters, resumed, settings, state=load_state(path, {"seed": 3}))
    assert state.step == 20
    assert resumed.losses == whole.losses[8:]
    assert torch.equal(resumed.weight, whole.weight)
    assert torch.equal(resumed.bias, whole.bias)


def test_gradients_are_clipped_and_the_rate_follows_the_schedule() -> None:
    """With one AdamW parameter the first update is the learning rate itself, whatever the gradient."""
    problem = Regression()
    train({"bias": problem.bias}, problem, TrainSettings(steps=1, lr=0.5, warmup=2, schedule="constant", clip=1e-3))
    torch.testing.assert_close(problem.bias.detach().abs(), torch.full((3,), 0.25), rtol=1e-3, atol=0)


def test_minutes_end_a_run_and_earlier_time_counts() -> None:
    problem = Regression()
    settings = TrainSettings(steps=1, minutes=0.2 / 60)
    state = train(problem.parameters, problem, settings)
    assert state.step > 1
    assert state.seconds >= 0.2
    assert train(problem.parameters, problem, settings, state=state).step == state.step
    assert settings.done(10**6, 0.05) == pytest.approx(0.25)


def test_progress_reaches_its_end() -> None:
    class Counting(Progress):
        units = 0

        def show(self, name: str, total: int) -> Any:
            from contextlib import nullcontext

            self.total = total
            return nullcontext(self.add)

        def add(self, units: int) -> None:
            self.units += units

    progress, problem = Counting(), Regression()
    train(problem.parameters, problem, TrainSettings(steps=3), progress)
    assert progress.units == progress.total


@pytest.mark.parametrize("broken", ["loss", "gradient"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_stops_where_it_is_not_finite(broken: str, value: float) -> None:
    """With the parameters and the checkpoint of the last good step."""

    class Breaking(Regression):
        def loss(self, step: int) -> Tensor:
            loss = super().loss(step)
            if step < 3:
                return loss
            self.weight.register_hook(lambda gradient: gradient * (value if broken == "gradient" else 1))
            return loss * value if broken == "loss" else loss

    problem, good = Breaking(), Regression()
    saved: list[TrainState] = []
    settings = TrainSettings(steps=9, lr=0.1, schedule="constant", checkpoint_every=1)
    with pytest.raises(BudgetError, match=r"at step 4: .* lower learning rate"):
        train(problem.parameters, problem, settings, checkpoint=saved.append)
    assert [state.step for state in saved] == [1, 2, 3]
    train(good.parameters, good, replace(settings, steps=3))
    assert torch.equal(problem.weight, good.weight)
    assert torch.equal(saved[-1].tensors["parameter/weight"], good.weight)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": -1}, {"lr": 0.0}, {"clip": 0.0}, {"minutes": 0.0}, {"weight_decay": -1.0}, {"warmup": -1},
        {"stable": 1.0},
    ],
)
def test_settings_outside_their_range(wrong: dict[str, float]) -> None:
    with pytest.raises(BudgetError, match=f"the setting {next(iter(wrong))} is"):
        TrainSettings(**wrong)  # type: ignore[arg-type]


def test_states_of_other_runs_and_broken_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(ResumeError, match="no state to go on from"):
        load_state(path, {})
    save_state(TrainState(4, 1.5, {"parameter/a": torch.ones(2)}, {"level": 3}), path, {"seed": 1, "lr": 0.1})
    state = load_state(path, {"lr": 0.1, "seed": 1})
    assert (state.step, state.seconds, state.objective) == (4, 1.5, {"level": 3})
    assert torch.equal(state.tensors["parameter/a"], torch.ones(2))
    with pytest.raises(ResumeError, match=r"other settings \(seed\)"):
        load_state(path, {"lr": 0.1, "seed": 2})
    whole = path.read_bytes()
    for at in {*range(0, len(whole), 7), len(whole) - 1}:  # a flipped bit anywhere
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ResumeError):
            load_state(path, {"lr": 0.1, "seed": 1})
    path.write_bytes(whole[:30])
    with pytest.raises(ResumeError, match="no state to go on from"):
        load_state(path, {"lr": 0.1, "seed": 1})
