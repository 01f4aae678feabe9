"""`ttmem read`, and `ask` and `info` on what was read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from ttmem import ask
from ttmem.fast_weights import Reading, install, load_reader, save_state
from ttmem.memory.file import STATE_KEY, checksum, read_tensors

FP32 = ["--dtype", "float32"]


@pytest.fixture(scope="module")
def fast_folder(tmp_path_factory: pytest.TempPathFactory, make_network: Any, make_tokenizer: Any) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("models") / "fast"
    network = install(make_network("llama"), [0, 2], student_window=8, chunk_size=16)
    for layer in (0, 2):
        torch.nn.init.normal_(network.model.layers[layer].fast.conv_student, std=0.3)
    network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def state(run: Any, fast_folder: Path, document: Path) -> Path:
    outcome = run("read", document, "-m", fast_folder, "-o", document.with_name("it.state"), *FP32)
    assert outcome.code == 0
    assert "tokens read into" in outcome.out
    return document.with_name("it.state")


def test_read_then_ask(run: Any, state: Path, fast_folder: Path, document_text: str) -> None:
    reader = load_reader(fast_folder, dtype="float32", device="cpu")
    expected = ask(reader, reader.read(document_text), ["Who keeps the store?", "When?"], max_new_tokens=6)
    one = run("ask", state, "Who keeps the store?", "--max-tokens", "6", *FP32)
    assert one.code == 0
    assert one.out.strip() == expected[0]
    both = run("ask", state, "Who keeps the store?", "When?", "--json", "--max-tokens", "6", "-m", fast_folder, *FP32)
    assert [pair["answer"] for pair in json.loads(both.out)] == expected


def test_read_json_and_the_default_name(run: Any, fast_folder: Path, document: Path) -> None:
    outcome = run("read", document, "-m", fast_folder, "--json", *FP32)
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["state"] == str(document.with_suffix(".state"))
    assert found["document"]["name"] == "ferry.txt"
    assert found["bytes"] == Reading.load(document.with_suffix(".state")).num_bytes()
    assert "reading" in found["seconds"]


def test_info(run: Any, state: Path) -> None:
    outcome = run("info", state)
    assert outcome.code == 0
    assert "ferry.txt" in outcome.out
    assert "ttcd in layers 0, 2, chunks of 16 tokens" in outcome.out
    assert json.loads(run("info", state, "--json").out)["settings"]["chunk_size"] == 16


def test_a_state_of_a_model_without_a_name(run: Any, fast_folder: Path, tmp_path: Path) -> None:
    """As `save_state` writes it for a model that was built in Python."""
    network = load_reader(fast_folder, dtype="float32", device="cpu").network
    network.name_or_path = ""
    save_state(network.new_state(), tmp_path / "a.state", network)
    outcome = run("ask", tmp_path / "a.state", "Who?", *FP32)
    assert outcome.code == 3
    assert "name the model with -m" in outcome.err
    assert run("ask", tmp_path / "a.state", "Who?", "--max-tokens", "1", "-m", fast_folder, *FP32).code == 0


def test_files_that_were_tampered_with(run: Any, state: Path, fast_folder: Path) -> None:
    sound = state.read_bytes()
    for name, change in {
        "model": lambda tensors, header: header["info"].update(model={}),
        "document": lambda tensors, header: header["info"].update(document={"x": 1}),
        "keys": lambda tensors, header: tensors.pop("layers.0.keys"),
    }.items():
        state.write_bytes(sound)
        tensors, metadata = read_tensors(state)
        header = json.loads(metadata[STATE_KEY])
        change(tensors, header)
        del header["checksum"]
        header["checksum"] = checksum(header, tensors)
        save_file(tensors, state, {STATE_KEY: json.dumps(header)})
        assert run("ask", state, "Who?", "-m", fast_folder, *FP32).code == 6, name
        assert run("info", state).code == (0 if name == "keys" else 6), name


def test_errors(
    run: Any, state: Path, model_folder: Path, document: Path, fast_folder: Path, memory: Path, tmp_path: Path
) -> None:
    assert run("read", document, *FP32).code == 2
    outcome = run("read", document, "-m", model_folder, *FP32)
    assert outcome.code == 3
    assert "has no fast weights" in outcome.err
    assert run("read", tmp_path / "none.txt", "-m", fast_folder).code == 4
    assert run("read", document, "-m", fast_folder, "-o", document).code == 6
    assert run("read", document, "-m", fast_folder, "-o", tmp_path / "no" / "it.state").code == 6
    outcome = run("ask", state, "Who?", "-m", model_folder, *FP32)
    assert outcome.code == 3
    outcome = run("chat", state)
    assert outcome.code == 6
    assert "ttmem ask" in outcome.err
    outcome = run("compact", document, "-m", fast_folder, "--ratio", "8", "-o", tmp_path / "it.ttmem", *FP32)
    assert outcome.code == 3
    assert run("ask", memory, "Who?", "--max-tokens", "2", *FP32).code == 0
    assert run("ask", memory, "Who?", "-m", fast_folder, *FP32).code == 3
