"""The model as transformers and its users expect it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ttmem.errors import ModelError
from ttmem.fast_weights import FastWeightCache, TTCDConfig, TTCDForCausalLM, TTCDModel
from ttmem.fast_weights.modeling import CACHE_FIELD
from ttmem.models import Model


def test_saved_and_loaded_by_the_auto_classes(any_fast: TTCDForCausalLM, make_ids: Any, tmp_path: Path) -> None:
    any_fast.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TTCDConfig)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    decoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(decoder, TTCDModel)
    ids = make_ids(1, 20)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, any_fast(ids).logits)
        assert torch.equal(decoder(ids).last_hidden_state, any_fast.model(ids).last_hidden_state)


def test_a_model_from_its_configuration_starts_as_the_rule_says(tmp_path: Path, make_fast: Any) -> None:
    config = make_fast(tie_word_embeddings=True).config
    model = AutoModelForCausalLM.from_config(config)
    assert not model.model.layers[0].fast.conv_teacher.any()
    assert torch.equal(model.model.layers[0].fast.projection, torch.eye(32))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 0.2 < model.model.layers[1].mlp.gate_proj.weight.std() < 0.4
    torch.nn.init.ones_(model.model.layers[0].fast.rate)  # loading must not start it anew
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.layers[0].fast.rate.eq(1).all()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_scores_of_an_evaluation_harness(fast: TTCDForCausalLM, make_ids: Any) -> None:
    """Sums of log-likelihoods of a left-padded, a right-padded and a single run agree."""
    ids = make_ids(3, 20)
    lengths = (20, 11, 4)
    sums = []
    for side in ("left", "right", None):
        for row, n in enumerate(lengths):
            text = ids[row : row + 1, :n]
            if side is None:
                logits = fast(text).logits[0]
            else:
                batch, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
                for r, m in enumerate(lengths):
                    where = slice(20 - m, 20) if side == "left" else slice(0, m)
                    batch[r, where], mask[r, where] = ids[r, :m], 1
                logits = fast(batch, attention_mask=mask).logits[row][mask[row].bool()]
            predicted = logits[:-1].log_softmax(-1)
            sums.append(predicted.gather(1, text[0, 1:, None]).sum().item())
    for row in range(3):
        assert sums[row] == pytest.approx(sums[row + 3], abs=1e-9) == pytest.approx(sums[row + 6], abs=1e-9)


def test_right_padding_needs_no_mask(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(1, 20)
    long = torch.nn.functional.pad(ids, (0, 7))
    torch.testing.assert_close(fast(long).logits[:, :20], fast(ids).logits, atol=1e-9, rtol=0)


def test_outputs(fast: TTCDForCausalLM, make_ids: Any) -> None:
    ids = make_ids(2, 9)
    output = fast(ids, labels=ids, output_hidden_states=True)
    assert isinstance(output[CACHE_FIELD], FastWeightCache)
    assert len(output.hidden_states) == 4
    assert torch.equal(fast.lm_head(output.hidden_states[-1]), output.logits)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss.double(), expected.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(fast(ids, logits_to_keep=2).logits, output.logits[:, -2:])
    assert fast(ids, use_cache=False).get(CACHE_FIELD) is None
    assert isinstance(fast(ids, return_dict=False), tuple)
    embedded = fast(inputs_embeds=fast.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, output.logits)
    with pytest.raises(ValueError, match="either"):
        fast(ids, inputs_embeds=fast.get_input_embeddings()(ids))


@pytest.mark.parametrize("rule", ["ttcd", "in_place", "lact", "gated_deltanet"])
def test_gradient_checkpointing(make_fast: Any, make_ids: Any, rule: str) -> None:
    ids, gradients = make_ids(2, 23), []
    for checkpointing in (False, True):
        model = make_fast(rule).train()
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.24
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_training_behind_a_state(make_fast: Any, make_ids: Any) -> None:
    """Recomputed layers would read the state as they left it: refused, where without them it learns."""
    ids = make_ids(1, 23)
    model = make_fast().train()
    state = model.read(ids[:, :12])
    model(ids[:, 12:], labels=ids[:, 12:], cache=state.copy()).loss.backward()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.raises(ModelError, match="without gradient checkpointing"):
        model(ids[:, 12:], cache=state)
    with torch.no_grad():
        model(ids[:, 12:], cache=state)
    assert state.get_seq_length() == 23


@pytest.mark.parametrize("checkpointing", [False, True])
def test_generate_in_training_mode(any_fast: TTCDForCausalLM, make_ids: Any, checkpointing: bool) -> None:
    """As a model is that was just made: it must not forget the prompt."""
    model, ids = copy.deepcopy(any_fast), make_ids(2, 13)
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    model.train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
    assert model(ids).get(CACHE_FIELD) is None


def test_generate_with_the_scan_that_leaks(make_fast: Any, make_ids: Any) -> None:
    model, ids = make_fast(scan="inclusive"), make_ids(1, 13)
    with pytest.raises(ModelError, match="use_cache=False"):
        model.generate(ids, max_new_tokens=3)
    whole = ids
    for _ in range(3):
        whole = torch.cat([whole, model(whole).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False), whole)


def test_autocast(any_fast: TTCDForCausalLM, make_ids: Any) -> None:
    model = copy.deepcopy(any_fast).float().train()
    ids = make_ids(2, 23)
    positions = torch.cat([torch.arange(9), torch.arange(14)]).expand(2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(ids, labels=ids).loss, model(ids, labels=ids, position_ids=positions).loss]
    sum(losses).backward()
    assert losses[0].item() == pytest.approx(any_fast(ids, labels=ids).loss.item(), rel=0.05)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(ids[:, 12:], cache=model.read(ids[:, :12]))


def test_it_cannot_be_compacted_and_says_what_to_do(fast: TTCDForCausalLM, tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="ttmem read"):
        Model(fast, tokenizer)
