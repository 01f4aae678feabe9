"""The TTCD layer: the formulas, causality, where it starts, its ablations, and training without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ttmem.errors import BudgetError, ModelError
from ttmem.fast_weights import TTCDForCausalLM, naive
from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.layout import arrange
from ttmem.fast_weights.ttcd import TTCDLayer

CPU = torch.device("cpu")


def by_the_formulas(layer: TTCDLayer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer for one text, hidden [T, d], from `naive`."""
    config, attention, mlp, fast = layer.config, layer.self_attn, layer.mlp, layer.fast
    x = layer.input_layernorm(hidden)
    heads = [
        p(x).view(x.shape[0], -1, attention.head_dim).transpose(0, 1)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    q, k = (y[0] for y in apply_rotary_pos_emb(heads[0][None], heads[1][None], cos, sin))
    groups = attention.heads // attention.kv_heads
    k, v = k.repeat_interleave(groups, 0), heads[2].repeat_interleave(groups, 0)
    views = []
    for window in (config.teacher_window, config.student_window):
        out = naive.attention(q, k, v, window).transpose(0, 1).flatten(1)
        views.append(hidden + attention.o_proj(out))
    h_T, h_S = (layer.post_attention_layernorm(view) for view in views)
    Z_T, Z_S = (silu(mlp.gate_proj(h)) * mlp.up_proj(h) for h in (h_T, h_S))
    C, W = config.chunk_size, mlp.down_proj.weight
    Zbar_T, Zbar_S = Z_T, Z_S
    if fast.conv_teacher is not None and fast.conv_student is not None:
        Zbar_T, Zbar_S = naive.convolve(Z_T, fast.conv_teacher, C), naive.convolve(Z_S, fast.conv_student, C)
    P = torch.eye(W.shape[0], dtype=W.dtype) if fast.projection is None else fast.projection
    beta = torch.ones(x.shape[0], dtype=W.dtype) if fast.rate is None else torch.sigmoid(h_S @ fast.rate)
    updates = naive.distilled_updates(W, P, Zbar_T, Zbar_S, beta, config.fast_lr, C, config.normalize_keys)
    return views[0] + naive.read(W, updates, Zbar_T if config.convolved_reads else Z_T, C)


ABLATIONS: list[dict[str, Any]] = [
    {},
    {"conv_kernel": 0},
    {"conv_kernel": 1},
    {"projection": False},
    {"normalize_keys": False},
    {"token_rates": False},
    {"convolved_reads": False},
    {"chunk_size": 1},
    {"chunk_size": 4, "teacher_window": None},
    {"fast_layers": [1]},
]


@pytest.mark.parametrize("changes", ABLATIONS, ids=str)
def test_the_layer_is_the_formulas(make_fast: Any, changes: dict[str, Any]) -> None:
    model = make_fast(**changes)
    layer = model.model.layers[(changes.get("fast_layers") or [0])[0]]
    hidden = torch.randn(1, 17, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, layout, positions = arrange((1, 17), CPU, None, None)
    cos, sin = model.model.rotary_emb(hidden, position_ids=positions)
    with torch.no_grad():
        found = layer(hidden, Context(layout, cos, sin, hidden))
        expected = by_the_formulas(layer, hidden[0], cos, sin)
        torch.testing.assert_close(found[0], expected, atol=1e-10, rtol=0)
        layer.config.fast_lr = 0.0
        without = layer(hidden, Context(layout, cos, sin, hidden))
    assert (found - without).abs().max() > 1e-2  # the memory matters


def leaks(model: TTCDForCausalLM, ids: Tensor) -> list[int]:
    """From where on changed tokens change logits before them: ids [1, T]."""
    T = ids.shape[1]
    at = torch.arange(1, T).unsqueeze(1)
    later = torch.arange(T) >= at
    changed = torch.where(later, (ids + 7) % 59 + 1, ids)
    with torch.no_grad():
        difference = (model(changed, use_cache=False).logits - model(ids, use_cache=False).logits).abs().amax(-1)
    return at[(difference.masked_fill(later, 0.0) > 1e-9).any(1)].flatten().tolist()


def test_it_is_causal(any_fast: TTCDForCausalLM, make_ids: Any) -> None:
    assert leaks(any_fast, make_ids(1, 23)) == []


def test_an_inclusive_scan_is_not_causal(make_fast: Any, make_ids: Any) -> None:
    """Eq. 13 as it is printed lets a chunk read what it writes itself."""
    model = make_fast(scan="inclusive")
    assert {1, 2, 3, 4, 6, 7, 8, 9} <= set(leaks(model, make_ids(1, 23)))
    with pytest.raises(ModelError, match="inclusive"):
        model(make_ids(1, 4), cache=model.new_state())
    assert model(make_ids(1, 4)).logits.shape == (1, 4, 60)


def test_starts(make_fast: Any) -> None:
    from ttmem.fast_weights.ttcd import FastWeights

    scratch = FastWeights(make_fast().config)
    assert not scratch.conv_teacher.any()
    assert scratch.conv_student.all()
    pretrained = FastWeights(make_fast(convolution_start="pretrained").config)
    assert not pretrained.conv_student.any()
    assert pretrained.conv_teacher[0].eq(1).all()
    assert not pretrained.conv_teacher[1:].any()
    for fast in (scratch, pretrained):
        assert torch.equal(fast.projection, torch.eye(32))


def test_the_student_window_equal_to_the_teachers_writes_only_what_the_convolutions_differ_in(make_fast: Any) -> None:
    """Without convolutions, teacher and student are then the same and nothing is written."""
    ids = torch.arange(1, 24).unsqueeze(0)
    model = make_fast(student_window=8, conv_kernel=0)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
        for index in (0, 2):
            model.model.layers[index].config.fast_lr = 0.0
        torch.testing.assert_close(found, model(ids, use_cache=False).logits)


def test_all_parameters_learn(make_fast: Any, make_ids: Any) -> None:
    model = make_fast().train()
    ids = make_ids(2, 23)
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_stopped_teacher(make_fast: Any, make_ids: Any) -> None:
    """The same output; what reaches the teacher's convolution is then its part as the reader alone."""
    ids = make_ids(1, 23)
    gradients = {}
    for stop in (False, True):
        model = make_fast(stop_gradient=stop, convolved_reads=False)
        output = model(ids, labels=ids)
        output.loss.backward()
        gradients[stop] = (output.loss.detach(), model.model.layers[0].fast.conv_teacher.grad)
    torch.testing.assert_close(gradients[True][0], gradients[False][0])
    assert gradients[True][1] is None or not gradients[True][1].any()
    assert gradients[False][1].any()


def test_gradients_are_those_of_the_formulas(make_fast: Any) -> None:
    model = make_fast()
    layer = model.model.layers[0]
    hidden = torch.randn(1, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, layout, positions = arrange((1, 13), CPU, None, None)
    cos, sin = model.model.rotary_emb(hidden, position_ids=positions)
    weight = torch.randn(13, 32, dtype=torch.float64)
    both = []
    for compute in (
        lambda x: layer(x, Context(layout, cos, sin, x))[0],
        lambda x: by_the_formulas(layer, x[0], cos, sin),
    ):
        layer.zero_grad()
        x = hidden.clone().requires_grad_()
        (compute(x) * weight).sum().backward()
        both.append({"input": x.grad, **{name: p.grad.clone() for name, p in layer.named_parameters()}})
    for name in both[0]:
        torch.testing.assert_close(both[0][name], both[1][name], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("rule", ["ttcd", "in_place", "window"])
@pytest.mark.parametrize("given", ["nothing", "mask", "packed"])
def test_training_waits_for_no_device(make_fast: Any, rule: str, given: str) -> None:
    """On the meta device there are no values: whatever would have to wait for one raises."""
    with torch.device("meta"):
        model = make_fast(rule, dtype=torch.float32).train()
        ids = torch.ones(2, 600, dtype=torch.long)
        extra: dict[str, Any] = {
            "nothing": {},
            "mask": {"attention_mask": torch.ones_like(ids)},
            "packed": {"position_ids": torch.ones_like(ids), "attention_mask": torch.ones_like(ids)},
        }[given]
        model(ids, labels=ids, **extra).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"student_window": 9}, "student_window is 9"),
        ({"student_window": 0}, "student_window is 0"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"fast_layers": [3]}, "from 0 to 2"),
        ({"fast_layers": [1, 1]}, "distinct"),
        ({"fast_layers": []}, "fast_layers"),
        ({"rule": "mamba"}, "rule is 'mamba'"),
        ({"windows": [8, 8]}, "each of the 3 layers"),
        ({"windows": 0}, "windows is 0"),
        ({"teacher_window": 0}, "teacher_window is 0"),
        ({"scan": "both"}, "scan is 'both'"),
        ({"rule": "in_place", "conv_kernel": 4}, "odd"),
        ({"rule": "lact", "lact_heads": 5}, "divisor of 32"),
        ({"convolution_start": "zero"}, "convolution_start"),
        ({"target": "logits"}, "target"),
        ({"delta_engine": "c"}, "delta_engine"),
        ({"delta_kernel": 0}, "delta_kernel"),
        ({"conv_kernel": -1}, "conv_kernel is -1"),
    ],
)
def test_settings_out_of_range(make_fast: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        make_fast(**changes)
