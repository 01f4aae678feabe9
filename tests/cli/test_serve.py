"""`ttmem serve` refuses at once what it could not serve; how it serves is tested in tests/serving."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ttmem.serving.server import bind


def test_other_addresses_need_keys(run: Any, tmp_path: Path) -> None:
    outcome = run("serve", "--host", "0.0.0.0", "--data", tmp_path / "data")
    assert outcome.code == 13
    assert "--api-key-file" in outcome.err
    assert not (tmp_path / "data").exists()


def test_what_is_not_there(run: Any, tmp_path: Path) -> None:
    for option in ("--api-key-file", "--static"):
        assert run("serve", option, tmp_path / "none", "--data", tmp_path / "data").code == 13
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        outcome = run("serve", "--port", str(taken.getsockname()[1]), "--data", tmp_path / "data")
    assert outcome.code == 13
    assert "cannot listen" in outcome.err


def test_a_missing_package_is_named_with_its_install_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    without = lambda name, *more: None if name == "uvicorn" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    outcome = run("serve")
    assert outcome.code == 13
    assert "pip install 'ttmem[serve]'" in outcome.err
