"""A compaction that is killed anywhere and goes on gives the memory of one that was not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ttmem import LatentSettings, Memory, Model, Progress, ResumeError, compact
from ttmem.compaction.workspace import Workspace

SETTINGS = LatentSettings(
    rollouts=2,
    rollout_tokens=3,
    top_k=6,
    replay_chunk=50,
    pool=64,
    fit_updates=4,
    fit_positions=8,
    distill_updates=5,
    distill_batch=2,
)
CHOOSING = replace(
    SETTINGS,
    passage_rounds=1,
    passage_tokens=16,
    closed_form=True,
    choose_split=True,
    fit_updates=0,
    distill_passages=2,
    trial_updates=2,
    distill_lr=0.01,
    relative_rate=True,
)
STEPS = ["rollouts", "replay", "stage1", "stage2"]


class KilledAfter(Progress):
    """Raises when the given number of units of any stage is done."""

    def __init__(self, stage: str, units: int) -> None:
        super().__init__()
        self.wanted, self.left = stage, units

    @contextmanager
    def show(self, name: str, total: int) -> Iterator[Any]:
        def advance(units: int) -> None:
            if name.startswith(self.wanted):
                self.left -= units
                if self.left <= 0:
                    raise KeyboardInterrupt

        yield advance


@pytest.fixture(scope="module")
def document_text(document_text: str) -> str:
    return document_text[:130]


@pytest.fixture(scope="module", params=["model", "gemma"])
def subject(request: pytest.FixtureRequest) -> Model:
    found: Model = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttmem.compaction.distillation.CHECKPOINT_EVERY", 2)


def run(model: Model, text: str, workdir: Path | None = None, **options: Any) -> Memory:
    options = {"settings": SETTINGS, "ratio": 10, "measure": False, **options}
    return compact(model, text, workdir=workdir, **options)


@pytest.fixture(scope="module")
def straight(subject: Model, document_text: str) -> Memory:
    return run(subject, document_text)


def kind(name: str) -> str:
    """A step without its budget."""
    return name.partition("-")[0]


def step_files(folder: Path, step: str) -> list[Path]:
    return [path for path in folder.glob("*.safetensors") if kind(path.stem) == step]


def assert_identical(found: Memory, expected: Memory) -> None:
    for a, b in zip(found.compacted, expected.compacted, strict=True):
        assert a.lengths == b.lengths
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.biases, b.biases)
        assert a.unbiased == b.unbiased
    assert found.info.settings == expected.info.settings
    assert found.info.budget == expected.info.budget


@pytest.mark.parametrize(("step", "saved"), [*((step, True) for step in STEPS), ("rollouts", False), ("stage2", False)])
def test_killed_at_a_step(
    subject: Model, document_text: str, straight: Memory, tmp_path: Path, step: str, saved: bool
) -> None:
    save = Workspace.save

    def killed(self: Workspace, name: str, *arguments: Any) -> None:
        if kind(name) != step or saved:
            save(self, name, *arguments)
        if kind(name) == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run(subject, document_text, tmp_path / "work")
    assert bool(step_files(tmp_path / "work", step)) == saved
    computed: list[str] = []

    def noted(self: Workspace, name: str, *arguments: Any) -> None:
        computed.append(kind(name))
        save(self, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "save", noted)
        resumed = run(subject, document_text, tmp_path / "work", resume=True)
    assert_identical(resumed, straight)
    finished = ["replay", "rollouts", "stage1"]
    if step in finished:
        assert (step in computed) != saved


@pytest.mark.parametrize(
    ("stage", "units"),
    [("reading", 1), ("teacher", 3), ("reconstruction", 60), ("stage 1", 2), ("stage 2", 1), ("stage 2", 5)],
)
def test_killed_within_a_stage(
    subject: Model, document_text: str, straight: Memory, tmp_path: Path, stage: str, units: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(subject, document_text, tmp_path / "work", progress=KilledAfter(stage, units))
    assert_identical(run(subject, document_text, tmp_path / "work", resume=True), straight)


@pytest.mark.parametrize("stage", ["passages", "stage 1", "stage 2: choosing", "stage 2: distillation"])
def test_choices_are_made_again_as_they_were(subject: Model, document_text: str, tmp_path: Path, stage: str) -> None:
    straight = run(subject, document_text, settings=CHOOSING)
    for units in (1, 3):
        progress = KilledAfter(stage, units)
        with pytest.raises(KeyboardInterrupt):
            run(subject, document_text, tmp_path / "work", settings=CHOOSING, resume=True, progress=progress)
    resumed = run(subject, document_text, tmp_path / "work", settings=CHOOSING, resume=True)
    assert_identical(resumed, straight)
    assert step_files(tmp_path / "work", "rate")
    Workspace(tmp_path / "work").discard()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("pool", [7, 64, 10**6])
def test_loaded_rollouts_are_as_good_as_fresh_ones_whatever_their_layout(
    model: Model, document_text: str, tmp_path: Path, pool: int
) -> None:
    """Strides and addresses differ between both, and matrix products round by them."""
    settings = replace(SETTINGS, pool=pool)
    with pytest.raises(KeyboardInterrupt):
        run(model, document_text, tmp_path / "work", settings=settings, progress=KilledAfter("stage 1", 1))
    resumed = run(model, document_text, tmp_path / "work", settings=settings, resume=True)
    assert_identical(resumed, run(model, document_text, settings=settings))


def test_killed_again_and_again(model: Model, document_text: str, tmp_path: Path) -> None:
    for stage in ("reconstruction", "teacher", "stage 1", "stage 2", "stage 2"):
        with pytest.raises(KeyboardInterrupt):
            run(model, document_text, tmp_path / "work", resume=True, progress=KilledAfter(stage, 3))
    resumed = run(model, document_text, tmp_path / "work", resume=True)
    assert_identical(resumed, run(model, document_text))


def test_resuming_a_finished_run_gives_the_same(model: Model, document_text: str, tmp_path: Path) -> None:
    first = run(model, document_text, tmp_path / "work")
    assert_identical(run(model, document_text, tmp_path / "work", resume=True), first)


def test_without_resume_it_starts_over(model: Model, document_text: str, tmp_path: Path) -> None:
    run(model, document_text, tmp_path / "work", seed=1)
    found = run(model, document_text, tmp_path / "work", seed=0)
    assert_identical(found, run(model, document_text))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"ratio": 11},
        {"settings": replace(SETTINGS, fit_lr=1e-3)},
        {"settings": replace(SETTINGS, distill_updates=6)},
        {"method": "kvzip+"},
        {"text": "Another document, long enough to be compacted at ten to one, about nothing in particular."},
    ],
)
def test_other_settings_are_refused(model: Model, document_text: str, tmp_path: Path, change: dict[str, Any]) -> None:
    run(model, document_text, tmp_path / "work")
    options = {"text": document_text, **change}
    with pytest.raises(ResumeError, match="leave out --resume"):
        run(model, workdir=tmp_path / "work", resume=True, **options)


def test_another_model_is_refused(
    model: Model, document_text: str, tmp_path: Path, make_network: Any, tokenizer: Any
) -> None:
    run(model, document_text, tmp_path / "work")
    for network in (make_network("llama", seed=1), make_network("llama").bfloat16()):
        with pytest.raises(ResumeError):
            run(Model(network, tokenizer, name=model.name), document_text, tmp_path / "work", resume=True)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("damage", ["cut short", "a tensor missing"])
def test_a_damaged_step_is_refused(model: Model, document_text: str, tmp_path: Path, step: str, damage: str) -> None:
    run(model, document_text, tmp_path / "work")
    (path,) = step_files(tmp_path / "work", step)
    if damage == "cut short":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: opened.get_tensor(name).clone() for name in sorted(opened.keys())[1:]}
        save_file(tensors, path, metadata)
    if step in ("rollouts", "replay"):  # a later step does without them
        step_files(tmp_path / "work", "stage1")[0].unlink()
    with pytest.raises(ResumeError):
        run(model, document_text, tmp_path / "work", resume=True)
