"""Finished runs of a long benchmark: kept in a folder, so that the same command goes on where it was stopped.

A kept run's file is named after what identifies the run, and a recorded result says which file each of its runs came
from. So a result that was recorded early can be gone on with where the folder is lost: --take-over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import common

from ttmem.errors import ResumeError


def add_options(parser: argparse.ArgumentParser, name: str) -> None:
    """--work, --name, --finished and --take-over."""
    parser.add_argument("--work", type=Path, default=Path(f"{name}.work"), help="finished runs and training states")
    parser.add_argument("--name", default=name, help="of the file of results")
    parser.add_argument("--finished", action="store_true", help="record what is finished; run nothing")
    parser.add_argument(
        "--take-over", action="store_true", help="runs of the recorded file of results count as finished, too"
    )


OPTIONS = ("work", "name", "finished", "take_over")
"""Of `add_options`: where runs are kept is no setting of theirs."""


def prepare(arguments: argparse.Namespace) -> None:
    """Make the folder of runs; with --take-over, put there what the recorded result holds and the folder lacks.

    Raises ResumeError where the record is older than that.
    """
    arguments.work.mkdir(parents=True, exist_ok=True)
    recorded = common.RESULTS / f"{arguments.name}.json"
    if not arguments.take_over or not recorded.exists():
        return
    for run in json.loads(recorded.read_text())["figures"]["runs"]:
        if "kept_as" not in run:
            raise ResumeError(f"{recorded} does not say what its runs were kept as, so they cannot be taken over.")
        path = arguments.work / Path(run["kept_as"]).name
        if not path.exists():
            keep(run, path)


def path_of(work: Path, label: str, identity: dict[str, Any]) -> Path:
    """The file of the run that `identity` (JSON-able) describes."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return work / f"{label}-{key}.json"


def keep(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write what a finished run has found, whole or not at all, for the next call to read. Returns it."""
    found = {**found, "kept_as": path.name}
    fresh = path.with_suffix(".partial")
    fresh.write_text(json.dumps(found))
    os.replace(fresh, path)
    return found


def finished(path: Path) -> dict[str, Any] | None:
    """What an earlier call has kept of a run, if it has."""
    return json.loads(path.read_text()) if path.exists() else None
