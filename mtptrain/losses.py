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
        chunks = [(rows, *torch.unique(teacher_S[rows], return_inverse=True)) for rows in order_S.split(chunk_rows)]
        most_U, most_C = (max((len(chunk[i]) for chunk in chunks), default=0) for i in (1, 0))
        # room for a chunk's matrices, used again by the next: a CPU's kernel takes eight times as long to hand it out as it takes to fill
        teacher_room_2UV = torch.empty(2, most_U, len(lm_head.weight_VH), device=state_SH.device)
        student_room_2CV = torch.empty(2, most_C, len(student.weight_VH), device=state_SH.device)
        for rows, index_U, back_C in chunks:
            with torch.autocast(state_SH.device.type, enabled=False):  # which would round the sums over the vocabulary
                kl_S[rows], overlap_S[rows], match_S[rows], raw_CV = _chunk(
                    state_SH[rows], student, student_room_2CV, teacher_TH[index_U], lm_head, teacher_room_2UV, back_C
                )
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


def _chunk(
    state_CH: Tensor,
    student: LmHead,
    student_room_2CV: Tensor,
    teacher_UH: Tensor,
    lm_head: LmHead,
    teacher_room_2UV: Tensor,
    back_C: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL, overlap and match [C], and the KL's gradient with respect to state @ weight.T [C, V], which lies in the student's room."""
    one_UV, other_UV = teacher_room_2UV[:, : len(teacher_UH)]
    log_p_UV = torch.log_softmax(lm_head.logits(teacher_UH, one_UV), -1, out=other_UV)
    p_UV, choice_U = torch.exp(log_p_UV, out=one_UV), log_p_UV.argmax(-1)
    negentropy_U = torch.einsum("uv,uv->u", p_UV, log_p_UV)
    one_CV, other_CV = student_room_2CV[:, : len(state_CH)]
    logits_CV = student.logits(state_CH, one_CV)
    match_C = (logits_CV.argmax(-1) == choice_U[back_C]).float()
    slope_CV, log_q_CV = student.slope(logits_CV), torch.log_softmax(logits_CV, -1, out=other_CV)
    p_CV = torch.index_select(p_UV, 0, back_C, out=one_CV)  # the logits are not needed any more
    kl_C = negentropy_U[back_C] - torch.einsum("cv,cv->c", p_CV, log_q_CV)
    raw_CV = log_q_CV.exp_().sub_(p_CV)
    overlap_C = 1.0 - 0.5 * torch.linalg.vector_norm(raw_CV, ord=1, dim=-1)
    if not isinstance(slope_CV, float) or slope_CV != 1.0:
        raw_CV.mul_(slope_CV)
    return kl_C, overlap_C, match_C, raw_CV


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
