"""Distillation losses over supervised rows only, in chunks, so that memory never grows with tokens x vocabulary.

Legend: S student rows (all unrolled steps together), U distinct teacher rows, H hidden, V vocabulary (or its subset), C chunk,
N blocks of the vocabulary, B ids of a block.
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
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        passes = _COMPILED if compiled else _Passes(state_SH.device)
        student = lm_head if projection_VH is None else LmHead(projection_VH.to(lm_head.weight_VH.dtype))
        order_S = torch.argsort(teacher_S, stable=True)
        grad_SH = torch.zeros(state_SH.shape, dtype=torch.float32, device=state_SH.device)
        grad_VH = None if projection_VH is None else torch.zeros_like(projection_VH, dtype=torch.float32)
        kl_S, overlap_S, match_S = (torch.zeros(len(teacher_S), device=state_SH.device) for _ in range(3))
        chunks = [(rows, *torch.unique(teacher_S[rows], return_inverse=True)) for rows in order_S.split(chunk_rows)]
        most_U, most_C = (max((len(chunk[i]) for chunk in chunks), default=0) for i in (1, 0))
        # room for a chunk's matrices, used again by the next: a CPU's kernel takes eight times as long to hand it out as it takes to fill
        teacher_room = torch.empty(most_U * len(lm_head.weight_VH), device=state_SH.device)
        student_room = torch.empty(most_C * len(student.weight_VH), device=state_SH.device)
        with torch.autocast(state_SH.device.type, enabled=False):  # which would round the sums over the vocabulary
            for rows, index_U, back_C in chunks:
                teacher = _teacher(teacher_TH[index_U], lm_head, teacher_room, passes)
                chunk = _Chunk(state_SH[rows], weight_S[rows], back_C)
                kl_S[rows], overlap_S[rows], match_S[rows], grad_SH[rows] = _student(chunk, student, teacher, student_room, grad_VH, passes)
        ctx.save_for_backward(grad_SH, *([] if grad_VH is None else [grad_VH]))
        ctx.dtypes = state_SH.dtype, None if projection_VH is None else projection_VH.dtype  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(kl_S, overlap_S, match_S)
        return (kl_S * weight_S).sum(), kl_S, overlap_S, match_S

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = [(g * grads[0]).to(dtype) for g, dtype in zip(saved, ctx.dtypes, strict=False)]  # type: ignore[attr-defined]
        return scaled[0], scaled[1] if len(scaled) > 1 else None, None, None, None, None, None, None


@dataclass(slots=True)
class _Teacher:
    p_UB: list[Tensor]
    """Its probabilities, block by block."""
    negentropy_U: Tensor
    """sum_v p log p."""
    choice_U: Tensor


@dataclass(slots=True)
class _Chunk:
    state_CH: Tensor
    weight_C: Tensor
    back_C: Tensor
    """The teacher row of each student row."""


class _Softmax:
    """softmax of logits that come in blocks: each is turned into exp(logits - its largest) while it is in the cache (`_Passes`).

    A block is contiguous in `room`, of which R x V elements are used. Probabilities are the exponentials times `factors` (one a row and
    block), known once all blocks have come.
    """

    def __init__(self, rows: int, head: LmHead, room: Tensor) -> None:
        self.blocks = head.blocks()
        self.room = room
        self.exponential_RB = [room[rows * b.start : rows * b.stop].view(rows, b.stop - b.start) for b in self.blocks]
        self.peak_RN, self.total_RN = (room.new_empty(rows, len(self.blocks)) for _ in range(2))

    def normaliser(self) -> Tensor:
        """log sum_v exp(logit_v), [R]."""
        return torch.logsumexp(self.peak_RN + self.total_RN.log(), -1)

    def factors(self) -> Tensor:
        """What makes a block's exponentials probabilities, [R, N]."""
        return torch.exp(self.peak_RN - self.normaliser()[:, None])

    def choice(self) -> Tensor:
        """The first id with the largest logit, int64 [R]."""
        best_R, device = self.peak_RN.argmax(-1), self.room.device
        rows = len(best_R)
        start_R = torch.tensor([b.start for b in self.blocks], device=device)[best_R]
        width_R = torch.tensor([b.stop - b.start for b in self.blocks], device=device)[best_R]
        inside_RB = torch.arange(self.blocks[0].stop, device=device).expand(rows, -1).minimum(width_R[:, None] - 1)
        first_R = start_R * rows + torch.arange(rows, device=device) * width_R
        return start_R + self.room[first_R[:, None] + inside_RB].argmax(-1)


