"""What the benchmark scripts share: how a result is recorded, and a model's options."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ttmem.errors import TtmemError
from ttmem.versions import versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PHONEBOOK_MODEL = ROOT / "benchmarks" / "phonebook_model"


def machine() -> dict[str, Any]:
    """The machine that absolute figures belong to."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def model_label(name: str) -> str:
    """A model's name as results give it: folders of this project relative to it, others without where they lie."""
    path = Path(name)
    if not path.is_dir():
        return name
    return str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else path.name


def command() -> str:
    """The call of this script, without the folder that its runs are kept in."""
    words = ["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--work" in words:
        place = words.index("--work")
        del words[place : place + 2]
    return " ".join(["python", *words])


def record(name: str, figures: Any, seed: int | None = None) -> None:
    """Write `results/<name>.json` with command, versions, machine, date and seed beside the figures; print it."""
    RESULTS.mkdir(exist_ok=True)
    result = {
        "command": command(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "figures": figures,
    }
    text = json.dumps(result, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def differences(config: Any) -> dict[str, Any]:
    """Of a model's configuration from its class's defaults: a new field leaves finished runs what they are."""
    defaults = type(config)().to_dict()
    return {name: value for name, value in config.to_dict().items() if value != defaults.get(name)}


PYTHONS = {"True": True, "False": False, "None": None}
"""Values as Python writes them, beside JSON."""


def field_of(config: Any) -> Callable[[str], tuple[str, Any]]:
    """An argument's type: NAME=VALUE with a field of a configuration class, the value as JSON; for text, as it is."""

    def option(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not equals or name not in config.__dataclass_fields__:
            raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE with a field of {config.__name__}")
        if value in PYTHONS:
            return name, PYTHONS[value]
        try:
            return name, json.loads(value)
        except ValueError:
            declared = config.__dataclass_fields__[name].type
            kind = getattr(declared, "__name__", str(declared))
            if "str" in kind.split(" | "):
                return name, value
            raise argparse.ArgumentTypeError(
                f"{text!r}: {name} ({kind}) takes JSON, such as 3, 0.5, true, null or [0,2]"
            ) from None

    return option


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: a whole number from `least` on, which is 0 or more."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return number


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main function. What a user can act on is one line and an exit code, as with `ttmem` itself."""
    try:
        main()
    except TtmemError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def filler_text(tokens: int, encode: Any) -> str:
    """Prose of at least `tokens` tokens, cut to them: the demo document, repeated with numbered headings."""
    from ttmem.demo import document

    part, text, count = document(), "", 0
    while len(encode(text)) < tokens:
        count += 1
        text += f"\n\nCopy {count}\n\n{part}"
    return text
