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
from ttmem.vision import KINDS, MergerSettings, Qwen3VLWithMergers, check, install, load, load_image_processor


def own_mergers(network: Any) -> list[Any]:
    visual = network.model.visual
    return [visual.merger, *visual.deepstack_merger_list]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength", ["scalar", 0.01, 2])
def test_penalties_come_back(
    strength: Any,
    dtype: torch.dtype,
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
    make_inputs: Callable[..., Any],
) -> None:
    """Fixed ones too, which are settings and no weights."""
    network = make_vision_network().to(dtype)
    install(network, MergerSettings("ttr-conv", 3, strength=strength, normalize_keys=False))
    network.save_pretrained(tmp_path)
    back, inputs = load(tmp_path, dtype=dtype).eval(), make_inputs(3)
    for old, new in zip(own_mergers(network), own_mergers(back), strict=True):
        assert torch.equal(new.compress.penalty(), old.compress.penalty())
        assert not new.compress.normalize_keys
    if dtype == torch.float32:  # a cast also casts rotary frequencies, a load does not
        assert torch.equal(back(**inputs).logits, network(**inputs).logits)
    fresh = load(tmp_path, MergerSettings("ttr", 3, strength=0.25), reinitialise=True)
    for merger in own_mergers(fresh):
        torch.testing.assert_close(merger.compress.penalty().float(), torch.tensor([0.25]), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reinitialise", [False, True])
def test_a_model_that_came_with_its_mergers_keeps_them(
    kind: Any,
    reinitialise: bool,
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
    make_inputs: Callable[..., Any],
    make_image_processor: Callable[..., Any],
) -> None:
    """Its checkpoint has no others. The refusal changes nothing: it runs and is saved as before."""
    network = make_vision_network()
    install(network, MergerSettings("ttr" if reinitialise else kind, 2))
    network.save_pretrained(tmp_path / "first")
    wanted, processor = MergerSettings(kind, 3 if reinitialise else 2), make_image_processor(2)
    model = load(tmp_path / "first", wanted, processor, reinitialise=reinitialise).eval()
    inputs = make_inputs(wanted.merge_size)
    before, config = model(**inputs).logits, model.config.to_dict()
    for _ in range(2):
        with pytest.raises(VisionError, match=r"replaced none to go back to.*reinitialise=True"):
            model.installation.uninstall()
    assert model.installation.final
    assert model.config.to_dict() == config
    assert check(model, processor) == wanted.merge_size
    assert torch.equal(model(**inputs).logits, before)
    with pytest.raises(VisionError, match="grid of 5 x 6"):  # the hooks are in place
        model.model.visual(torch.randn(30, 96), grid_thw=torch.tensor([[1, 5, 6]]))
    model.save_pretrained(tmp_path / "second")
    assert torch.equal(load(tmp_path / "second").eval()(**inputs).logits, before)


def test_a_model_that_had_its_own_mergers_can_go_back(
    tmp_path: Path, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network()
    network.save_pretrained(tmp_path)
    model = load(tmp_path, MergerSettings("ttr-conv", 3), reinitialise=True).eval()
    assert not model.installation.final
    model.installation.uninstall()
    inputs = make_inputs(2)
    assert torch.equal(model(**inputs).logits, network(**inputs).logits)


@pytest.mark.parametrize("wrong", ["ttr", {"kind": "ttr"}, {}, MergerSettings])
@pytest.mark.parametrize("reinitialise", [False, True])
def test_settings_that_are_none_are_refused(
    wrong: Any, reinitialise: bool, tmp_path: Path, make_vision_network: Callable[..., Any]
) -> None:
    make_vision_network().save_pretrained(tmp_path)
    with pytest.raises(VisionError, match="must be a MergerSettings"):
        load(tmp_path, wrong, reinitialise=reinitialise)


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv", "concat"])
def test_the_exception_that_transformers_alone_does_not_refuse(
    kind: Any, tmp_path: Path, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    """Groups of one patch with layers of width d; `load` reads them as they are."""
    network, inputs = make_vision_network(), make_inputs(1)
    install(network, MergerSettings(kind, 1, hidden=24))
    network.save_pretrained(tmp_path)
    plain = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert not torch.allclose(plain(**inputs).logits, network(**inputs).logits, atol=0.1)
    assert torch.equal(load(tmp_path).eval()(**inputs).logits, network(**inputs).logits)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no weights" * 10),
        lambda file: cut(file, -100),
        lambda file: cut(file, 100),
    ],
    ids=["gone", "empty", "garbage", "end cut off", "beginning alone"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-*.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("reinitialise", [False, True])
def test_damaged_weights_are_refused(
    damage: Callable[[Path], Any],
    name: str,
    reinitialise: bool,
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
) -> None:
    network = make_vision_network()
    settings = MergerSettings("ttr", 3)
    if not reinitialise:
        install(network, settings)
    network.save_pretrained(tmp_path, max_shard_size="40KB" if "*" in name else "1GB")
    if name.endswith(".bin"):
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
        (tmp_path / "model.safetensors").unlink()
    (file,) = tmp_path.glob(name)
    damage(file)
    with pytest.raises(VisionError, match=r"weights cannot be read .*copy the folder again") as caught:
        load(tmp_path, settings, reinitialise=reinitialise)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("index", ["", "{", "{}", '{"weight_map": {"lm_head.weight": "nowhere.safetensors"}}'])
def test_a_damaged_index_is_refused(index: str, tmp_path: Path, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(VisionError, match="weights cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": 5}, r"linear_fc1\.bias is \[96\] instead of \[5\]"),
        ({"kernel_size": 5}, r"kernel is \[9, 24\] instead of \[25, 24\]"),
        ({"strength": "scalar"}, r"rho is \[24\] instead of \[1\]"),
        ({"strength": 0.01}, r"rho is \[24\] instead of"),
        ({"kind": "ttr"}, r"kernel has no place"),
        ({"kind": "mlp"}, r"and \d+ more"),
        ({"kind": "concat"}, r"compress\.a has no place"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}, {"ignore_mismatched_sizes": False}])
def test_settings_that_were_edited_are_refused_where_the_weights_tell(
    changes: dict[str, Any],
    named: str,
    options: dict[str, Any],
    tmp_path: Path,
    make_vision_network: Callable[..., Any],
) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3))
    network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["ttmem_merger"].update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VisionError, match=f"weights do not fit its config: .*{named}.*'ttmem_merger'"):
        load(tmp_path, **options)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "nobody\'s"}', "edited"])
def test_a_config_that_is_none_is_refused(text: str, tmp_path: Path, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path)
    if text == "edited":
        text = (tmp_path / "config.json").read_text().replace('"hidden_size": 24', '"hidden_size": "24"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(VisionError, match=r"config\.json cannot be read"):
        load(tmp_path)


def test_other_failures_are_not_taken_for_damage(
    tmp_path: Path, make_vision_network: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    network.save_pretrained(tmp_path)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Qwen3VLWithMergers, "from_pretrained", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        load(tmp_path)


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
