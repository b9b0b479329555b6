"""From losses to an optimizer step on the gradient of all ranks. `zero.py` has the one that keeps a part of the state on each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.optim import load_moments, moments
from mtptrain.ranks import Ranks

Compute = Callable[[], tuple[Tensor, Any]]
"""A loss and whatever else the same forward gave."""


class Stepper:
    """Data parallel: every rank has all weights, gradients and moments; gradients are summed before the step.

    A head is one layer with some fifteen tensors, unrolled over several calls, so the sum is made of whole gradients after the last
    backward rather than by hooks (DDP) during it.
    """

    is_partitioned = False
    """Whether a rank lacks a part of the weights."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.AdamW, ranks: Ranks, clip: float) -> None:
        self._module, self._optimizer, self._ranks, self._clip = module, optimizer, ranks, clip

    def turns(self, batches: int) -> list[int | None]:
        """This rank's batches of an update, one a turn; None where it only keeps step with the others."""
        return list(self._ranks.share(range(batches)))

    def begin(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def forward(self, compute: Compute) -> tuple[Tensor, Any]:
        """`compute()` with the weights at hand."""
        return compute()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Add up the gradient. `is_last`: of this update."""
        loss.backward()

    def step(self) -> float:
        """The optimizer's step on the clipped sum of all gradients; returns the norm before. Not finite: the weights are as they were."""
        if self._ranks.world > 1:
            parameters = list(self._module.parameters())
            for parameter in parameters:
                if parameter.grad is None:  # a rank that had no batch
                    parameter.grad = torch.zeros_like(parameter)
            self._ranks.sum_([p.grad for p in parameters if p.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), self._clip or float("inf"))
        if bool(norm.isfinite()):
            self._optimizer.step()
        else:
            self._optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def discard(self, loss: Tensor | None) -> None:
        """Forget the gradients; `loss` is one whose backward did not come yet."""
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """All tensors of the module, by name. Called by every rank."""
        return {name: tensor.detach() for name, tensor in self._module.state_dict().items()}

    def moments(self) -> dict[str, Tensor]:
        """All of the optimizer's state, by parameter name. Called by every rank."""
        return moments(self._optimizer, self._module)

    def load_moments(self, tensors: dict[str, Tensor]) -> None:
        load_moments(self._optimizer, self._module, tensors)
