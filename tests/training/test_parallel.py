"""Two real processes (gloo): DDP and FSDP2 train the model that one process trains, and checkpoints are whole."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from ttmem.errors import BudgetError
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.language import NextToken, TokenObjective
from ttmem.training.loop import TrainSettings, TrainState, train
from ttmem.training.parallel import World, parallelize, start_world, whole_state

PROCESSES = 2
RUN = {"seed": 0}


def tiny(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    # 15 and 5 do not divide by two: shards of different sizes
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=51,
            hidden_size=20,
            intermediate_size=15,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            **changes,
        )
    )


def trained(kind: str, optimizer: str, world: World, folder: Path, resume: bool = False) -> dict[str, torch.Tensor]:
    lm = tiny()
    module = parallelize(NextToken(lm), lm.get_decoder().layers, kind, world)
    tokens = np.random.default_rng(0).integers(1, 51, 400)
    objective = TokenObjective(module, tokens, 16, 4, seed=0, world=world)
    settings = TrainSettings(steps=4, optimizer=optimizer, lr=0.02, weight_decay=0.1, checkpoint_every=2)
    path = folder / f"{kind}-{optimizer}.safetensors"

    def keep(state: TrainState) -> None:
        if world.first:
            save_state(state, path, RUN)

    if kind == "fsdp":
        sharded = [parameter for parameter in lm.parameters() if isinstance(parameter, DTensor)]
        assert len(sharded) == len(list(lm.parameters()))
        assert sharded[0].device_mesh.size() == world.size
        assert any(p.to_local().numel() < p.numel() for p in sharded)
    if kind == "ddp":
        assert isinstance(module, DistributedDataParallel)
    earlier = load_state(folder / f"fsdp-{optimizer}.safetensors", RUN) if resume else None
    train(dict(lm.named_parameters()), objective, settings, state=earlier, checkpoint=None if resume else keep)
    return whole_state(lm)


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    environment = {"RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_RANK": rank, "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for name, value in environment.items():
            patch.setenv(name, str(value))
        with start_world() as world:
            assert (world.rank, world.size, world.first) == (rank, PROCESSES, rank == 0)
            assert dist.get_world_size() == PROCESSES
            with pytest.raises(BudgetError, match="2 processes"):
                parallelize(tiny(), [], "none", world)
            for kind in ("ddp", "fsdp"):
                for optimizer in ("adamw", "muon"):
                    weights = trained(kind, optimizer, world, Path(folder))
                    torch.save(weights, Path(folder) / f"{kind}-{optimizer}-{rank}.pt")
            tied = tiny(tie_word_embeddings=True)
            parallelize(NextToken(tied), tied.get_decoder().layers, "fsdp", world)
            state = whole_state(tied)
            assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
            weights = trained("fsdp", "muon", world, Path(folder), resume=True)
            torch.save(weights, Path(folder) / f"resumed-{rank}.pt")
        assert not dist.is_initialized()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parallel")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, port, str(path))) for rank in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    return path


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # AdamW divides by the gradient's size, so rounding weighs most where that is almost nothing
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(kind: str, optimizer: str, folder: Path, tmp_path: Path) -> None:
    alone = trained("none", optimizer, World(0, 1, torch.device("cpu")), tmp_path)
    for rank in range(PROCESSES):
        same(torch.load(folder / f"{kind}-{optimizer}-{rank}.pt", weights_only=True), alone)


def test_a_checkpoint_resumes_on_any_number_of_processes(folder: Path) -> None:
    uninterrupted = torch.load(folder / "fsdp-muon-0.pt", weights_only=True)
    same(torch.load(folder / "resumed-0.pt", weights_only=True), uninterrupted)
    same(trained("none", "muon", World(0, 1, torch.device("cpu")), folder, resume=True), uninterrupted)


def test_without_torchrun_there_is_one_process() -> None:
    with start_world() as world:
        assert (world.rank, world.size) == (0, 1)
        network = tiny()
        assert parallelize(network, [], "none", world) is network
        with pytest.raises(BudgetError, match="torchrun"):
            parallelize(network, [], "fsdp", world)
        with pytest.raises(BudgetError, match="zero"):
            parallelize(network, [], "zero", world)
