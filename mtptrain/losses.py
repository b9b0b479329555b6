"""Distillation losses over supervised rows only, in chunks, so that memory never grows with tokens x vocabulary.

Legend: S student rows (all unrolled steps together), U distinct teacher rows, H hidden, V vocabulary (or its subset), C chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.target.spec import TargetSpec


@dataclass(slots=True)
class LmHead:
    """The target's frozen output projection with everything that makes logits of it."""

    weight_VH: Tensor
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, state_RH: Tensor) -> Tensor:
        """float32 [R, V] = softcap(scale * state @ weight.T); the product is in the weight's dtype."""
        raw_RV = (state_RH.to(self.weight_VH.dtype) @ self.weight_VH.T).float()
        if self.scale != 1.0:
            raw_RV = raw_RV * self.scale
        return raw_RV if self.softcap is None else self.softcap * torch.tanh(raw_RV / self.softcap)

    def backward(self, grad_RV: Tensor, logits_RV: Tensor) -> Tensor:
        """Gradient with respect to the state, float32 [R, H], given that of the logits."""
        if self.softcap is not None:
            grad_RV = grad_RV * (1.0 - (logits_RV / self.softcap).square())
        if self.scale != 1.0:
            grad_RV = grad_RV * self.scale
        return (grad_RV.to(self.weight_VH.dtype) @ self.weight_VH).float()


def lm_head_of(spec: TargetSpec, lm_head_VH: Tensor, ids_V: Tensor | None = None) -> LmHead:
    """The whole projection, or its rows `ids_V` (a copy)."""
    weight = lm_head_VH if ids_V is None else lm_head_VH[ids_V]
    return LmHead(weight.contiguous(), spec.logit_scale, spec.logit_softcap)


@dataclass(slots=True)
class RowStatistics:
    """What the rows of a batch looked like, float32 [S]; no gradient."""

    kl_S: Tensor
    overlap_S: Tensor
    """sum_v min(p, q): the chance that a sampled draft is accepted at temperature 1."""
    match_S: Tensor
    """1 where draft and teacher have the same argmax (within the vocabulary of the loss)."""


class _ChunkedKl(torch.autograd.Function):
    """sum_s weight_s KL(teacher_s || student_s); its gradient is made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        state_SH: Tensor,
        weight_S: Tensor,
        teacher_S: Tensor,
        teacher_TH: Tensor,
        lm_head: LmHead,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order_S = torch.argsort(teacher_S, stable=True)
        grad_SH = torch.zeros(state_SH.shape, dtype=torch.float32, device=state_SH.device)
        kl_S, overlap_S, match_S = (torch.zeros(len(teacher_S), device=state_SH.device) for _ in range(3))
        for rows in order_S.split(chunk_rows):
            index_U, back_C = torch.unique(teacher_S[rows], return_inverse=True)
            log_p_CV = lm_head.logits(teacher_TH[index_U]).log_softmax(-1)[back_C]
            logits_CV = lm_head.logits(state_SH[rows])
            match_S[rows] = (logits_CV.argmax(-1) == log_p_CV.argmax(-1)).float()
            log_q_CV = logits_CV.log_softmax(-1)
            p_CV, q_CV = log_p_CV.exp(), log_q_CV.exp()
            kl_S[rows] = (p_CV * (log_p_CV - log_q_CV)).sum(-1)
            overlap_S[rows] = torch.minimum(p_CV, q_CV).sum(-1)
            grad_SH[rows] = lm_head.backward(q_CV.sub_(p_CV).mul_(weight_S[rows, None]), logits_CV)
        ctx.save_for_backward(grad_SH)
        ctx.dtype = state_SH.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(kl_S, overlap_S, match_S)
        return (kl_S * weight_S).sum(), kl_S, overlap_S, match_S

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_SH,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grad_SH * grads[0]).to(ctx.dtype), None, None, None, None, None  # type: ignore[attr-defined]


def distillation_kl(
    state_SH: Tensor, weight_S: Tensor, teacher_S: Tensor, teacher_TH: Tensor, lm_head: LmHead, chunk_rows: int
) -> tuple[Tensor, RowStatistics]:
    """sum_s weight_s * KL(softmax(lm_head(teacher_TH[teacher_S])) || softmax(lm_head(state_S))), in float32.

    A teacher row that several steps share is projected once a chunk. Returns the scalar and the rows' statistics.
    """
    loss, kl_S, overlap_S, match_S = _ChunkedKl.apply(state_SH, weight_S, teacher_S, teacher_TH, lm_head, chunk_rows)
    return loss, RowStatistics(kl_S, overlap_S, match_S)


def hidden_match(state_SH: Tensor, weight_S: Tensor, teacher_S: Tensor, teacher_TH: Tensor) -> Tensor:
    """sum_s weight_s * mean over H of smooth-L1(state_s, teacher state), in float32 (beta 1, as EAGLE has it)."""
    distance_SH = nn.functional.smooth_l1_loss(state_SH.float(), teacher_TH[teacher_S].float(), reduction="none")
    return (distance_SH.mean(-1) * weight_S).sum()


def step_weights(steps: int, decay: float, given: list[float]) -> list[float]:
    """w_k: the given ones, else decay ** k."""
    return list(given) if given else [decay**k for k in range(steps)]
