"""Training states on disk: one safetensors file, written atomically, that knows which run it belongs to.

Its checksum is that of memory files, over the metadata and the tensors. A run that goes on from a flipped bit would not
fail: it would train something else.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ttmem.errors import ResumeError
from ttmem.memory.file import atomic_save, checksum, read_tensors
from ttmem.training.loop import TrainState


def save_state(state: TrainState, path: str | PathLike[str], run: dict[str, Any]) -> None:
    """Write a state. `run` holds all that the run depends on, as JSON: settings, seed, model."""
    data = {"step": state.step, "seconds": state.seconds, "objective": state.objective}
    metadata = {"state": json.dumps(data), "run": json.dumps(run, sort_keys=True)}
    tensors = {name: tensor.cpu() for name, tensor in state.tensors.items()}
    atomic_save(tensors, path, {**metadata, "checksum": checksum(metadata, tensors)})


def load_state(path: str | PathLike[str], run: dict[str, Any]) -> TrainState:
    """Read a state. Raises ResumeError when it is missing or damaged, or belongs to another run."""
    try:
        tensors, metadata = read_tensors(Path(path))
        stored = metadata.pop("checksum")
        if stored != checksum(metadata, tensors):
            raise ValueError("the checksum does not match: it was altered or damaged")
        data, owner = json.loads(metadata["state"]), dict(json.loads(metadata["run"]))
        state = TrainState(data["step"], data["seconds"], tensors, data["objective"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ResumeError(f"{path} holds no state to go on from ({error}): start without it") from error
    changed = sorted(key for key in {*run, *owner} if run.get(key) != owner.get(key))
    if changed:
        raise ResumeError(
            f"{path} belongs to a run with other settings ({', '.join(changed)}): use the same ones, or start anew"
        )
    return state
