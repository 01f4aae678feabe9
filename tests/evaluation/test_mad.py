"""MAD runs: a model that can learn a task does, and the score says so; the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ttmem.errors import TaskError
from ttmem.evaluation.mad import AutoEncoder, MadObjective, readout, run_setting, sinusoids
from ttmem.tasks.mad import FULL, REDUCED, TASKS, baseline, make_data, reduced, reduced_sweep

WIDTH = 32


class Recurrent(nn.Module):
    """A small causal encoder that can do some of the tasks."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.mixer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mixer(self.embed(ids))[0]


@pytest.mark.parametrize(
    ("task", "length", "least"), [("memorisation", 8, 0.9), ("compression", 4, 0.8), ("recall", 16, 0.3)]
)
def test_what_can_be_learned_is(task: str, length: int, least: float) -> None:
    setting = replace(baseline(task), length=length, vocabulary=16, train_examples=1600, test_examples=64)
    sweep = replace(REDUCED, epochs=6)
    found = run_setting(setting, Recurrent, WIDTH, sweep, 1e-2, 0.0)
    assert found["steps"] == 300
    assert found["accuracy"] > least, found


def test_runs_repeat() -> None:
    setting = replace(baseline("noisy"), length=16, train_examples=64, test_examples=32)
    sweep = replace(REDUCED, epochs=2)
    first, again = (run_setting(setting, Recurrent, WIDTH, sweep, 1e-3, 0.1) for _ in range(2))
    assert {**first, "seconds": 0} == {**again, "seconds": 0}
    other = run_setting(setting, Recurrent, WIDTH, replace(sweep, seed=1), 1e-3, 0.1)
    assert other["loss"] != first["loss"]


def test_an_epoch_takes_every_sequence_once() -> None:
    data = make_data(replace(baseline("copying"), length=40, train_examples=12), "train", 0)
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            return torch.zeros(*ids.shape, 16)

    objective = MadObjective(Spy(), data, batch=4, seed=0)
    assert objective.steps_per_epoch == 3
    for step in range(6):
        objective.loss(step)
    first, second = torch.cat(seen[:3]), torch.cat(seen[3:])
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(data.inputs.tolist())


def test_compression_decodes_from_the_last_state_alone() -> None:
    model = readout(baseline("compression"), Recurrent(16), WIDTH)
    assert isinstance(model, AutoEncoder)
    ids = torch.randint(0, 15, (2, 32))
    states: list[Tensor] = []
    hook = model.encoder.register_forward_hook(lambda module, inputs, output: states.append(output))
    logits = model(ids)
    hook.remove()
    assert logits.shape == (2, 32, 16)
    with torch.no_grad():
        torch.testing.assert_close(model.decoder(states[0][:, -1:] + sinusoids(32, WIDTH)), logits)


def test_odd_widths_and_bad_sweeps() -> None:
    assert sinusoids(7, 5).shape == (7, 5)
    for sweep, rate in ((replace(REDUCED, batch=0), 1e-3), (REDUCED, 0.0), (REDUCED, 1e-7)):
        with pytest.raises(TaskError):
            run_setting(baseline("recall"), Recurrent, WIDTH, sweep, rate, 0.0)


def test_a_reduced_run_is_never_longer_than_a_full_one() -> None:
    for setting in reduced(TASKS):
        sweep = reduced_sweep(setting)
        steps = sweep.epochs * (setting.train_examples // sweep.batch)
        full = FULL.epochs * (baseline(setting.task).train_examples // FULL.batch)
        assert steps == min(1200, full)
    assert len(reduced(["memorisation"], every=True)) == 6
