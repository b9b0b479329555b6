"""Expected acceptance of sampled decoding at temperature 1, from stored states: nothing is drawn.

By rejection sampling (rejection.py) a draft token is accepted with probability p(argmax q) where the draft is greedy, sum_x min(p(x), q(x))
where it is sampled; p = softmax(lm_head(teacher state)), q = softmax(lm_head(draft state)).

Legend: K draft steps, A valid rows of one step, S those of all steps, T tokens, U distinct teacher rows, C chunk, H hidden, V vocabulary,
D the draft's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, true_token_steps


@dataclass(slots=True)
class ExpectedAcceptance:
    """Sums over the valid rows of each draft step, float64 [K], on the CPU; add up batches, then take means."""

    rows_K: Tensor
    greedy_K: Tensor
    sampled_K: Tensor

    @classmethod
    def zeros(cls, k: int) -> "ExpectedAcceptance":
        return cls(*torch.zeros(3, k, dtype=torch.float64))

    def add(self, other: "ExpectedAcceptance") -> None:
        self.rows_K += other.rows_K
        self.greedy_K += other.greedy_K
        self.sampled_K += other.sampled_K

    @property
    def greedy_rates(self) -> list[float | None]:
        """Mean of p(argmax q) at each step; None where no row is valid."""
        return _means(self.greedy_K, self.rows_K)

    @property
    def sampled_rates(self) -> list[float | None]:
        """Mean of sum_x min(p(x), q(x)) at each step; None where no row is valid."""
        return _means(self.sampled_K, self.rows_K)


def _means(sum_K: Tensor, rows_K: Tensor) -> list[float | None]:
    return [s / n if n else None for s, n in zip(sum_K.tolist(), rows_K.tolist(), strict=True)]


def expected_length(rates: list[float | None]) -> float | None:
    """1 + sum_k prod_{j <= k} rate_j, as if steps were accepted independently; None where a rate is."""
    length, product = 1.0, 1.0
    for rate in rates:
        if rate is None:
            return None
        product *= rate
        length += product
    return length


@torch.no_grad()
def expected_by_step(drafter: Drafter, batch: Batch, target: LmHead, k: int, chunk_rows: int) -> ExpectedAcceptance:
    """Sums over the batch's valid rows at each of `k` steps, every step fed the true continuation. `target`: the target's projection.

    The batch is aligned for at least `k` steps. At most `chunk_rows` rows of p and q exist at once.
    """
    rows = batch.rows
    unroll = Unroll(drafter, documents=len(batch.documents))
    row_A, state_AH = zip(*true_token_steps(unroll, rows, batch.token_T, batch.states, k), strict=True)
    teacher_S = torch.cat([rows.teacher_RK[row, step] for step, row in enumerate(row_A)])
    sizes = [len(row) for row in row_A]
    greedy_S, sampled_S = acceptance_of_rows(torch.cat(state_AH), teacher_S, batch.final_TH, target, drafter.lm_head, chunk_rows)
    return ExpectedAcceptance(torch.tensor(sizes, dtype=torch.float64), _sums(greedy_S, sizes), _sums(sampled_S, sizes))


def acceptance_of_rows(
    state_SH: Tensor, teacher_S: Tensor, teacher_TH: Tensor, target: LmHead, draft: LmHead, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """float32 [S] each: p(argmax q) and sum_x min(p(x), q(x)), p of teacher_TH[teacher_S] and q of the draft states.

    p is over the whole vocabulary; where the draft's is a part of it, q is 0 outside.

    A teacher row that several steps share is projected once a chunk.
    """
    greedy_S, sampled_S = torch.zeros(2, len(teacher_S), device=state_SH.device)
    for rows in torch.argsort(teacher_S, stable=True).split(chunk_rows):
        index_U, back_C = torch.unique(teacher_S[rows], return_inverse=True)
        p_UV = target.logits(teacher_TH[index_U]).softmax(-1)
        p_CD = (p_UV if draft.ids_V is None else p_UV[:, draft.ids_V])[back_C]
        logits_CD = draft.logits(state_SH[rows])
        greedy_S[rows] = p_CD.gather(-1, logits_CD.argmax(-1, keepdim=True)).squeeze(-1)
        sampled_S[rows] = torch.minimum(p_CD, logits_CD.softmax(-1)).sum(-1)
    return greedy_S, sampled_S


def _sums(value_S: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack([part.double().sum() for part in value_S.split(sizes)]).cpu()
