"""Distillation losses over supervised rows only, in chunks, so that memory never grows with tokens x vocabulary.

Legend: S student rows (all unrolled steps together), U distinct teacher rows, H hidden, V vocabulary (or its subset), C chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.heads.lm_head import LmHead


@dataclass(slots=True)
class RowStatistics:
    """What the rows of a batch looked like, float32 [S]; no gradient."""

    kl_S: Tensor
    overlap_S: Tensor
    """sum_v min(p, q) over the vocabulary of the loss: over all of it the chance that a sampled draft is accepted at temperature 1."""
    match_S: Tensor
    """1 where draft and teacher have the same argmax (within the vocabulary of the loss)."""


class _ChunkedKl(torch.autograd.Function):
    """sum_s weight_s KL(teacher_s || student_s); its gradients are made in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        state_SH: Tensor,
        projection_VH: Tensor | None,
        weight_S: Tensor,
        teacher_S: Tensor,
        teacher_TH: Tensor,
        lm_head: LmHead,
        chunk_rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        student = lm_head if projection_VH is None else LmHead(projection_VH.to(lm_head.weight_VH.dtype))
        order_S = torch.argsort(teacher_S, stable=True)
        grad_SH = torch.zeros(state_SH.shape, dtype=torch.float32, device=state_SH.device)
        grad_VH = None if projection_VH is None else torch.zeros_like(projection_VH, dtype=torch.float32)
        kl_S, overlap_S, match_S = (torch.zeros(len(teacher_S), device=state_SH.device) for _ in range(3))
        for rows in order_S.split(chunk_rows):
            index_U, back_C = torch.unique(teacher_S[rows], return_inverse=True)
            log_p_UV = lm_head.logits(teacher_TH[index_U]).log_softmax(-1)
            p_UV, choice_U = log_p_UV.exp(), log_p_UV.argmax(-1)
            negentropy_U = log_p_UV.mul_(p_UV).sum(-1)
            logits_CV = student.logits(state_SH[rows])
            match_S[rows] = (logits_CV.argmax(-1) == choice_U[back_C]).float()
            log_q_CV, p_CV = logits_CV.log_softmax(-1), p_UV[back_C]
            kl_S[rows] = negentropy_U[back_C] - (p_CV * log_q_CV).sum(-1)
            q_CV = log_q_CV.exp_()
            overlap_S[rows] = torch.minimum(p_CV, q_CV).sum(-1)
            raw_CV = student.raw_gradient(q_CV.sub_(p_CV), logits_CV)
            grad_SH[rows] = student.state_gradient(raw_CV) * weight_S[rows, None]
            if grad_VH is not None:
                grad_VH += raw_CV.T @ (state_SH[rows].float() * weight_S[rows, None])
        ctx.save_for_backward(grad_SH, *([] if grad_VH is None else [grad_VH]))
        ctx.dtypes = state_SH.dtype, None if projection_VH is None else projection_VH.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(kl_S, overlap_S, match_S)
        return (kl_S * weight_S).sum(), kl_S, overlap_S, match_S

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = [(g * grads[0]).to(dtype) for g, dtype in zip(saved, ctx.dtypes, strict=False)]  # type: ignore[attr-defined]
        return scaled[0], scaled[1] if len(scaled) > 1 else None, None, None, None, None, None


def distillation_kl(
    state_SH: Tensor,
    weight_S: Tensor,
    teacher_S: Tensor,
    teacher_TH: Tensor,
    lm_head: LmHead,
    chunk_rows: int,
    projection_VH: Tensor | None = None,
) -> tuple[Tensor, RowStatistics]:
    """sum_s weight_s * KL(softmax(lm_head(teacher_TH[teacher_S])) || softmax(lm_head(state_S))), in float32.

    With `projection_VH` (rows as `lm_head` has them, trained) the student's logits are state @ projection.T instead. A teacher row that
    several steps share is projected once a chunk. Returns the scalar and the rows' statistics.
    """
    loss, kl_S, overlap_S, match_S = _ChunkedKl.apply(state_SH, projection_VH, weight_S, teacher_S, teacher_TH, lm_head, chunk_rows)
    return loss, RowStatistics(kl_S, overlap_S, match_S)


def hidden_match(state_SH: Tensor, weight_S: Tensor, teacher_S: Tensor, teacher_TH: Tensor) -> Tensor:
    """sum_s weight_s * mean over H of smooth-L1(state_s, teacher state), in float32 (beta 1, as EAGLE has it)."""
    distance_SH = nn.functional.smooth_l1_loss(state_SH.float(), teacher_TH[teacher_S].float(), reduction="none")
    return (distance_SH.mean(-1) * weight_S).sum()


def step_weights(steps: int, decay: float, given: list[float]) -> list[float]:
    """w_k: the given ones, else decay ** k."""
    return list(given) if given else [decay**k for k in range(steps)]
