"""Next-token prediction on token files: what language models are trained on, on one process or on many."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ttmem.errors import TaskError
from ttmem.training.loop import Stateless
from ttmem.training.parallel import World

CHUNK = 1024
"""Tokens whose logits exist at once: with a vocabulary of 50,000, 200 MB in fp32."""
SAMPLES = 2**16
"""Ids that a token file is known by, at least, where it has as many."""


class NextToken(nn.Module):
    """A language model as what is minimized: token ids in, mean cross-entropy out.

    All of the model's parameters are used inside this module's forward, so it can be handed to DDP and FSDP.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """ids [B, L + 1] int64; position_ids [B, L], restarting where a document starts. Returns nats per token."""
        places = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.network.get_decoder()(input_ids=ids[:, :-1], use_cache=False, **places).last_hidden_state
        hidden, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True):
            # Recomputed in the backward pass: the logits of all tokens would not fit.
            total = total + checkpoint(self._summed, part, wanted, use_reentrant=False)
        return total / targets.numel()

    def _summed(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self.network.get_output_embeddings()(hidden).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def positions_in_documents(ids: Tensor, separator: int) -> Tensor:
    """Positions [B, L] that start again behind every separator of ids [B, L]."""
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    before = torch.nn.functional.pad(ids[:, :-1] == separator, (1, 0))
    starts = torch.where(before, places, 0).cummax(dim=1).values
    return places - starts


@dataclass
class TokenObjective(Stateless):
    """Next-token prediction on random stretches of a token file: one array of ids, as numpy saves it (.npy).

    module: a `NextToken`, or DDP or FSDP around it. batch: stretches per step, of all processes together; process
    `world.rank` computes its share of them, so the gradient does not depend on the number of processes. micro:
    stretches at once in a process; the gradients of the others are summed up before. separator: the token between
    documents, if positions are to start again behind it. dtype: in which autocast runs the network.
    """

    module: nn.Module
    tokens: np.ndarray
    length: int
    batch: int
    seed: int
    micro: int = 1
    separator: int | None = None
    dtype: torch.dtype = torch.float32
    world: World = field(default_factory=lambda: World(0, 1, torch.device("cpu")))
    losses: list[float] = field(default_factory=list)
    """Of the steps done, of this process's stretches."""

    def __post_init__(self) -> None:
        if self.batch % self.world.size or (self.batch // self.world.size) % self.micro:
            raise TaskError(
                f"{self.batch} sequences per step do not divide into parts of {self.micro} on {self.world.size} "
                "processes."
            )
        if self.tokens.ndim != 1 or len(self.tokens) < self.length + 1:
            raise TaskError(
                f"the token file holds an array of shape {list(self.tokens.shape)}; it must be one row of at least "
                f"{self.length + 1} ids."
            )

    def loss(self, step: int) -> Tensor:
        """The mean over this process's stretches. Its gradient is the last part's; the others' is there already."""
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.tokens) - self.length, self.batch)
        parts = starts[self.world.rank :: self.world.size].reshape(-1, self.micro)
        total = 0.0
        for number, part in enumerate(parts, start=1):
            loss = self._part(part) / len(parts)
            total += loss.item()
            if number < len(parts):
                loss.backward()
        self.losses.append(total)
        return loss - loss.detach() + total

    def _part(self, starts: np.ndarray) -> Tensor:
        ids = torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))
        ids = ids.to(self.world.device)
        places = None if self.separator is None else positions_in_documents(ids[:, :-1], self.separator)
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return self.module(ids, places)


def fingerprint_tokens(tokens: np.ndarray) -> str:
    """SHA-256 over the number of ids and over evenly spaced ones: a file that was written anew has another one."""
    sample = tokens[:: max(1, len(tokens) // SAMPLES)].astype(np.int64)
    return hashlib.sha256(f"{len(tokens)} ".encode() + sample.tobytes()).hexdigest()


def read_tokens(path: Path, vocabulary: int) -> np.ndarray:
    """A token file, mapped into memory. Raises TaskError where it is none, or holds ids beyond the vocabulary."""
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise TaskError(f"{path} is no token file ({error}); write one with numpy.save, an array of ids.") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        what = f"{tokens.dtype} of shape {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise TaskError(f"{path} holds {what}, not token ids in one row.")
    for part in np.array_split(tokens, len(tokens) // 2**24 + 1):
        for extreme in (int(part.min()), int(part.max())) if len(part) else ():
            if not 0 <= extreme < vocabulary:
                raise TaskError(
                    f"{path} holds the id {extreme}, and the model's vocabulary has {vocabulary}: write it with the "
                    "model's own tokenizer, or, for a vocabulary of 256 bytes, with `tokenize_text.py --bytes`."
                )
    return tokens
