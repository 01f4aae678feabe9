"""`ttmem ask`, `chat`, `info`, `eval` and `demo` on a memory file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

import ttmem.demo
from ttmem import Memory, Model, ask, measure_fidelity
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.conversation import Conversation
from ttmem.demo import DemoQuestion

FP32 = ["--dtype", "float32"]


def plain(text: str) -> str:
    return " ".join(text.split())


def test_one_question_is_streamed(run: Any, memory: Path, loaded: Model, made: Memory) -> None:
    outcome = run("ask", memory, "Who keeps the store?", "--max-tokens", "6", *FP32)
    assert outcome.code == 0
    assert outcome.out.endswith("\n")
    assert outcome.out.strip() == ask(loaded, made, "Who keeps the store?", max_new_tokens=6)[0]


def test_several_questions_are_listed(run: Any, memory: Path) -> None:
    outcome = run("ask", memory, "Who?", "When [not markup]?", "--max-tokens", "4", *FP32)
    assert outcome.code == 0
    assert "Who?" in outcome.out
    assert "When [not markup]?" in outcome.out


@pytest.mark.parametrize("questions", [["Who?"], ["Who?", "When does it leave?"]])
def test_ask_json(run: Any, memory: Path, loaded: Model, made: Memory, questions: list[str]) -> None:
    outcome = run("ask", memory, *questions, "--json", "--max-tokens", "6", *FP32)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert [pair["question"] for pair in found] == questions
    assert [pair["answer"] for pair in found] == ask(loaded, made, questions, max_new_tokens=6)


def test_the_model_is_the_recorded_one_unless_named(run: Any, memory: Path, model_folder: Path) -> None:
    assert run("ask", memory, "Who?", "--max-tokens", "2").code == 0
    assert run("ask", memory, "Who?", "--max-tokens", "2", "-m", model_folder).code == 0


def test_chat_reads_lines_until_the_end(
    run: Any, memory: Path, loaded: Model, made: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n\n  \nWhen?\n/reset\nWho?\n"))
    outcome = run("chat", memory, "--max-tokens", "5", *FP32)
    assert outcome.code == 0
    conversation = Conversation(loaded, made, max_new_tokens=5)
    replies = [conversation.say("Who?"), conversation.say("When?")]
    assert outcome.out == f"{replies[0]}\n{replies[1]}\n{replies[0]}\n"
    assert "/quit leaves" in outcome.err


def test_chat_quits(run: Any, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\nWho?\n"))
    assert run("chat", memory, *FP32)[:2] == (0, "")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("chat", memory, "--system", "Be brief.", *FP32)[:2] == (0, "")


def test_info(run: Any, memory: Path, made: Memory) -> None:
    outcome = run("info", memory)
    assert outcome.code == 0
    text = plain(outcome.out)
    assert "ferry.txt" in text
    assert "LlamaForCausalLM" in text
    assert "latent, seed 0" in text
    assert f"{made.document_length} tokens (kept in the file)" in text
    assert f"tallest bar: {max(max(layer.lengths) for layer in made.compacted)}" in text
    bars = [line.split()[1] for line in outcome.out.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [len(bar) for bar in bars] == [3, 3]


def test_info_json(run: Any, memory: Path, made: Memory) -> None:
    outcome = run("info", memory, "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["lengths"] == [list(layer.lengths) for layer in made.compacted]
    assert found["entries"] == made.entries
    assert found["bytes"] == {"file": memory.stat().st_size, "memory": Memory.load(memory).num_bytes()}
    assert found["dtype"] == "float32"
    assert found["document_kept"] is True
    assert found["fidelity"] == made.info.fidelity


def test_info_of_windows_and_of_a_memory_without_its_document(
    run: Any, tmp_path: Path, gemma: Model, make_full: Any
) -> None:
    make_full(gemma).save(tmp_path / "gemma.ttmem", keep_document=False)
    outcome = run("info", tmp_path / "gemma.ttmem")
    assert outcome.code == 0
    assert "not kept in the file" in plain(outcome.out)
    assert "a sliding-window layer" in outcome.out
    assert "not measured; see ttmem eval" in outcome.out
    found = json.loads(run("info", tmp_path / "gemma.ttmem", "--json").out)
    assert found["lengths"][0] is None
    assert found["document_kept"] is False


def test_eval(run: Any, memory: Path, loaded: Model, made: Memory, document_text: str) -> None:
    outcome = run("eval", memory, "--json", *FP32)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    full = Prepared(loaded, Document.of(loaded, document_text)).full
    expected = measure_fidelity(loaded, full, made)
    assert found == pytest.approx(vars(expected), rel=1e-3)
    assert found["kl"] == pytest.approx(made.info.fidelity["kl"], rel=1e-3)
    text = run("eval", memory, *FP32).out
    assert "KL to the full context" in text


def test_eval_of_a_memory_without_its_document(run: Any, tmp_path: Path, made: Memory, document: Path) -> None:
    path = tmp_path / "bare.ttmem"
    made.save(path, keep_document=False)
    outcome = run("eval", path, *FP32)
    assert outcome.code == 4
    assert "saved without its document: name it with --document" in outcome.err
    found = json.loads(run("eval", path, "--document", document, "--json", *FP32).out)
    assert found["kl"] == pytest.approx(made.info.fidelity["kl"], rel=1e-3)
    document.write_text("Another document.")
    outcome = run("eval", path, "--document", document, *FP32)
    assert outcome.code == 4
    assert "not the document this memory was made of" in outcome.err


def test_demo(
    run: Any, tmp_path: Path, model_folder: Path, document_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttmem.demo, "document", lambda: document_text)
    monkeypatch.setattr(ttmem.demo, "questions", lambda: [DemoQuestion("Who?", "x"), DemoQuestion("When?", "y")])
    target = tmp_path / "demo.ttmem"
    outcome = run("demo", "-m", model_folder, "-o", target)
    assert outcome.code == 0
    for words in ("full context", "KVzip+, same budget", "before training", "tokens/s", "Who?", "When?"):
        assert words in outcome.out
    assert Memory.load(target).info.method == "latent"


@pytest.mark.parametrize("document", [True, False])
def test_chat_compacts_older_turns(
    run: Any, memory: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path, document: bool
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Who keeps it?\nAnd when?\nWhere?\nWhy?\n/reset\nWho?\n"))
    where = [memory] if document else []
    folding = ["--auto", "--threshold", "60", "--keep", "30"]
    outcome = run("chat", *where, "-m", model_folder, *folding, "--max-tokens", "4")
    assert outcome.code == 0
    assert "were compacted 8x" in outcome.err
    assert "compacted" not in outcome.out


def test_chat_needs_a_memory_or_auto(run: Any, model_folder: Path) -> None:
    assert run("chat", "-m", model_folder).code == 2
    assert run("chat", "-m", model_folder, "--auto", "--threshold", "10", "--keep", "10").code == 5
