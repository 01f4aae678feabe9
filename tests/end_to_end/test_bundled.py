"""The whole way on the bundled model's real weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.demo import document
from ttmem.evaluation.fidelity import measure_fidelities
from ttmem.models.layers import cache_keyword

pytestmark = [pytest.mark.slow, pytest.mark.bundled, pytest.mark.timeout(900)]

SETTINGS = LatentSettings(rollouts=16, mass_start=True, fit_updates=100, distill_updates=2)


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    model = ttmem.load_model(dtype="float32")
    return Prepared(model, Document.of(model, document()[:2000], "beginning of the demo"), SETTINGS)


def test_a_full_memory_is_the_unmodified_model(prepared: Prepared) -> None:
    model = prepared.model
    question = torch.tensor([model.encode("\n\nQuestion: When was Skarrholm Station founded?\nAnswer:")])
    whole = torch.cat([prepared.document.ids.unsqueeze(0), question], dim=1)
    length = prepared.document.length
    with torch.no_grad():
        expected = model.network(input_ids=whole).logits[0, length:]
        positions = torch.arange(length, whole.shape[1]).unsqueeze(0)
        found = model.forward(question, prepared.full.cache(), position_ids=positions).logits[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        plain = model.network.generate(whole, max_new_tokens=16, do_sample=False)[0, whole.shape[1] :]
        cache = {cache_keyword(model.network): prepared.full.cache()}
        ours = model.network.generate(**prepared.full.inputs(question), **cache, max_new_tokens=16, do_sample=False)[
            0, question.shape[1] :
        ]
    assert plain.tolist() == ours.tolist()


def test_training_brings_the_memory_closer_than_selection(prepared: Prepared, tmp_path: Path) -> None:
    budget = Budget.of(prepared.document.length, ratio=8)
    method = LatentCompaction(SETTINGS)
    trained = method(prepared, budget)
    trained.save(tmp_path / "memory.ttmem")
    loaded = ttmem.Memory.load(tmp_path / "memory.ttmem")
    assert loaded.entries == 30 * 3 * budget.tokens
    memories = {"trained": loaded, "initial": method.initial(prepared, budget), "kvzip+": KVzipPlus()(prepared, budget)}
    kl = {name: fidelity.kl for name, fidelity in measure_fidelities(prepared.model, prepared.full, memories).items()}
    assert kl["trained"] < kl["initial"]
    assert kl["trained"] < kl["kvzip+"]
    assert ttmem.ask(prepared.model, loaded, ["When was Skarrholm Station founded?"], max_new_tokens=8)
