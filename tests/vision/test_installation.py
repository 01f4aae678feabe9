"""Installing mergers: every place that reads the merge size, training and generating through them, and going back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from ttmem import VisionError
from ttmem.vision import KINDS, MergerSettings, check, install

BOTH = pytest.mark.parametrize("merge_size", [2, 3])
EVERY = pytest.mark.parametrize("kind", KINDS)


def mergers(network: Any) -> list[Any]:
    visual = network.model.visual
    return [visual.merger, *visual.deepstack_merger_list]


@EVERY
@BOTH
def test_forward_and_backward_reach_every_merger(
    kind: Any, merge_size: int, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network()
    old = mergers(network)
    installation = install(network, MergerSettings(kind, merge_size))
    assert len(mergers(network)) == 3
    assert not set(map(id, old)) & set(map(id, mergers(network)))
    inputs = make_inputs(merge_size, ((1, 6, 12), (2, 6, 6)))
    output = network(**inputs, labels=inputs["input_ids"])
    output.loss.backward()
    for merger in mergers(network):
        for name, parameter in merger.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name
    assert network.model.visual.patch_embed.proj.weight.grad.any()
    assert installation.parameters == sum(p.numel() for m in mergers(network) for p in m.parameters())
    assert f"{merge_size} x {merge_size}" in str(installation)


@EVERY
@BOTH
def test_generation_goes_on_as_the_whole_sequence_says(
    kind: Any, merge_size: int, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, merge_size))
    inputs = make_inputs(merge_size)
    mask = torch.ones_like(inputs["input_ids"])
    made = network.generate(**inputs, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    types = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, 4))
    logits = network(**{**inputs, "input_ids": made, "mm_token_type_ids": types}).logits
    logits[..., 257] = -torch.inf  # the end, which min_new_tokens keeps away
    assert logits[0, -5:-1].argmax(-1).tolist() == made[0, -4:].tolist()


@BOTH
def test_own_mergers_are_those_of_a_model_built_with_that_merge_size(
    merge_size: int, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    """With equal weights: nothing else in the model remembers the old merge size."""
    installed, built = make_vision_network(2), make_vision_network(merge_size)
    install(installed, MergerSettings("mlp", merge_size))
    built.load_state_dict(installed.state_dict())
    inputs = make_inputs(merge_size, ((1, 6, 12), (1, 12, 6)))
    assert torch.equal(installed(**inputs).logits, built(**inputs).logits)
    positions = [
        n.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"])[0]
        for n in (installed, built)
    ]
    assert torch.equal(*positions)
    rows, columns = 6 // merge_size, 12 // merge_size
    assert positions[0][1, 0, 1 : 1 + rows * columns].max() == rows  # starts behind one token


@BOTH
def test_one_call_sets_config_and_processors(
    merge_size: int,
    make_vision_network: Callable[..., Any],
    make_image_processor: Callable[..., Any],
    make_video_processor: Callable[..., Any],
) -> None:
    network = make_vision_network()
    processor = SimpleNamespace(image_processor=make_image_processor(), video_processor=make_video_processor())
    install(network, MergerSettings("ttr", merge_size), processor)
    visual = network.model.visual
    assert network.config.vision_config.spatial_merge_size == visual.config.spatial_merge_size == merge_size
    assert (visual.spatial_merge_size, visual.spatial_merge_unit) == (merge_size, merge_size**2)
    assert processor.image_processor.merge_size == processor.video_processor.merge_size == merge_size
    assert check(network, processor) == merge_size
    assert network.config.vision_config.ttmem_merger["kind"] == "ttr"


def test_the_real_processor(make_vision_network: Callable[..., Any], vision_tokenizer: Any) -> None:
    """The whole processor can be made only with torchvision; its parts are tested without."""
    pytest.importorskip("torchvision")
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    size = {"shortest_edge": 16, "longest_edge": 10_000}
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=4, size=size), vision_tokenizer, Qwen3VLVideoProcessor(patch_size=4)
    )
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3), processor)
    image = torch.randint(0, 256, (3, 24, 48), dtype=torch.uint8)
    inputs = processor(text=["<|vision_start|><|image_pad|><|vision_end|>hi"], images=[image], return_tensors="pt")
    assert (inputs["input_ids"] == 300).sum() == 8
    assert network(**inputs).logits.isfinite().all()
    processor.image_processor.merge_size = 2
    with pytest.raises(VisionError, match="disagree"):
        check(network, processor)


def test_a_processor_that_disagrees_is_refused(
    make_vision_network: Callable[..., Any],
    make_image_processor: Callable[..., Any],
    make_video_processor: Callable[..., Any],
) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr", 3))
    for processor in (
        make_image_processor(2),
        SimpleNamespace(image_processor=make_image_processor(3), video_processor=make_video_processor(2)),
        SimpleNamespace(image_processor=make_image_processor(2), video_processor=make_video_processor(3)),
    ):
        with pytest.raises(VisionError, match=r"disagree about the merge size.*: 2"):
            check(network, processor)
    assert check(network, make_image_processor(3)) == 3
    network.model.visual.spatial_merge_size = 2
    with pytest.raises(VisionError, match="disagree"):
        check(network)


def test_silent_acceptance_is_what_the_check_is_for(
    make_vision_network: Callable[..., Any], make_image_processor: Callable[..., Any]
) -> None:
    """The vision model takes patches in another group order without a word, and answers something else."""
    from numpy.random import default_rng

    network = make_vision_network()
    install(network, MergerSettings("mean", 3))
    image = default_rng(0).integers(0, 256, (24, 48, 3)).astype("uint8")
    right, wrong = (make_image_processor(m)(images=[image], return_tensors="pt") for m in (3, 2))
    answers = [
        network.model.visual(i["pixel_values"], grid_thw=i["image_grid_thw"]).pooler_output for i in (right, wrong)
    ]
    assert answers[0].shape == answers[1].shape
    assert not torch.allclose(*answers, atol=1e-3)


def test_foreign_models_and_processors_are_refused(
    make_vision_network: Callable[..., Any],
    make_network: Callable[..., Any],
    make_image_processor: Callable[..., Any],
    tokenizer: Any,
) -> None:
    with pytest.raises(VisionError, match=r"no Qwen3-VL.*merger"):
        install(make_network("llama"), MergerSettings())
    network = make_vision_network()
    with pytest.raises(VisionError, match="no merge size"):
        install(network, MergerSettings(), tokenizer)
    with pytest.raises(VisionError, match="patch_size 14, the model 4"):
        install(network, MergerSettings(), make_image_processor(2, patch_size=14))
    for missing in ("patch_size", "temporal_patch_size"):
        sizes = {"merge_size": 2, "patch_size": 4, "temporal_patch_size": 2}
        del sizes[missing]
        other = SimpleNamespace(image_processor=SimpleNamespace(**sizes))
        for function in (check, lambda network, other: install(network, MergerSettings(), other)):
            with pytest.raises(VisionError, match=f"image_processor has no {missing}, the model"):
                function(network, other)
    assert check(network) == 2
    install(network, MergerSettings())
    with pytest.raises(VisionError, match=r"uninstall\(\)"):
        install(network, MergerSettings())


@EVERY
def test_uninstalling_leaves_no_trace(
    kind: Any,
    make_vision_network: Callable[..., Any],
    make_inputs: Callable[..., Any],
    make_image_processor: Callable[..., Any],
) -> None:
    network, untouched, processor = make_vision_network(), make_vision_network(), make_image_processor()
    install(network, MergerSettings(kind, 3), processor).uninstall()
    assert network.config.to_dict() == untouched.config.to_dict()
    assert processor.merge_size == 2
    visual = network.model.visual
    assert not visual._forward_hooks
    assert not visual._forward_pre_hooks
    inputs = make_inputs(2)
    assert torch.equal(network(**inputs).logits, untouched(**inputs).logits)
    assert type(network) is Qwen3VLForConditionalGeneration
    install(network, MergerSettings(kind, 3), processor)


@pytest.mark.parametrize(
    "moves",
    [
        lambda network: network.bfloat16(),
        lambda network: network.bfloat16().float(),
        lambda network: network.double().train(),
        lambda network: network.half().bfloat16().train().eval(),
        pytest.param(
            lambda network: network.cuda(),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ],
)
def test_what_is_uninstalled_goes_where_the_model_went(
    moves: Callable[[Any], Any], make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    """Cast and moved while other mergers were in, the model is the one that was cast and moved without them."""
    network, untouched = make_vision_network(), make_vision_network()
    old = mergers(network)
    installation = install(network, MergerSettings("ttr-conv", 3))
    moves(network)
    installation.uninstall()
    moves(untouched)
    assert list(map(id, mergers(network))) == list(map(id, old))
    state, expected = network.state_dict(), untouched.state_dict()
    assert {(n, v.dtype, v.device) for n, v in state.items()} == {(n, v.dtype, v.device) for n, v in expected.items()}
    assert all(merger.training == network.training for merger in mergers(network))
    inputs = {name: value.to(network.device) for name, value in make_inputs(2).items()}
    logits = network(**inputs).logits
    assert logits.dtype == network.dtype
    assert logits.isfinite().all()


def test_uninstalling_twice_touches_nothing_that_came_after(make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    first = install(network, MergerSettings("ttr", 3))
    first.uninstall()
    install(network, MergerSettings("mean", 3))
    kept = mergers(network)
    first.uninstall()
    assert list(map(id, mergers(network))) == list(map(id, kept))
    assert check(network) == 3


@pytest.mark.parametrize("wrong", ["ttr", {"kind": "ttr"}, MergerSettings, 3, None])
def test_settings_that_are_none_are_refused(wrong: Any, make_vision_network: Callable[..., Any]) -> None:
    network, untouched = make_vision_network(), make_vision_network()
    with pytest.raises(VisionError, match="must be a MergerSettings"):
        install(network, wrong)
    assert network.config.to_dict() == untouched.config.to_dict()


@pytest.mark.parametrize("strength", ["scalar", 0.01])
@pytest.mark.parametrize("normalize_keys", [True, False])
def test_ablations_train(
    strength: Any, normalize_keys: bool, make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3, strength=strength, normalize_keys=normalize_keys))
    inputs = make_inputs(3)
    network(**inputs, labels=inputs["input_ids"]).loss.backward()
    for merger in mergers(network):
        assert all(p.grad.isfinite().all() and p.grad.any() for p in merger.parameters())


def test_new_weights_depend_on_the_seed_alone(make_vision_network: Callable[..., Any]) -> None:
    states = []
    for before, seed in ((1, 0), (2, 0), (2, 1)):
        network = make_vision_network()
        torch.manual_seed(before)
        install(network, MergerSettings("ttr"), seed=seed)
        follows = torch.rand(1)
        torch.manual_seed(before)
        assert torch.equal(follows, torch.rand(1)), "the global generator was moved"
        states.append(network.model.visual.merger.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["linear_fc1.weight"], states[2]["linear_fc1.weight"])


def test_dtype_and_mode_are_the_models(
    make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    network = make_vision_network().to(torch.bfloat16).train()
    install(network, MergerSettings("ttr-conv", 3))
    assert all(p.dtype == torch.bfloat16 for m in mergers(network) for p in m.parameters())
    assert all(m.training for m in mergers(network))
    assert network(**make_inputs(3)).logits.isfinite().all()


def test_a_copy_has_its_own_grids(make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 3))
    other = copy.deepcopy(network)
    assert other.model.visual.merger.grids is not network.model.visual.merger.grids
    assert other.model.visual.merger.grids is other.model.visual.deepstack_merger_list[0].grids
    inputs = make_inputs(3)
    assert torch.equal(other(**inputs).logits, network(**inputs).logits)


@EVERY
def test_frames_of_a_video_are_merged_one_by_one(kind: Any, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 3))
    ids = torch.tensor([[*[302, *[301] * 8, 303] * 2, 5]])
    pixels = torch.randn(144, 96)
    inputs = {"input_ids": ids, "mm_token_type_ids": 2 * (ids == 301).int()}
    logits = network(**inputs, pixel_values_videos=pixels, video_grid_thw=torch.tensor([[2, 6, 12]])).logits
    assert logits.isfinite().all()
    visual = network.model.visual
    both = visual(pixels, grid_thw=torch.tensor([[2, 6, 12]])).pooler_output
    alone = [visual(frame, grid_thw=torch.tensor([[1, 6, 12]])).pooler_output for frame in pixels.split(72)]
    torch.testing.assert_close(both, torch.cat(alone))


def test_models_with_the_same_vision_part(
    make_vision_network: Callable[..., Any], make_inputs: Callable[..., Any]
) -> None:
    """Qwen3-VL with experts."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    config = make_vision_network().config.to_dict()
    parts = {name: dict(config[name]) for name in ("text_config", "vision_config")}
    for part in parts.values():
        del part["model_type"]
    parts["text_config"] |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    tokens = {name: value for name, value in config.items() if name.endswith("token_id")}
    network = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**parts, **tokens))
    install(network, MergerSettings("ttr-conv", 3))
    assert network(**make_inputs(3)).logits.isfinite().all()
