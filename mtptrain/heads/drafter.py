"""A head with what it borrows of the target: embeddings, and the output projection where it has none of its own.

Legend: R rows, H hidden, V vocabulary of the target, D of the draft.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead, lm_head_of
from mtptrain.target.ends import TargetEnds


@dataclass(slots=True)
class Drafter:
    head: DraftHead
    embed_VH: Tensor
    embed_scale: float
    lm_head: LmHead

    def embed(self, token_R: Tensor) -> Tensor:
        """What the head reads of a token, [R, H]."""
        embed_RH = self.embed_VH[token_R]
        return embed_RH * self.embed_scale if self.embed_scale != 1.0 else embed_RH

    def choices(self, state_RH: Tensor, wanted_R: Tensor | None = None) -> Tensor:
        """The greedily drafted token of each state, int64 [R]; with `wanted_R` -1 where it is another one (cheaper)."""
        return self.lm_head.choices(state_RH, wanted_R)

    def whole_logits(self, state_RH: Tensor) -> Tensor:
        """float32 [R, V]: -inf where the draft vocabulary has no row."""
        logits_RD = self.lm_head.logits(state_RH)
        if self.lm_head.ids_V is None:
            return logits_RD
        whole_RV = logits_RD.new_full((len(state_RH), len(self.embed_VH)), float("-inf"))
        whole_RV[:, self.lm_head.ids_V] = logits_RD
        return whole_RV


def bind(head: DraftHead, ends: TargetEnds) -> Drafter:
    """The head on the target's frozen ends; its own projection is taken as it is now, in the dtype of theirs."""
    ids_D = head.draft_ids
    if head.lm_head is not None:
        lm_head = LmHead(head.lm_head.weight.detach().to(ends.lm_head_VH.dtype), ids_V=ids_D)
    else:
        lm_head = lm_head_of(ends.spec, ends.lm_head_VH, ids_D)
    return Drafter(head, ends.embed_VH, ends.spec.embed_scale, lm_head)


def as_served(head: DraftHead, dtype: torch.dtype) -> DraftHead:
    """A copy whose weights have the dtype of an engine. RoPE's frequencies stay float32, as engines have them."""
    served = copy.deepcopy(head)
    for parameter in served.parameters():
        parameter.data = parameter.data.to(dtype)
    return served
