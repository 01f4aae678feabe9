"""Training on several processes: torchrun's environment, PyTorch's DDP and FSDP2, and tensors whole or in shards.

    torchrun --nproc-per-node 2 train.py        every process runs the same script; `start_world` finds its rank

"ddp" keeps a copy of the model per process and averages gradients; "fsdp" (fully_shard) keeps a shard of every
parameter, gradient and moment per process and gathers a layer's parameters while it computes. The loop and the
optimizers see parameters by name in either case; a checkpoint holds whole tensors, so it can be resumed on any number
of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ttmem.errors import BudgetError

KINDS = ("none", "ddp", "fsdp")


@dataclass(frozen=True)
class World:
    """This process among all: rank from 0, size, and the device it computes on."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0


@contextmanager
def start_world(device: str = "cpu") -> Iterator[World]:
    """The world that torchrun started this process in, or one of a single process; closed at the end.

    device: "cpu" (gloo) or "cuda" (NCCL, one GPU per process, by LOCAL_RANK).
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield World(0, 1, torch.device(device))
        return
    own = torch.device(device)
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), own)
    finally:
        dist.destroy_process_group()


def parallelize(
    network: nn.Module, layers: Iterable[nn.Module], kind: str, world: World, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """What to call in place of `network`, whose own parameters stay those to train.

    fsdp shards each of `layers` for itself and the rest together, and computes in `dtype` with gradients reduced in
    fp32. With "ddp" and "none", use autocast for `dtype`.

    Raises BudgetError for an unknown kind, and for more processes than "none" can use.
    """
    if kind not in KINDS:
        raise BudgetError(f"the parallelism {kind!r} is not one of {', '.join(KINDS)}")
    if kind == "none":
        if world.size > 1:
            raise BudgetError(
                f"{world.size} processes with parallelism none would train as many models: use ddp or fsdp"
            )
        return network
    if not dist.is_initialized():
        raise BudgetError(f"parallelism {kind} needs processes: start the script with torchrun")
    if kind == "ddp":
        return DistributedDataParallel(network)
    mesh = init_device_mesh(world.device.type, (world.size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return network


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on every process; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor where `other` is, and sharded as it is; as it is where their shapes differ."""
    if tensor.shape != other.shape:
        return tensor
    if isinstance(other, DTensor):
        return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements)
    return tensor.to(other.device)


def whole_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict, whole, for `save_pretrained(folder, state_dict=...)`. All processes have to call this.

    Tied parameters stay one tensor, so that they are written once.
    """
    found: dict[int, Tensor] = {}
    state = network.state_dict(keep_vars=True)
    for tensor in state.values():
        if id(tensor) not in found:
            found[id(tensor)] = whole(tensor.detach())
    return {name: found[id(tensor)] for name, tensor in state.items()}
