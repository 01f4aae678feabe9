"""Optimizers by name: AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

"muon" is `torch.optim.Muon` for whole matrices on a GPU. Ours takes the others: matrices in shards, which torch's would
not put together, and those on a CPU, where torch's iteration in bf16 takes many times as long as one in fp32. Both do
the same and keep their moments under the same name, so a checkpoint of one resumes in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from ttmem.errors import BudgetError
from ttmem.training.parallel import placed_like, whole

BETAS = (0.9, 0.98)
MOMENTUM = 0.95
ROUNDS = 5
"""Newton-Schulz iterations: enough for singular values between about 0.7 and 1.2."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic a x + b x^3 + c x^5 of Muon (Jordan et al., 2024), steepest at 0 among those that stay bounded."""
ADAM_SIZE = 0.2
"""Root mean square of a typical AdamW update, in units of the learning rate."""
CHANNELWISE = ("conv", "kernel", "scale", "offset")
"""Names of parameters with a row per tap or stream and a column per channel: their rows are no directions to
orthogonalize, and decay would pull a convolution away from the copy that it starts as."""


def orthogonalize(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, roughly: [B, m, n] -> [B, m, n], singular values near 1.

    In the dtype of the input.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(Optimizer):
    """Momentum whose update of each matrix is orthogonalized, so that all its directions move at the same speed.

    Updates have the root mean square of AdamW's, so one learning rate and weight decay serve both. dtype: in which they
    are orthogonalized; by default bf16 on a GPU, as `torch.optim.Muon` does it, and the parameter's own on a CPU.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameters in _by_shape(p for p in group["params"] if p.grad is not None):
                # Sharded matrices are gathered, since what is orthogonal is the whole; each process does all of them.
                momenta = torch.stack([whole(self._momentum(p)) for p in parameters])
                updates = orthogonalize(momenta.to(self._dtype_for(momenta)))
                scale = group["lr"] * ADAM_SIZE * max(updates.shape[1:]) ** 0.5
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(
                        placed_like(update.to(parameter.dtype), parameter), alpha=-scale
                    )

    def _dtype_for(self, momenta: Tensor) -> torch.dtype:
        return self.dtype or (torch.bfloat16 if momenta.is_cuda else momenta.dtype)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """Nesterov's: the running mean of the gradients, taken one step further."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp(state["momentum_buffer"], MOMENTUM)


def _by_shape(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Matrices of one shape are orthogonalized together."""
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.shape, []).append(parameter)
    return list(groups.values())


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter maps hidden states to hidden states: a matrix, and no table of tokens or of channels."""
    table = any(part in name for part in ("embed", "lm_head")) or name.rsplit(".", 1)[-1].startswith(CHANNELWISE)
    return parameter.ndim == 2 and not table


def _adamw(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> list[Optimizer]:
    hidden = [p for name, p in parameters.items() if is_hidden_matrix(name, p)]
    rest = [p for name, p in parameters.items() if not is_hidden_matrix(name, p)]
    groups = [{"params": hidden, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [AdamW([group for group in groups if group["params"]], lr=lr, betas=BETAS)]


def _muon(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> list[Optimizer]:
    hidden = [p for name, p in parameters.items() if is_hidden_matrix(name, p)]
    rest = {name: p for name, p in parameters.items() if not is_hidden_matrix(name, p)}
    torchs = [p for p in hidden if p.is_cuda and not isinstance(p, DTensor)]
    ours = [p for p in hidden if not p.is_cuda or isinstance(p, DTensor)]
    muon: list[Optimizer] = [torch_muon(torchs, lr, weight_decay)] if torchs else []
    muon += [Muon(ours, lr, weight_decay)] if ours else []
    return muon + (_adamw(rest, lr, 0.0) if rest else [])


def torch_muon(parameters: list[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    """`torch.optim.Muon` with the settings of `Muon`: Nesterov's momentum, updates of AdamW's size."""
    return torch.optim.Muon(
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        momentum=MOMENTUM,
        nesterov=True,
        ns_coefficients=COEFFICIENTS,
        ns_steps=ROUNDS,
        adjust_lr_fn="match_rms_adamw",
    )


OPTIMIZERS: dict[str, Callable[[Mapping[str, nn.Parameter], float, float], list[Optimizer]]] = {
    "adamw": _adamw,
    "muon": _muon,
}


def make_optimizers(
    name: str, parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float
) -> list[Optimizer]:
    """The optimizers that together update `parameters` (by name). Only hidden matrices decay.

    Raises BudgetError for an unknown name.
    """
    if name not in OPTIMIZERS:
        raise BudgetError(f"the optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters, lr, weight_decay)


def moment_bytes(name: str, parameters: Mapping[str, nn.Parameter]) -> int:
    """Bytes that the optimizer keeps beside `parameters`, found by one step on tensors without storage."""
    copies = {key: nn.Parameter(torch.empty_like(p, device="meta")) for key, p in parameters.items()}
    for copy in copies.values():
        copy.grad = torch.empty_like(copy)
    total = 0
    for optimizer in make_optimizers(name, copies, 1e-3, 0.0):
        optimizer.step()
        total += sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    return total
