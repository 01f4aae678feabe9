"""Versions of ttmem and of the libraries a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Package name -> version, with Python's own."""
    names = ("ttmem", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}
