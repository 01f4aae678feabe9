"""The other rules: In-Place TTT, LaCT, and the delta rule against their definitions, and one interface for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from ttmem.errors import ModelError
from ttmem.fast_weights import TTCDForCausalLM, lact, naive
from ttmem.fast_weights.attention import Context
from ttmem.fast_weights.config import RULES
from ttmem.fast_weights.delta_rule import chunked_delta_rule, fla_delta_rule, recurrent_delta_rule
from ttmem.fast_weights.layout import arrange

CPU = torch.device("cpu")


def test_every_rule_has_a_model(make_fast: Any, make_ids: Any) -> None:
    """One configuration field apart, all learn with all their parameters."""
    ids = make_ids(2, 23)
    for rule in RULES:
        model = make_fast(rule).train()
        model(ids, labels=ids).loss.backward()
        unused = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert unused == [], rule


def context(model: TTCDForCausalLM, hidden: Tensor, embeddings: Tensor) -> Context:
    _, layout, positions = arrange((1, hidden.shape[1]), CPU, None, None)
    cos, sin = model.model.rotary_emb(hidden, position_ids=positions)
    return Context(layout, cos, sin, embeddings)


@pytest.mark.parametrize("target", ["embedding", "hidden"])
def test_in_place_ttt_is_the_formula(make_fast: Any, target: str) -> None:
    """dW = eta sum (P Conv(x)_t) Z_t', the convolution centred within the chunk; W_i reads Z."""
    model = make_fast("in_place", target=target)
    layer, C, T = model.model.layers[0], 5, 17
    generator = torch.Generator().manual_seed(2)
    hidden, embeddings = (torch.randn(1, T, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    shared = context(model, hidden, embeddings)
    with torch.no_grad():
        found = layer(hidden, shared)[0]
        view = hidden + layer.self_attn(layer.input_layernorm(hidden), shared, None)
        h = layer.post_attention_layernorm(view)[0]
        Z = layer.mlp.features(h)
        x = embeddings[0] if target == "embedding" else h
        updates = []
        for i in range(T // C):
            dW = torch.zeros(32, 48, dtype=torch.float64)
            for t in range(i * C, (i + 1) * C):
                near = [(j, t + j - 2) for j in range(5) if i * C <= t + j - 2 < (i + 1) * C]
                value = layer.fast.projection @ sum(layer.fast.conv[j] * x[s] for j, s in near)
                dW += layer.config.fast_lr * torch.outer(value, Z[t])
            updates.append(dW)
        expected = view[0] + naive.read(layer.mlp.down_proj.weight, updates, Z, C)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_a_lact_step_is_the_gradient() -> None:
    """Of the loss -sum_t f(k_t) . v_t; rates scale each token's part for each matrix."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    W = tuple(random(2, 3, 4, 4).requires_grad_() for _ in range(3))
    k, v, rates = random(2, 3, 6, 4), random(2, 3, 6, 4), random(2, 3, 6, 3).exp()
    found = lact.ascend(W, k, v, rates, muon=False)  # type: ignore[arg-type]
    for number in range(3):
        weight = rates[..., number].unsqueeze(-1)
        loss = -(lact.apply(W, k) * v * weight).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(found[number], -torch.autograd.grad(loss, W[number])[0])


def test_lact_applies_then_updates(make_fast: Any) -> None:
    """Chunk by chunk, rows as long as at first; an unfinished chunk changes nothing."""
    model = make_fast("lact")
    layer, C, T = model.model.layers[0], 5, 13
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 4, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    q, k, rates = normalize(q, dim=-1), normalize(k, dim=-1), torch.rand(1, T, 4, 3, dtype=torch.float64)
    _, layout, _ = arrange((1, T), CPU, None, None)
    with torch.no_grad():
        found = layer._learned(q, k, v, rates, layout, None)[0]
        fast = layer.fast
        for head in range(4):
            W = [w[head] for w in (fast.w1, fast.w2, fast.w3)]
            lengths = [w.norm(dim=1, keepdim=True) for w in W]
            for t in range(T):
                if t % C == 0 and t:
                    part = slice(t - C, t)
                    step = lact.ascend(
                        tuple(w[None, None] for w in W),  # type: ignore[arg-type]
                        *(x[:, part, head].unsqueeze(1) for x in (k, v, rates)),
                        muon=False,
                    )
                    W = [w + s[0, 0] for w, s in zip(W, step, strict=True)]
                    W = [w / w.norm(dim=1, keepdim=True) * n for w, n in zip(W, lengths, strict=True)]
                expected = W[1] @ (silu(W[0] @ q[0, t, head]) * (W[2] @ q[0, t, head]))
                torch.testing.assert_close(found[t, head], expected)


def delta_inputs(T: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(T)
    q, k = (torch.randn(2, 3, T, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    v = torch.randn(2, 3, T, 5, dtype=torch.float64, generator=generator)
    beta, g = (torch.rand(2, 3, T, dtype=torch.float64, generator=generator) for _ in range(2))
    return q, normalize(k, dim=-1), v, beta, -3 * g


@pytest.mark.parametrize("T", [0, 1, 7, 8, 30])
@pytest.mark.parametrize("gated", [False, True])
def test_the_delta_rule_in_blocks(T: int, gated: bool) -> None:
    q, k, v, beta, g = delta_inputs(T)
    state = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    decay = g if gated else None
    found = chunked_delta_rule(q, k, v, beta, decay, state, block=8)
    for mine, expected in zip(found, recurrent_delta_rule(q, k, v, beta, decay, state), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_strong_decay_stays_finite() -> None:
    q, k, v, beta, g = delta_inputs(64)
    for x in (q, k, v, beta):
        x.requires_grad_()
    out, state = chunked_delta_rule(q, k, v, beta, 300 * g)
    (out.sum() + state.sum()).backward()
    assert all(torch.isfinite(x).all() for x in (out, state, q.grad, k.grad, v.grad, beta.grad))  # type: ignore[arg-type]


def test_the_delta_rule_remembers_and_corrects() -> None:
    """With keys of unit length and beta = 1, the last value written at a key is read back, exactly."""
    k = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 0]].view(1, 1, 4, 4)
    v = torch.arange(8, dtype=torch.float64).view(1, 1, 4, 2)
    _, state = chunked_delta_rule(k, k, v, torch.ones(1, 1, 4, dtype=torch.float64))
    torch.testing.assert_close(state[0, 0, :3], v[0, 0, [3, 1, 2]])


def test_flash_linear_attention_is_optional() -> None:
    with pytest.raises(ModelError, match="pip install flash-linear-attention"):
        fla_delta_rule(*delta_inputs(4))
