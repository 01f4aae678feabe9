"""Next-token prediction: the same loss as transformers', however it is cut into parts; token files that are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ttmem.errors import TaskError
from ttmem.training import language
from ttmem.training.language import (
    NextToken,
    TokenObjective,
    fingerprint_tokens,
    positions_in_documents,
    read_tokens,
)
from ttmem.training.parallel import World

Make = Callable[[], LlamaForCausalLM]


@pytest.fixture
def make_lm() -> Make:
    def make() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=50,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )

    return make


@pytest.fixture
def tokens(tmp_path: Path) -> np.ndarray:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(1, 50, 500).astype(np.uint16))
    return read_tokens(tmp_path / "tokens.npy", 50)


def gradient(lm: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])


def test_loss_and_gradient_do_not_depend_on_the_parts(
    make_lm: Make, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = np.random.default_rng([0, 7]).integers(0, 480, 4)
    batch = torch.tensor(np.stack([tokens[i : i + 21] for i in starts]).astype(np.int64))
    plain = make_lm()
    expected = plain(batch, labels=batch).loss
    expected.backward()
    for micro, chunk in ((4, 1024), (2, 7), (1, 1024)):
        monkeypatch.setattr(language, "CHUNK", chunk)
        lm = make_lm()
        objective = TokenObjective(NextToken(lm), tokens, 20, 4, seed=0, micro=micro)
        loss = objective.loss(7)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert objective.losses == [pytest.approx(expected.item(), rel=1e-5)]
        torch.testing.assert_close(gradient(lm), gradient(plain), rtol=1e-4, atol=1e-6)


def test_processes_share_a_step(make_lm: Make, tokens: np.ndarray) -> None:
    alone = TokenObjective(NextToken(make_lm()), tokens, 20, 4, seed=0).loss(3).item()
    shares = [
        TokenObjective(NextToken(make_lm()), tokens, 20, 4, 0, world=World(rank, 2, torch.device("cpu"))).loss(3)
        for rank in (0, 1)
    ]
    assert shares[0].item() != shares[1].item()
    assert sum(share.item() for share in shares) / 2 == pytest.approx(alone, rel=1e-5)


def test_positions_start_again_behind_separators(make_lm: Make, tokens: np.ndarray) -> None:
    ids = torch.tensor([[5, 0, 7, 8, 0, 0, 9], [0, 1, 2, 3, 4, 5, 0]])
    assert positions_in_documents(ids, 0).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    whole = TokenObjective(NextToken(make_lm()), tokens, 100, 2, seed=0).loss(0)
    cut = TokenObjective(NextToken(make_lm()), tokens, 100, 2, seed=0, separator=3).loss(0)
    assert whole.item() != cut.item()


def test_half_precision(make_lm: Make, tokens: np.ndarray) -> None:
    half = TokenObjective(NextToken(make_lm()), tokens, 20, 4, seed=0, dtype=torch.bfloat16)
    full = TokenObjective(NextToken(make_lm()), tokens, 20, 4, seed=0)
    assert half.loss(0).item() == pytest.approx(full.loss(0).item(), abs=0.02)


def test_a_file_of_one_stretch(make_lm: Make, tokens: np.ndarray) -> None:
    stretch = torch.from_numpy(tokens[:21].astype(np.int64)).unsqueeze(0)
    objective = TokenObjective(NextToken(make_lm()), tokens[:21], 20, 2, seed=0)
    expected = make_lm()(stretch, labels=stretch).loss.item()
    assert objective.loss(3).item() == pytest.approx(expected, rel=1e-5)


def test_a_token_file_is_known_by_what_it_holds(tokens: np.ndarray) -> None:
    changed = tokens.copy()
    changed[7] += 1
    known = [fingerprint_tokens(other) for other in (tokens, changed, tokens[:-1], tokens[::-1])]
    assert len(set(known)) == 4
    assert fingerprint_tokens(tokens.astype(np.uint32)) == known[0]
    many = np.arange(10**6)
    assert fingerprint_tokens(many) != fingerprint_tokens(many + 1)


def test_what_is_no_token_file(make_lm: Make, tokens: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no token file"):
        read_tokens(tmp_path / "nothing.npy", 50)
    with pytest.raises(TaskError, match="vocabulary has 10"):
        read_tokens(tmp_path / "tokens.npy", 10)
    np.save(tmp_path / "floats.npy", np.zeros(5))
    with pytest.raises(TaskError, match="not token ids"):
        read_tokens(tmp_path / "floats.npy", 50)
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "many.npz", a=np.zeros(3, dtype=int))
    np.save(tmp_path / "one.npy", np.array(3))
    np.save(tmp_path / "negative.npy", np.array([3, -1]))
    for name in ("empty.npy", "many.npz", "one.npy", "negative.npy"):
        with pytest.raises(TaskError, match=name):
            read_tokens(tmp_path / name, 50)
    with pytest.raises(TaskError, match="one row of at least 501"):
        TokenObjective(NextToken(make_lm()), tokens, 500, 4, seed=0)
    with pytest.raises(TaskError, match="parts of 3"):
        TokenObjective(NextToken(make_lm()), tokens, 20, 4, seed=0, micro=3)
