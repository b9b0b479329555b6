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
_CHOICE_ROWS = 2048
"""States whose logits of a block exist at once where only the largest is wanted."""
_WORTH_A_COPY = 0.9
"""The share of states still open below which they are copied together."""
_ROUNDING = 0.02
"""More than a logit can differ between two ways to multiply in bf16, as a share of 1 + its size; only how early a state is given up."""


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
    def choices(self, state_RH: Tensor, wanted_R: Tensor | None = None) -> Tensor:
        """The token id of each state's largest logit (of equal ones the first), int64 [R]; no logits are kept beyond a block's turn.

        With `wanted_R`, token ids, -1 for a state whose choice is another one: most of them are given up after a part of the projection.
        """
        states = state_RH.split(_CHOICE_ROWS)
        wanted = [None] * len(states) if wanted_R is None else wanted_R.split(_CHOICE_ROWS)
        row_R = torch.cat([self._largest(s, None if w is None else self._limit(s, w)) for s, w in zip(states, wanted, strict=True)])
        id_R = row_R if self.ids_V is None else self.ids_V[row_R]
        return id_R if wanted_R is None else torch.where(id_R == wanted_R, id_R, -1)

    def _largest(self, state_CH: Tensor, limit_C: Tensor | None = None) -> Tensor:
        """The row of each state's largest logit, int64 [C]; any where a logit above `limit_C` was seen."""
        best_C = torch.full((len(state_CH),), float("-inf"), device=state_CH.device)
        row_C = torch.zeros(len(state_CH), dtype=torch.int64, device=state_CH.device)
        open_A, state_AH = torch.arange(len(state_CH), device=state_CH.device), state_CH
        for block in self.blocks():
            out_AB = torch.empty(len(open_A), block.stop - block.start, device=state_CH.device)
            value_A, index_A = self.block_logits(state_AH, block, out_AB).max(-1)
            row_C[open_A] = torch.where(value_A > best_C[open_A], index_A + block.start, row_C[open_A])
            best_C[open_A] = torch.maximum(best_C[open_A], value_A)
            if limit_C is not None:
                going_on_A = best_C[open_A] <= limit_C[open_A]
                if int(going_on_A.sum()) < _WORTH_A_COPY * len(open_A):
                    open_A, state_AH = open_A[going_on_A], state_AH[going_on_A]
        return row_C

    def _limit(self, state_CH: Tensor, wanted_C: Tensor) -> Tensor:
        """The logit [C] of each wanted token and what rounding may add to it; -inf for a token that has no row."""
        row_C = wanted_C if self.ids_V is None else torch.searchsorted(self.ids_V, wanted_C).clamp_(max=len(self.ids_V) - 1)
        logit_C = (state_CH.to(self.weight_VH.dtype).float() * self.weight_VH[row_C].float()).sum(-1) * self.scale
        if self.softcap is not None:
            logit_C = self.softcap * torch.tanh(logit_C / self.softcap)
        limit_C = logit_C + _ROUNDING * (1 + logit_C.abs())
        return limit_C if self.ids_V is None else limit_C.masked_fill_(self.ids_V[row_C] != wanted_C, float("-inf"))

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
