"""Output projections: the target's frozen one, rows of it, or a head's own.

Legend: R rows, H hidden, V rows of the projection (the whole vocabulary or a part of it), B a block of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.target.spec import TargetSpec

_CPU_BLOCK, _GPU_BLOCK = 512, 16384
"""Rows of the projection at once. On a CPU BLAS multiplies 4 to 500 states by these up to 1.7 times as fast as by 49,152 rows in one call,
and what is done with the logits next finds them in the cache; on a GPU they bound what is held of them beside the logits."""
_CHOICE_ROWS = 512
"""States whose logits of a block exist at once where only the largest is wanted."""


@dataclass(slots=True)
class LmHead:
    """A projection with everything that makes logits of it."""

    weight_VH: Tensor
    scale: float = 1.0
    softcap: float | None = None
    ids_V: Tensor | None = None
    """Token id of each row, int64 ascending; None: row i is token i."""

    def blocks(self) -> list[slice]:
        """Ranges of rows to multiply at once."""
        rows = len(self.weight_VH)
        size = _CPU_BLOCK if self.weight_VH.device.type == "cpu" else _GPU_BLOCK
        return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]

    def block_logits(self, state_RH: Tensor, block: slice, out_RB: Tensor) -> Tensor:
        """softcap(scale * state @ weight.T) of the rows `block`, written to float32 `out_RB`; the product is in the weight's dtype."""
        weight_BH = self.weight_VH[block]
        if weight_BH.dtype == torch.float32:
            torch.mm(state_RH.float(), weight_BH.T, out=out_RB)
        else:
            out_RB.copy_(state_RH.to(weight_BH.dtype) @ weight_BH.T)
        if self.scale != 1.0:
            out_RB.mul_(self.scale)
        return out_RB if self.softcap is None else out_RB.div_(self.softcap).tanh_().mul_(self.softcap)

    @torch.no_grad()
    def logits(self, state_RH: Tensor) -> Tensor:
        """float32 [R, V], without gradient."""
        logits_RV = torch.empty(len(state_RH), len(self.weight_VH), device=state_RH.device)
        for block in self.blocks():
            self.block_logits(state_RH, block, logits_RV[:, block])
        return logits_RV

    @torch.no_grad()
    def choices(self, state_RH: Tensor) -> Tensor:
        """The token id of each state's largest logit (of equal ones the first), int64 [R]; no logits are kept beyond a block's turn."""
        best_R = torch.full((len(state_RH),), float("-inf"), device=state_RH.device)
        row_R = torch.zeros(len(state_RH), dtype=torch.int64, device=state_RH.device)
        for state_CH, best_C, row_C in zip(*(x.split(_CHOICE_ROWS) for x in (state_RH, best_R, row_R)), strict=True):  # views
            for block in self.blocks():
                out_CB = torch.empty(len(state_CH), block.stop - block.start, device=state_CH.device)
                value_C, index_C = self.block_logits(state_CH, block, out_CB).max(-1)
                row_C.copy_(torch.where(value_C > best_C, index_C + block.start, row_C))
                best_C.copy_(torch.maximum(best_C, value_C))
        return row_R if self.ids_V is None else self.ids_V[row_R]

    def slope(self, logits_RB: Tensor) -> Tensor | float:
        """The derivative of logits with respect to state @ weight.T: one number, or [R, B] with a softcap."""
        return self.scale if self.softcap is None else self.scale * (1.0 - (logits_RB / self.softcap).square())

    def add_state_gradient(self, raw_RB: Tensor, block: slice, out_RH: Tensor) -> None:
        """Add to float32 `out_RH` the gradient with respect to the state, given that of state @ weight.T in the rows `block`."""
        weight_BH = self.weight_VH[block]
        if weight_BH.dtype == torch.float32:
            torch.addmm(out_RH, raw_RB, weight_BH, out=out_RH)
        else:
            out_RH += raw_RB.to(weight_BH.dtype) @ weight_BH


def lm_head_of(spec: TargetSpec, lm_head_VH: Tensor, ids_V: Tensor | None = None) -> LmHead:
    """The target's whole projection, or its rows `ids_V` (a copy)."""
    weight = lm_head_VH if ids_V is None else lm_head_VH[ids_V]
    return LmHead(weight.contiguous(), spec.logit_scale, spec.logit_softcap, ids_V)
