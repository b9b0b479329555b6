"""Speculative rejection sampling: tokens drafted from q become tokens distributed as the target's p.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1) and Chen et al. 2023 (arXiv 2302.01318, algorithm 2). A drafted x_i ~ q_i is
accepted with probability min(1, p_i(x_i) / q_i(x_i)); at the first rejection the token is drawn from norm(max(p_i - q_i, 0)), and after
K acceptances a bonus token from p_K. One step accepts with probability sum_x min(p(x), q(x)) and emits p whatever q is:

    q(x) min(1, p(x)/q(x)) + (1 - sum_y min(p(y), q(y))) norm(max(p - q, 0))(x) = min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x)

since 1 - sum_y min(p(y), q(y)) = sum_y max(p(y) - q(y), 0). A greedy draft is the case of q a point mass on the argmax: x is accepted
with probability p(x), and the residual is p without x, renormalised. Temperature 0 is the case of p a point mass as well: a draft is
accepted while it equals the target's argmax, without chance.

Legend: B independent drafts, K drafted tokens, J = K + 1 target distributions, V vocabulary. Probabilities are float64.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Verdict:
    """The tokens a draft emits: its first `accepted_B` drafted ones, then `token_B`."""

    accepted_B: Tensor
    """int64, 0 to K."""
    token_B: Tensor
    """int64: the replacement of the first rejected token, or the bonus token."""


def verify(draft_BK: Tensor, q_BKV: Tensor, p_BJV: Tensor, rng: random.Random) -> Verdict:
    """Accept or reject drafted tokens from the left.

    `q_BKV[:, i]`: the distribution drafted token i was drawn from; `p_BJV[:, i]`: the target's at the same place, after the same tokens;
    the last one follows the whole draft. Takes K + 1 numbers a row from `rng`, row after row, however many are accepted.
    """
    uniform_BJ = _uniform(draft_BK.shape[0], draft_BK.shape[1] + 1, rng, p_BJV.device)
    accept_BK = uniform_BJ[:, :-1] < acceptance(draft_BK, q_BKV, p_BJV[:, :-1])
    accepted_B = accept_BK.long().cumprod(-1).sum(-1)
    row_B = torch.arange(len(draft_BK), device=draft_BK.device)
    q_BJV = torch.cat((q_BKV, torch.zeros_like(p_BJV[:, :1])), 1)  # nothing is drafted for the bonus token: its residual is p itself
    residual_BV = residual(q_BJV[row_B, accepted_B], p_BJV[row_B, accepted_B])
    return Verdict(accepted_B, _inverse_cdf(residual_BV, uniform_BJ[:, -1]))


def acceptance(draft_BK: Tensor, q_BKV: Tensor, p_BKV: Tensor) -> Tensor:
    """[B, K]: min(1, p(x) / q(x)) of each drafted token; 0 where p(x) = 0. A drawn token has q(x) > 0."""
    q_BK = q_BKV.gather(-1, draft_BK[..., None]).squeeze(-1)
    p_BK = p_BKV.gather(-1, draft_BK[..., None]).squeeze(-1)
    assert bool((q_BK > 0).all()), "a drafted token has probability 0 in the distribution it was drawn from"
    return (p_BK / q_BK).clamp(max=1.0)


def residual(q_BV: Tensor, p_BV: Tensor) -> Tensor:
    """[B, V]: norm(max(p - q, 0)), what a rejected token is replaced from.

    Where p exceeds q nowhere, they are equal up to rounding and a rejection has a probability of that order: p itself.
    """
    excess_BV = (p_BV - q_BV).clamp(min=0.0)
    mass_B1 = excess_BV.sum(-1, keepdim=True)
    return torch.where(mass_B1 > 0, excess_BV / mass_B1, p_BV)


def point_mass(token_B: Tensor, vocab_size: int) -> Tensor:
    """[B, V]: the distribution of a choice without chance."""
    return torch.nn.functional.one_hot(token_B, vocab_size).double()


def draw(p_BV: Tensor, rng: random.Random) -> Tensor:
    """int64 [B]: one token a row; takes one number a row from `rng`. A token of probability 0 is never drawn."""
    return _inverse_cdf(p_BV, _uniform(len(p_BV), 1, rng, p_BV.device)[:, 0])


def _uniform(rows: int, columns: int, rng: random.Random, device: torch.device) -> Tensor:
    """float64 in [0, 1)."""
    numbers = [rng.random() for _ in range(rows * columns)]
    return torch.tensor(numbers, dtype=torch.float64, device=device).view(rows, columns)


def _inverse_cdf(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulated probability reaches 1 - u, in (0, 1], of the whole mass."""
    mass_BV = p_BV.cumsum(-1)
    return torch.searchsorted(mass_BV, (1.0 - uniform_B)[:, None] * mass_BV[:, -1:]).squeeze(-1)
