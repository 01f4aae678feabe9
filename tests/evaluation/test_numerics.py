"""The three levels tell good kernels from bad ones, and the fused forms of this package pass them."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttmem.attention.dual_window import dual_window_attention
from ttmem.attention.dual_window_reference import dual_window_reference
from ttmem.attention.short_convolution import short_convolution, short_convolution_reference
from ttmem.evaluation.mad import MadObjective, NextTokens
from ttmem.evaluation.numerics import Error, distribution_change, kernel_errors, task_change
from ttmem.fast_weights import TTCDConfig, TTCDModel
from ttmem.fast_weights.layout import Layout
from ttmem.fast_weights.scan import make_plan, scan_memory
from ttmem.regression import ttr_compress
from ttmem.regression.reference import dual, keys_and_targets, penalty
from ttmem.tasks.mad.data import make_data
from ttmem.tasks.mad.settings import MadSetting
from ttmem.training.loop import TrainSettings, train

HALF, SINGLE = torch.bfloat16, torch.float32
CHUNK = 8


def random(*shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def fused_windows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return dual_window_attention(q, k, v, 48, 20, engine="merge")


def plain_windows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return dual_window_reference(q, k, v, 48, 20, q.shape[-1] ** -0.5)


def scanned(z: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return scan_memory(z, keys, values, make_plan(Layout(2, z.shape[1], z.device), CHUNK, 0, 12, 16))


def chunk_by_chunk(z: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """W_i, summed up over all chunks before, times z: eq. 12 and 13."""
    chunks = [x.unflatten(1, (-1, CHUNK)) for x in (z, keys, values)]
    written = (chunks[2].mT @ chunks[1]).cumsum(1)
    before = torch.cat([torch.zeros_like(written[:, :1]), written[:, :-1]], dim=1)
    return (chunks[0] @ before.mT).flatten(1, 2)


def compressed(x: Tensor, a: Tensor, rho: Tensor) -> Tensor:
    return ttr_compress(x, a, rho)


def regressed(x: Tensor, a: Tensor, rho: Tensor) -> Tensor:
    blocks = [dual(*keys_and_targets(block, a), penalty(rho)) for block in x]
    return torch.stack(blocks)


HEADS = [(1, 4, 160, 16), (1, 2, 160, 16), (1, 2, 160, 16)]
KERNELS: dict[str, tuple[Any, Any, list[tuple[int, ...]], torch.dtype]] = {
    "two windows": (fused_windows, plain_windows, HEADS, SINGLE),
    "two windows in bf16": (fused_windows, plain_windows, HEADS, HALF),
    "short convolution": (short_convolution, short_convolution_reference, [(2, 3, 16, 24), (24, 5)], SINGLE),
    "short convolution in bf16": (short_convolution, short_convolution_reference, [(2, 3, 16, 24), (24, 5)], HALF),
    "scan": (scanned, chunk_by_chunk, [(2, 1024, 16), (2, 1024, 16), (2, 1024, 12)], SINGLE),
    "scan in bf16": (scanned, chunk_by_chunk, [(2, 1024, 16), (2, 1024, 16), (2, 1024, 12)], HALF),
    "regression": (compressed, regressed, [(6, 8, 32), (32,), (32,)], SINGLE),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_level(name: str) -> None:
    """Outputs and gradients of the fused forms are about as near to fp64 as the plain forms in the same dtype."""
    fast, plain, shapes, dtype = KERNELS[name]
    found = kernel_errors(fast, plain, random(*shapes), dtype)
    outputs = 2 if "windows" in name else 1
    assert len(found) == outputs + len(shapes)
    for errors in found:
        assert errors.fast.typical < 8 * torch.finfo(dtype).eps
        assert errors.factor < 4.0, errors


def test_a_bad_kernel_is_seen() -> None:
    """One that rounds its scores to bf16, as a kernel with a wrong accumulator would."""

    def exact(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).tanh()

    def rounded(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).bfloat16().to(x.dtype).tanh()

    inputs = random((20, 30), (30, 10))
    same, bad = kernel_errors(exact, exact, inputs), kernel_errors(rounded, exact, inputs)
    assert [(errors.factor, errors.equal) for errors in same] == [(1.0, 1.0)] * 3
    assert min(errors.factor for errors in bad) > 100
    assert bad[0].equal < 0.5
    assert len(kernel_errors(rounded, exact, inputs, gradients=False)) == 1


def test_errors_are_relative() -> None:
    error = Error.of(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0], dtype=torch.float64))
    size = ((9 + 16) / 2) ** 0.5
    assert error.largest == pytest.approx(1 / size)
    assert error.typical == pytest.approx(0.5**0.5 / size)


def test_the_distribution_level_says_what_it_should() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.8, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.5], [0.1, 0.9], [0.7, 0.3]], dtype=torch.float64)
    found = distribution_change(p.log(), q.log())
    assert found.variation_median == pytest.approx(0.1)
    assert found.variation_high == pytest.approx(0.1 + 0.98 * 0.7)
    assert found.flips == pytest.approx(1 / 3)
    assert found.kl_median == pytest.approx(0.8 * math.log(8 / 7) + 0.2 * math.log(2 / 3))
    assert 0.0 < found.kl_median < found.kl_high


class Encoder(nn.Module):
    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        self.decoder = TTCDModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(input_ids=ids, use_cache=False).last_hidden_state


def test_the_three_levels_on_a_trained_model() -> None:
    """A model that has learned to recall, with the fused windows and with two plain passes."""
    setting = MadSetting("recall", 16, 128, train_examples=256, test_examples=64)
    sizes = {
        "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "windows": 32, "teacher_window": 32,
        "student_window": 16, "chunk_size": 16, "pad_token_id": None,
    }  # fmt: skip
    torch.manual_seed(0)
    model = NextTokens(Encoder(TTCDConfig(**sizes)), 32, 16).train()
    data = make_data(setting, "train", 0)
    train(dict(model.named_parameters()), MadObjective(model, data, 16, 0), TrainSettings(steps=12, lr=3e-3))
    logits = {}
    for engine in ("fused", "plain"):
        own = copy.deepcopy(model).eval()
        for layer in own.encoder.decoder.layers:
            layer.self_attn.fused = engine == "fused"
        with torch.no_grad():
            logits[engine] = own(data.inputs[:16])
    assert not torch.equal(logits["fused"], logits["plain"])
    change = distribution_change(logits["plain"], logits["fused"])
    assert change.kl_high < 1e-8
    assert change.variation_high < 1e-4
    assert change.flips < 0.01
    counted = data.targets[:16] >= 0
    answers = {engine: own.argmax(-1)[counted].tolist() for engine, own in logits.items()}
    task = task_change(answers["plain"], answers["fused"], data.targets[:16][counted].tolist())
    assert task.changed < 0.01
    assert abs(task.plain - task.fast) <= task.changed


def test_the_task_level_counts() -> None:
    found = task_change(["a", "b", "c", "d"], ["a", "c", "c", "b"], ["a", "b", "c", "c"])
    assert (found.plain, found.fast, found.changed) == (0.75, 0.5, 0.5)
    with pytest.raises(ValueError, match="1 and 2 answers"):
        task_change(["a"], ["a", "b"], ["a"])
