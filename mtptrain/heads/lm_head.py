"""Output projections: the target's frozen one, rows of it, or a head's own.

Legend: R rows, H hidden, V rows of the projection (the whole vocabulary or a part of it).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.target.spec import TargetSpec

_CPU_BLOCK = 1024
"""Rows of the projection at once: BLAS multiplies a few hundred states by these 1.7 times as fast as by 49,152 rows in one call."""


@dataclass(slots=True)
class LmHead:
    """A projection with everything that makes logits of it."""

    weight_VH: Tensor
    scale: float = 1.0
    softcap: float | None = None
    ids_V: Tensor | None = None
    """Token id of each row, int64 ascending; None: row i is token i."""

    def logits(self, state_RH: Tensor, room_RV: Tensor | None = None) -> Tensor:
        """float32 [R, V] = softcap(scale * state @ weight.T); the product is in the weight's dtype, and in `room_RV` if that has it too."""
        state_RH = state_RH.to(self.weight_VH.dtype)
        if room_RV is None or room_RV.dtype != self.weight_VH.dtype:
            raw_RV = (state_RH @ self.weight_VH.T).float()
        else:
            block = _CPU_BLOCK if room_RV.device.type == "cpu" else len(self.weight_VH)
            for weight_BH, room_RB in zip(self.weight_VH.split(block), room_RV.split(block, dim=1), strict=True):
                torch.mm(state_RH, weight_BH.T, out=room_RB)
            raw_RV = room_RV
        if self.scale != 1.0:
            raw_RV = raw_RV * self.scale
        return raw_RV if self.softcap is None else self.softcap * (raw_RV / self.softcap).tanh()

    def slope(self, logits_RV: Tensor) -> Tensor | float:
        """The derivative of `logits` with respect to state @ weight.T: one number, or [R, V] with a softcap."""
        return self.scale if self.softcap is None else self.scale * (1.0 - (logits_RV / self.softcap).square())

    def state_gradient(self, raw_RV: Tensor) -> Tensor:
        """Gradient with respect to the state, float32 [R, H], given that of state @ weight.T."""
        return (raw_RV.to(self.weight_VH.dtype) @ self.weight_VH).float()

    def tokens(self, row_R: Tensor) -> Tensor:
        """Token ids of rows of the projection."""
        return row_R if self.ids_V is None else self.ids_V[row_R]


def lm_head_of(spec: TargetSpec, lm_head_VH: Tensor, ids_V: Tensor | None = None) -> LmHead:
    """The target's whole projection, or its rows `ids_V` (a copy)."""
    weight = lm_head_VH if ids_V is None else lm_head_VH[ids_V]
    return LmHead(weight.contiguous(), spec.logit_scale, spec.logit_softcap, ids_V)
