"""What a merger computes, against its formula written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ttmem.regression import ttr_compress
from ttmem.vision import KINDS, MergerSettings
from ttmem.vision.grids import MergeGrids
from ttmem.vision.mergers import GroupMerger

POOLED = [kind for kind in KINDS if kind != "mlp"]


def make(kind: Any, merge_size: int, norm: Any = None, **others: Any) -> tuple[GroupMerger, MergeGrids]:
    torch.manual_seed(0)
    settings = MergerSettings(kind, merge_size, norm=norm, **others)
    grids = MergeGrids(merge_size, settings.kernel_size)
    grids._grids = [(1, 6, 12)]
    return GroupMerger(settings, 16, 10, grids), grids


def tail(merger: GroupMerger, h: torch.Tensor) -> torch.Tensor:
    hidden = h @ merger.linear_fc1.weight.T + merger.linear_fc1.bias
    return torch.nn.functional.gelu(hidden) @ merger.linear_fc2.weight.T + merger.linear_fc2.bias


@pytest.mark.parametrize("norm", ["before", "after"])
@pytest.mark.parametrize("merge_size", [2, 3])
def test_one_regression_per_group(norm: str, merge_size: int) -> None:
    merger, _ = make("ttr", merge_size, norm)
    x = torch.randn(72, 16)
    layer_norm = torch.nn.functional.layer_norm
    tokens = layer_norm(x, (16,), eps=1e-6) if norm == "before" else x
    groups = [tokens[i : i + merge_size**2] for i in range(0, 72, merge_size**2)]
    h = torch.stack([ttr_compress(g, merger.compress.a, merger.compress.rho, engine="plain") for g in groups])
    expected = tail(merger, h if norm == "before" else layer_norm(h, (16,), eps=1e-6))
    torch.testing.assert_close(merger(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("merge_size", [2, 3])
def test_the_convolution_is_in_the_targets(merge_size: int) -> None:
    """Against conv2d over the picture, put in order by hand."""
    merger, _ = make("ttr-conv", merge_size)
    with torch.no_grad():
        merger.compress.kernel.normal_()
    picture = torch.randn(6, 12, 16)
    m = merge_size

    def ordered(grid: torch.Tensor) -> torch.Tensor:
        return grid.reshape(6 // m, m, 12 // m, m, -1).transpose(1, 2).reshape(72, -1)

    weight = merger.compress.kernel.T.reshape(16, 1, 3, 3)
    convolved = torch.nn.functional.conv2d(picture.permute(2, 0, 1)[None], weight, padding=1, groups=16)[0]
    targets = ordered((convolved.permute(1, 2, 0) @ merger.compress.a)[..., None]).view(-1, m * m)
    groups = ordered(picture).view(-1, m * m, 16)
    h = ttr_compress(groups, merger.compress.a, merger.compress.rho, targets=targets, engine="plain")
    expected = tail(merger, torch.nn.functional.layer_norm(h, (16,), eps=1e-6))
    torch.testing.assert_close(merger(ordered(picture)), expected, rtol=1e-3, atol=1e-4)


def test_a_fresh_convolution_changes_nothing() -> None:
    plain, convolved = make("ttr", 2)[0], make("ttr-conv", 2)[0]
    convolved.load_state_dict({**plain.state_dict(), "compress.kernel": convolved.compress.kernel.detach()})
    x = torch.randn(72, 16)
    torch.testing.assert_close(convolved(x), plain(x))


def test_norm_first_forgets_the_size_of_patches_and_norm_after_does_not() -> None:
    """Why "after" is the default: scaling some patches changes nothing that a norm before the operator leaves over."""
    x = torch.randn(72, 16)
    scaled = x * torch.rand(72, 1).add(0.5)
    after, before = make("ttr", 2, "after")[0], make("ttr", 2, "before")[0]
    torch.testing.assert_close(before(scaled), before(x), rtol=1e-3, atol=1e-4)
    assert (after(scaled) - after(x)).abs().max() > 0.05


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize("merge_size", [2, 3])
def test_groups_do_not_see_each_other(kind: str, merge_size: int) -> None:
    """Without a convolution; a fresh one copies."""
    merger, _ = make(kind, merge_size)
    x = torch.randn(72, 16)
    other = x.clone()
    other[merge_size**2 :] = torch.randn(72 - merge_size**2, 16)
    torch.testing.assert_close(merger(x)[0], merger(other)[0])


def test_shapes_differ_from_the_models_own_mergers() -> None:
    """So that these weights are never loaded into a model without ttmem's mergers, but for the one exception."""
    for kind in POOLED:
        for merge_size in (1, 2, 3):
            for hidden in (None, 16, merge_size**2 * 16):
                width = merge_size**2 * 16  # of the model's own layers
                same = make(kind, merge_size, hidden=hidden)[0].linear_fc1.weight.shape == (width, width)
                assert same == (merge_size == 1 and hidden == 16)


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv"])
@pytest.mark.parametrize("strength", ["diagonal", "scalar", 0.5, 2])
@pytest.mark.parametrize("normalize_keys", [True, False])
def test_every_setting_of_the_regression_reaches_it(kind: str, strength: Any, normalize_keys: bool) -> None:
    merger, _ = make(kind, 2, strength=strength, normalize_keys=normalize_keys, initial_strength=0.3, floor=0.1)
    compress = merger.compress
    learned = isinstance(strength, str)
    assert compress.normalize_keys == normalize_keys
    assert ("rho" in dict(compress.named_parameters())) == learned
    assert compress.rho.shape == (16 if strength == "diagonal" else 1,)
    torch.testing.assert_close(compress.penalty(), torch.full_like(compress.rho, 0.3 + 0.1 if learned else strength))
    x = torch.randn(72, 16)
    groups = [x[i : i + 4] for i in range(0, 72, 4)]
    options = {"floor": 0.1, "normalize_keys": normalize_keys}
    h = torch.stack([ttr_compress(g, compress.a, compress.rho, engine="plain", **options) for g in groups])
    expected = tail(merger, torch.nn.functional.layer_norm(h, (16,), eps=1e-6))
    torch.testing.assert_close(merger(x), expected, rtol=1e-3, atol=1e-4)
