"""Fast weights in pretrained models: the same model, bit for bit, until it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ttmem.errors import BudgetError, ModelError
from ttmem.fast_weights import TTCDForCausalLM, install

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 16}),
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_0_is_the_base_model(
    make_network: Any, make_ids: Any, family: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    ids = make_ids(2, 61)
    base = make_network(family, **changes).to(dtype)
    with torch.no_grad():
        expected = base(ids).logits
        model = install(base, student_window=8, chunk_size=7)
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert torch.equal(model.train()(ids).logits, expected)
    assert model.dtype == dtype


@pytest.mark.parametrize("rule", ["ttcd", "in_place"])
def test_it_writes_once_it_is_trained(make_network: Any, make_ids: Any, rule: str) -> None:
    ids = make_ids(2, 61)
    base = make_network("llama")
    model = install(base, [0, 2], student_window=8, chunk_size=7, rule=rule).train()
    assert model.config.fast_layers == [0, 2]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, base(ids).logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = None
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        first = loss.item() if first is None else first
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < first
    model.eval()
    state = model.read(ids)
    assert state.layers[0].tensors["memory"].abs().max() > 0


def test_modules_are_taken_over_not_copied(make_network: Any) -> None:
    base = make_network("qwen3")
    model = install(base, student_window=8, chunk_size=7)
    assert model.model.layers[1].mlp.gate_proj.weight is base.model.layers[1].mlp.gate_proj.weight
    mine = dict(model.named_parameters())
    assert [name for name, _ in base.named_parameters() if name not in mine] == []
    assert all("fast." in name for name in set(mine) - set(dict(base.named_parameters())))


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
def test_saved_and_loaded(
    make_network: Any, make_ids: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    ids = make_ids(1, 40)
    model = install(make_network(family, **changes), student_window=8, chunk_size=7)
    for layer in model.config.fast_layers:
        torch.nn.init.normal_(model.model.layers[layer].fast.conv_student)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, TTCDForCausalLM)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    found = loaded.generate(ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(found, model.generate(ids, max_new_tokens=5, do_sample=False))


def test_windows(make_network: Any) -> None:
    model = install(make_network("mistral", sliding_window=16), [1], student_window=8, chunk_size=7)
    assert model.config.teacher_window == 16
    assert model.config.windows == [16, 16]
    sliding = install(make_network("llama"), [1], teacher_window=32, student_window=8, chunk_size=7)
    assert [sliding.config.window_of(layer) for layer in range(3)] == [None, 32, None]
    mixed = make_network("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    assert install(mixed, [1], student_window=8, chunk_size=7).config.windows == [None, 16]
    with pytest.raises(BudgetError, match="different windows"):
        install(mixed, [0, 1], student_window=8, chunk_size=7)


def test_a_pretrained_model_with_windows_alone(make_network: Any, make_ids: Any) -> None:
    """The baseline without fast weights: Mistral has windows of its own to compare with."""
    ids = make_ids(2, 61)
    expected = make_network("mistral", sliding_window=16)
    model = install(make_network("mistral"), rule="window", windows=16)
    assert model.config.fast_layers == []
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits)
        assert (model(ids).logits - make_network("mistral")(ids).logits).abs().max() > 1e-3


def test_settings_that_there_are_not(make_network: Any) -> None:
    """A misspelt one must not leave its default in force."""
    for wrong in ({"chunk": 16}, {"student_windows": 8}, {"hidden_size": 8}, {"qk_norm": True}, {"head_dim": 8}):
        with pytest.raises(BudgetError, match=f"'{next(iter(wrong))}' is no setting of fast weights.*chunk_size"):
            install(make_network("llama"), **wrong)
    with pytest.raises(BudgetError, match="two names of one setting"):
        install(make_network("llama"), [0], fast_layers=[0])
    for layers in (0, "0", [0.5], ["0"]):
        with pytest.raises(BudgetError, match="fast_layers"):
            install(make_network("llama"), layers, student_window=8)
    for layers in ([1], (1,), range(1, 2)):
        assert install(make_network("llama"), layers, student_window=8).config.fast_layers == [1]
        assert install(make_network("llama"), fast_layers=layers, student_window=8).config.fast_layers == [1]


def test_what_cannot_be_done(make_network: Any) -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        install(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)))
    with pytest.raises(ModelError, match="'deltanet' cannot be installed"):
        install(make_network("llama"), rule="deltanet")
    with pytest.raises(BudgetError, match="from 0 to 2"):
        install(make_network("llama"), [5])
    with pytest.raises(BudgetError, match="student_window is 2048"):
        install(make_network("mistral", sliding_window=16))