class _Passes:
    """What is done with a block's logits while they are in the cache, in torch's own operations. Rooms are kept from block to block."""

    def __init__(self, device: torch.device) -> None:
        self._rooms = [torch.empty(0, device=device), torch.empty(0, device=device)]

    def _like(self, block_RB: Tensor, number: int) -> Tensor:
        if self._rooms[number].numel() < block_RB.numel():
            self._rooms[number] = block_RB.new_empty(block_RB.numel())
        return self._rooms[number][: block_RB.numel()].view_as(block_RB)

    def teacher(self, block_UB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits become exp(logits - peak), peak the largest of each row; returns peak, the sum, and the sum of logit times it, [U]."""
        logits_UB = self._like(block_UB, 0).copy_(block_UB)
        peak_U1 = torch.amax(block_UB, -1, keepdim=True)
        total_U = block_UB.sub_(peak_U1).exp_().sum(-1)
        return peak_U1[:, 0], total_U, logits_UB.mul_(block_UB).sum(-1)

    def student(self, block_CB: Tensor, p_UB: Tensor, back_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the student's, with the sum of teacher's probability times logit."""
        p_CB = torch.index_select(p_UB, 0, back_C, out=self._like(block_CB, 0))
        dot_C = p_CB.mul_(block_CB).sum(-1)
        peak_C1 = torch.amax(block_CB, -1, keepdim=True)
        return peak_C1[:, 0], block_CB.sub_(peak_C1).exp_().sum(-1), dot_C

    def difference(self, block_CB: Tensor, factor_C: Tensor, p_UB: Tensor, back_C: Tensor) -> Tensor:
        """Exponentials become q - p, q = exponentials * factor; returns sum min(q, p), [C]."""
        q_CB = block_CB.mul_(factor_C[:, None])
        p_CB = torch.index_select(p_UB, 0, back_C, out=self._like(block_CB, 0))
        overlap_C = torch.minimum(q_CB, p_CB, out=self._like(block_CB, 1)).sum(-1)
        q_CB.sub_(p_CB)
        return overlap_C


class _CompiledPasses(_Passes):
    """The same, each compiled into as few passes as it takes (torch.compile: C++ on a CPU, Triton on a GPU), at its first use."""

    def __init__(self) -> None:
        self.teacher = torch.compile(_teacher_pass, dynamic=True)  # type: ignore[method-assign]
        self.student = torch.compile(_student_pass, dynamic=True)  # type: ignore[method-assign]
        self.difference = torch.compile(_difference_pass, dynamic=True)  # type: ignore[method-assign]


def _teacher_pass(block_UB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    peak_U1 = block_UB.amax(-1, keepdim=True)
    exponential_UB = (block_UB - peak_U1).exp()
    dot_U = (exponential_UB * block_UB).sum(-1)
    block_UB.copy_(exponential_UB)
    return peak_U1[:, 0], exponential_UB.sum(-1), dot_U


def _student_pass(block_CB: Tensor, p_UB: Tensor, back_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dot_C = (p_UB[back_C] * block_CB).sum(-1)
    peak_C1 = block_CB.amax(-1, keepdim=True)
    exponential_CB = (block_CB - peak_C1).exp()
    block_CB.copy_(exponential_CB)
    return peak_C1[:, 0], exponential_CB.sum(-1), dot_C


def _difference_pass(block_CB: Tensor, factor_C: Tensor, p_UB: Tensor, back_C: Tensor) -> Tensor:
    q_CB, p_CB = block_CB * factor_C[:, None], p_UB[back_C]
    block_CB.copy_(q_CB - p_CB)
    return torch.minimum(q_CB, p_CB).sum(-1)


_COMPILED = _CompiledPasses()
"""One for the process: each is compiled once."""


def _teacher(state_UH: Tensor, lm_head: LmHead, room: Tensor, passes: _Passes) -> _Teacher:
    """Its probabilities, in `room`."""
    softmax = _Softmax(len(state_UH), lm_head, room)
    dot_UN = torch.empty_like(softmax.peak_RN)
    for n, block_UB in enumerate(softmax.exponential_RB):
        lm_head.block_logits(state_UH, softmax.blocks[n], block_UB)
        softmax.peak_RN[:, n], softmax.total_RN[:, n], dot_UN[:, n] = passes.teacher(block_UB)
    choice_U, factor_UN = softmax.choice(), softmax.factors()
    for n, block_UB in enumerate(softmax.exponential_RB):
        block_UB.mul_(factor_UN[:, n, None])
    return _Teacher(softmax.exponential_RB, (dot_UN * factor_UN).sum(-1) - softmax.normaliser(), choice_U)


def _student(
    chunk: _Chunk, student: LmHead, teacher: _Teacher, room: Tensor, grad_VH: Tensor | None, passes: _Passes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KL, overlap and match [C], and the gradient of weight * KL with respect to the state [C, H]; a projection's is added to `grad_VH`."""
    softmax = _Softmax(len(chunk.state_CH), student, room)
    dot_C, overlap_C = (torch.zeros(len(chunk.state_CH), device=room.device) for _ in range(2))
    slopes = []
    for n, block_CB in enumerate(softmax.exponential_RB):
        logits_CB = student.block_logits(chunk.state_CH, softmax.blocks[n], block_CB)
        slopes.append(student.slope(logits_CB))
        softmax.peak_RN[:, n], softmax.total_RN[:, n], of_block_C = passes.student(block_CB, teacher.p_UB[n], chunk.back_C)
        dot_C += of_block_C
    match_C = (softmax.choice() == teacher.choice_U[chunk.back_C]).float()
    factor_CN = softmax.factors()
    grad_CH = torch.zeros(chunk.state_CH.shape, device=room.device)
    weighted_CH = chunk.state_CH.float() * chunk.weight_C[:, None]
    for n, raw_CB in enumerate(softmax.exponential_RB):
        overlap_C += passes.difference(raw_CB, factor_CN[:, n], teacher.p_UB[n], chunk.back_C)
        slope_CB = slopes[n]
        if not isinstance(slope_CB, float) or slope_CB != 1.0:
            raw_CB.mul_(slope_CB)
        student.add_state_gradient(raw_CB, softmax.blocks[n], grad_CH)
        if grad_VH is not None:
            grad_BH = grad_VH[softmax.blocks[n]]
            torch.addmm(grad_BH, raw_CB.T, weighted_CH, out=grad_BH)
    kl_C = teacher.negentropy_U[chunk.back_C] - dot_C + softmax.normaliser()
    return kl_C, overlap_C, match_C, grad_CH * chunk.weight_C[:, None]


def distillation_kl(
    state_SH: Tensor,
    weight_S: Tensor,
    teacher_S: Tensor,
    teacher_TH: Tensor,
    lm_head: LmHead,
    chunk_rows: int,
    projection_VH: Tensor | None = None,
    compiled: bool = False,
) -> tuple[Tensor, RowStatistics]:
    """sum_s weight_s * KL(softmax(lm_head(teacher_TH[teacher_S])) || softmax(lm_head(state_S))), in float32.

    With `projection_VH` (rows as `lm_head` has them, trained) the student's logits are state @ projection.T instead. A teacher row that
    several steps share is projected once a chunk. `compiled`: with torch.compile's passes over logits. Returns the scalar and the rows'
    statistics.
    """
    found = _ChunkedKl.apply(state_SH, projection_VH, weight_S, teacher_S, teacher_TH, lm_head, chunk_rows, compiled)
    loss, kl_S, overlap_S, match_S = found
    return loss, RowStatistics(kl_S, overlap_S, match_S)


def hidden_match(state_SH: Tensor, weight_S: Tensor, teacher_S: Tensor, teacher_TH: Tensor) -> Tensor:
    """sum_s weight_s * mean over H of smooth-L1(state_s, teacher state), in float32 (beta 1, as EAGLE has it)."""
    distance_SH = nn.functional.smooth_l1_loss(state_SH.float(), teacher_TH[teacher_S].float(), reduction="none")
    return (distance_SH.mean(-1) * weight_S).sum()


def step_weights(steps: int, decay: float, given: list[float]) -> list[float]:
    """w_k: the given ones, else decay ** k."""
    return list(given) if given else [decay**k for k in range(steps)]
