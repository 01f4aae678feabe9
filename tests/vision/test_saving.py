"""Saving and loading: a model comes back with its mergers, and other mergers only on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from ttmem import VisionError
from ttmem.vision import KINDS, MergerSettings, check, install, load, load_image_processor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("merge_size", [2, 3])
def test_a_model_comes_back_with_its_mergers(
    kind: Any,
    merge_size: int,
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
    make_inputs: Callable[..., Any],
) -> None:
    network = make_vision_network()
    settings = MergerSettings(kind, merge_size)
    install(network, settings, seed=3)
    network.save_pretrained(tmp_path)
    back = load(tmp_path).eval()
    inputs = make_inputs(merge_size)
    assert torch.equal(back(**inputs).logits, network(**inputs).logits)
    assert check(back) == merge_size
    assert load(tmp_path, settings, dtype=torch.bfloat16).dtype == torch.bfloat16
    back.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again").eval()(**inputs).logits, network(**inputs).logits)


def test_sharded_weights(tmp_path: Path, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3))
    network.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    back = load(tmp_path).state_dict()
    assert all(torch.equal(back[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv", "mean", "concat", "attention"])
def test_transformers_alone_refuses_such_weights(
    kind: Any, tmp_path: Path, make_vision_network: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 3))
    network.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)


def test_own_mergers_are_read_by_transformers_alone(
    tmp_path: Path, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings("mlp", 3))
    network.save_pretrained(tmp_path)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    inputs = make_inputs(3)
    assert torch.equal(plain(**inputs).logits, network(**inputs).logits)


@pytest.mark.parametrize("before", ["own", "ttr", "ttr-conv"])
@pytest.mark.parametrize("after", ["mlp", "ttr-conv"])
def test_a_checkpoint_of_2_x_2_becomes_3_x_3_on_purpose_only(
    before: Any,
    after: Any,
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
    make_inputs: Callable[..., Any],
    make_image_processor: Callable[..., Any],
) -> None:
    network = make_vision_network(2)
    if before != "own":
        install(network, MergerSettings(before, 2))
    network.save_pretrained(tmp_path)
    wanted, processor = MergerSettings(after, 3), make_image_processor(2)
    with pytest.raises(VisionError, match="reinitialise=True the mergers are new and untrained"):
        load(tmp_path, wanted, processor)
    assert processor.merge_size == 2
    model = load(tmp_path, wanted, processor, reinitialise=True, seed=5).eval()
    assert check(model, processor) == processor.merge_size == 3
    fresh = make_vision_network(2, seed=9)
    install(fresh, wanted, seed=5)
    kept, new = network.state_dict(), fresh.state_dict()
    for name, value in model.state_dict().items():
        expected = new if "merger" in name else kept
        assert torch.equal(value, expected[name]), name
    assert model(**make_inputs(3)).logits.isfinite().all()
    assert not any(p.is_meta for p in model.parameters())


def test_what_cannot_be_loaded(
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
    make_network: Callable[..., Any],
    make_image_processor: Callable[..., Any],
) -> None:
    with pytest.raises(VisionError, match="no model in this folder"):
        load(tmp_path)
    make_network("llama").save_pretrained(tmp_path / "llama")
    with pytest.raises(VisionError, match="type 'llama'"):
        load(tmp_path / "llama")
    network = make_vision_network()
    network.save_pretrained(tmp_path / "own")
    with pytest.raises(VisionError, match="none of ttmem"):
        load(tmp_path / "own")
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path / "ttr")
    with pytest.raises(VisionError, match="disagree"):
        load(tmp_path / "ttr", processor=make_image_processor(2))


def test_missing_weights_are_an_error(tmp_path: Path, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.visual.merger.compress.rho"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(VisionError, match=r"merger\.compress\.rho"):
        load(tmp_path)


def test_a_config_that_was_edited_is_refused(tmp_path: Path, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vision_config"]["ttmem_merger"]["kind"] == "ttr"
    config["vision_config"]["spatial_merge_size"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VisionError, match="spatial_merge_size is 2"):
        load(tmp_path)


def test_the_image_processor_comes_back_with_its_merge_size(
    tmp_path: Path, make_vision_network: Callable[..., Any], make_image_processor: Callable[..., Any]
) -> None:
    network, processor = make_vision_network(), make_image_processor()
    install(network, MergerSettings("ttr", 3), processor)
    processor.save_pretrained(tmp_path)
    assert check(network, load_image_processor(tmp_path)) == 3
    (own,) = tmp_path.iterdir()  # a whole processor writes its parts into one file
    whole = {"processor_class": "Qwen3VLProcessor", "image_processor": json.loads(own.read_text())}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "processor_config.json").write_text(json.dumps(whole))
    assert check(network, load_image_processor(tmp_path / "whole")) == 3
    with pytest.raises(VisionError, match="no image processor"):
        load_image_processor(tmp_path / "nowhere")
