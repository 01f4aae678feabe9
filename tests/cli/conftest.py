"""A tiny model in a folder, a document and a memory of it, and a way to run the command line in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ttmem import LatentSettings, Memory, Model, compact, load_model
from ttmem.cli.main import app, main
from ttmem.compaction import settings
from ttmem.evaluation import fidelity

FAST = LatentSettings(
    rollouts=2, rollout_tokens=3, top_k=4, replay_chunk=128, pool=32, fit_updates=2, fit_positions=8, distill_updates=2
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, make_network: Any, make_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_network("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, make_network: Any, make_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "other"
    make_network("llama", seed=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(model_folder: Path) -> Model:
    return load_model(str(model_folder), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def made(loaded: Model, document_text: str) -> Memory:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "ANSWER_TOKENS", 4)
        return compact(loaded, document_text, ratio=8, settings=FAST, name="ferry.txt")


@pytest.fixture
def document(tmp_path: Path, document_text: str) -> Path:
    (tmp_path / "ferry.txt").write_text(document_text, encoding="utf-8")
    return tmp_path / "ferry.txt"


@pytest.fixture
def memory(tmp_path: Path, made: Memory) -> Path:
    made.save(tmp_path / "ferry.ttmem")
    return tmp_path / "ferry.ttmem"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Presets that take a second, one width of lines, and no lasting change of what `main` sets."""
    for name in settings.PRESETS:
        monkeypatch.setitem(settings.PRESETS, name, FAST)
    monkeypatch.setattr(fidelity, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(app, "registered_commands", [])  # `main` registers the commands at each call
    for name, value in {
        "COLUMNS": "160",
        "TERM": "dumb",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    level = logging.getLogger("transformers").level
    yield
    logging.getLogger("transformers").setLevel(level)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """(*arguments) -> exit code, standard output, standard error; never a traceback."""

    def call(*arguments: str | Path) -> Outcome:
        app.registered_commands.clear()
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Outcome(int(stopped.value.code or 0), out, err)

    return call
