"""Training mergers in two stages: what is written, and that a run that was stopped ends as if it had not been."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from ttmem import ResumeError, TaskError
from ttmem.vision import check, load, load_image_processor

SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, make_tokenizer: Callable[..., PreTrainedTokenizerFast]
) -> Path:
    """A tiny model with its own 2 x 2 mergers, and seven pictures with questions."""
    image = pytest.importorskip("PIL.Image")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path = tmp_path_factory.mktemp("vision")
    tokenizer = make_tokenizer(None)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    torch.manual_seed(0)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": rope,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=ids[0],
        video_token_id=ids[1],
        vision_start_token_id=ids[2],
        vision_end_token_id=ids[3],
    )
    size = {"shortest_edge": 16, "longest_edge": 10_000}
    processor = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, size=size)
    for part in (Qwen3VLForConditionalGeneration(config), tokenizer, processor):
        part.save_pretrained(path / "model")
    rng = np.random.default_rng(0)
    lines = []
    for index in range(7):
        image.fromarray(rng.integers(0, 256, (12, 24, 3)).astype(np.uint8)).save(path / f"{index}.png")
        lines.append(json.dumps({"image": f"{index}.png", "question": "Which?", "answer": str(index)}))
    (path / "data.jsonl").write_text("\n".join(lines))
    return path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, out: Path, *more: str) -> None:
    import train_vision_merger

    arguments = ["--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--out", str(out)]
    settings = ["--kind", "ttr-conv", "--merge-size", "3", "--batch", "3", "--epochs", "2", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["train_vision_merger.py", *arguments, *settings, *more])
    train_vision_merger.main()


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import train_vision_merger
    from train_vision_merger import Answering

    run(monkeypatch, folder, tmp_path / "whole")
    whole = load(tmp_path / "whole").state_dict()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole"]
    check(load(tmp_path / "whole"), load_image_processor(tmp_path / "whole"))

    seen: list[str] = []
    loss, settings = Answering.loss, train_vision_merger.TrainSettings
    monkeypatch.setattr(
        train_vision_merger, "TrainSettings", lambda **given: settings(**{**given, "checkpoint_every": 1})
    )

    def stopping(objective: Any, step: int) -> torch.Tensor:
        seen.append(f"{objective.seed} {step}")
        if len(seen) in (5, 9):
            raise KeyboardInterrupt
        return loss(objective, step)

    monkeypatch.setattr(Answering, "loss", stopping)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, folder, tmp_path / "stopped", "--resume")
    with pytest.raises(ResumeError, match="seed"):
        run(monkeypatch, folder, tmp_path / "stopped", "--resume", "--seed", "1")
    run(monkeypatch, folder, tmp_path / "stopped", "--resume")
    assert seen == [*[f"0/1 {i}" for i in (0, 1, 2, 3, 4, 4, 5)], *[f"0/2 {i}" for i in (0, 1, 1, 2)]]
    stopped = load(tmp_path / "stopped").state_dict()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_stages_train_what_they_should(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Qwen3VLForConditionalGeneration.from_pretrained(folder / "model").state_dict()
    for epochs, trained in ((("1", "0"), ()), (("0", "1"), ("language_model", "lm_head"))):
        out = tmp_path / "-".join(epochs)
        run(monkeypatch, folder, out, "--epochs", *epochs)
        after = load(out).state_dict()
        for name, value in before.items():
            if "merger" not in name:
                assert torch.equal(after[name], value) != any(part in name for part in trained), name


def test_every_example_is_seen_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    import train_vision_merger
    from train_vision_merger import Answering

    examples = [{"image": str(i), "question": "", "answer": ""} for i in range(7)]
    seen: list[str] = []
    monkeypatch.setattr(train_vision_merger, "load_image", lambda path: path.name)
    monkeypatch.setattr(train_vision_merger, "collate", lambda *_: None)
    monkeypatch.setattr(train_vision_merger, "predict", lambda *_: type("P", (), {"loss": lambda self: None})())

    class Encode:
        tokenizer = type("T", (), {"pad_token_id": 0})

        def __call__(self, image: str, question: str, answer: str) -> None:
            seen.append(image)

    network = type("N", (), {"config": None})
    objective = Answering(network, Encode(), Path("data.jsonl"), examples, 3, "0/1")  # type: ignore[arg-type]
    for step in range(6):
        objective.loss(step)
    assert sorted(seen[:7]) == sorted(seen[7:]) == [str(i) for i in range(7)]
    assert seen[:7] != seen[7:]


@pytest.mark.parametrize("line", ["", "{", '{"image": "a.png", "question": "q"}', "[1]"])
def test_data_that_lack_something(line: str, tmp_path: Path) -> None:
    from train_vision_merger import read_data

    (tmp_path / "data.jsonl").write_text(line)
    with pytest.raises(TaskError, match=r"data\.jsonl"):
        read_data(tmp_path / "data.jsonl")
    with pytest.raises(TaskError, match="cannot be read"):
        read_data(tmp_path / "missing.jsonl")
