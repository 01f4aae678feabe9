"""The scripts on documents and conversations that grow, at toy size: they run to their end and count what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttmem import LatentSettings


@pytest.fixture
def folder(
    tmp_path: Path,
    make_network: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    quick_settings: LatentSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    import common

    from ttmem.compaction import settings

    monkeypatch.setitem(settings.PRESETS, "quick", replace(quick_settings, fit_updates=1, distill_updates=1))
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    make_network("llama", max_position_embeddings=16384).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def figures(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    words = [module.__name__ + ".py", "--model", folder / "model", *arguments]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    module.main()
    return json.loads((folder / "results" / f"{module.__name__}.json").read_text())["figures"]


def test_long_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import long_chat

    options = ("--turns", 5, "--sentences", 1, "--threshold", 400, "--keep", 200, "--chats", 2, "--tokens", 2)
    found = figures(long_chat, folder, monkeypatch, *options)
    assert set(found["means"]) == {"whole", "folded", "cut", "summary"}
    for row, other in zip(found["chats"]["folded"], found["chats"]["cut"], strict=True):
        assert len(row["early"]) == row["folded_messages"] // 2 > 0
        assert len(row["early"]) + len(row["late"]) == 5
        assert len(other["early"]) == len(row["early"])


@pytest.mark.slow
def test_grown_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grown_documents

    found = figures(grown_documents, folder, monkeypatch, "--docs", 1, "--length", 2200)
    assert set(found["means"]) == {"full context", "compacted together", "extended", "merged", "merged, sinks kept"}
    entries = {name: row["entries"] for name, row in found["means"].items()}
    assert entries["extended"] == pytest.approx(entries["compacted together"], rel=0.02)
    assert entries["merged, sinks kept"] == pytest.approx(entries["compacted together"], rel=0.02)
    assert entries["merged"] < entries["merged, sinks kept"]
    assert found["means"]["full context"]["kl"] == 0
