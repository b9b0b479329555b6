"""Rejection sampling alone: its distributions in closed form, and draws from it on random Markov chains.

Statistics: each chi-square test has level ALPHA; with other random numbers than the fixed seeds' at least one of the CASES tests of a
correct rule would fail with probability below CASES * ALPHA = 0.24 %.
"""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mtptrain.decoding import rejection
from mtptrain.decoding.rejection import acceptance, draw, point_mass, residual, verify
from tests.unit.distributions import chi_square

ALPHA = 1e-4
SEEDS, DRAFTS, LENGTHS = range(6), ("greedy", "sampled"), (1, 2)
CASES = len(SEEDS) * len(DRAFTS) * len(LENGTHS)
RUNS, VOCAB = 20_000, 5


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def pairs(draw_: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions on 2 to 8 tokens, zeros and tiny values among them, sometimes nearly equal."""
    size = draw_(st.integers(2, 8))
    weights = st.lists(st.floats(0, 1), min_size=size, max_size=size).filter(lambda w: sum(w) > 1e-3).map(tensor)
    p = draw_(weights)
    q = draw_(st.one_of(weights, st.floats(0, 1e-9).map(lambda e: p + e * torch.arange(size))))
    return p / p.sum(), q / q.sum()


def accept_all(q: Tensor, p: Tensor) -> Tensor:
    """[V]: the acceptance of each token that can be drafted, 0 elsewhere."""
    out = torch.zeros_like(p)
    x = q.nonzero().squeeze(-1)
    out[x] = acceptance(x[None], q.expand(1, len(x), -1), p.expand(1, len(x), -1))[0]
    return out


@given(pairs())
def test_a_step_accepts_with_the_overlap_and_emits_the_target(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    a = accept_all(q, p)
    assert float((q * a).sum()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-14)
    emitted = q * a + (1 - (q * a).sum()) * residual(q[None], p[None])[0]
    torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)


@given(pairs())
def test_a_greedy_draft_is_accepted_with_the_targets_probability(pair: tuple[Tensor, Tensor]) -> None:
    p, x = pair[0], int(pair[1].argmax())
    q = point_mass(torch.tensor([x]), len(p))
    assert float(acceptance(torch.tensor([[x]]), q[None], p[None, None])) == float(p[x])
    without = p.clone()
    without[x] = 0
    expected = without / without.sum() if without.sum() > 0 else p
    torch.testing.assert_close(residual(q, p[None])[0], expected, rtol=1e-15, atol=0)


def test_dyadic_probabilities_give_exact_values() -> None:
    p, q = tensor([0.25, 0.25, 0.5, 0.0]), tensor([0.5, 0.25, 0.125, 0.125])
    assert accept_all(q, p).tolist() == [0.5, 1.0, 1.0, 0.0]
    assert residual(q[None], p[None]).tolist() == [[0.0, 0.0, 1.0, 0.0]]
    assert residual(tensor([[0.0] * 4]), p[None]).tolist() == [p.tolist()]


def test_equal_distributions_accept_everything_and_leave_the_target_as_residual() -> None:
    p = tensor([0.1, 0.2, 0.7])
    assert accept_all(p, p).tolist() == [1.0, 1.0, 1.0]
    assert residual(p[None], p[None]).tolist() == [p.tolist()]
    q = p + tensor([0.0, 1e-17, 1e-16])  # no token has p > q
    assert residual(q[None], p[None]).tolist() == [p.tolist()]


def test_a_token_its_draft_cannot_draw_is_refused() -> None:
    with pytest.raises(AssertionError, match="probability 0"):
        acceptance(torch.tensor([[1]]), tensor([[[1.0, 0.0]]]), tensor([[[0.5, 0.5]]]))


class Fixed(random.Random):
    """The same number again and again."""

    def __init__(self, number: float) -> None:
        super().__init__(0)
        self.number = number

    def random(self) -> float:
        return self.number


@pytest.mark.parametrize(("number", "token"), [(0.0, 3), (1 - 2**-53, 1)])
def test_extreme_numbers_draw_tokens_that_have_mass(number: float, token: int) -> None:
    assert draw(tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]), Fixed(number)).tolist() == [token]


@pytest.mark.parametrize("number", [0.0, 0.3, 1 - 2**-53])
def test_point_masses_are_matched_without_chance(number: float) -> None:
    """Temperature 0: the accepted ones are those before the first difference, and the next token is the target's."""
    target = torch.tensor([[4, 2, 0, 1], [4, 2, 0, 1], [4, 2, 0, 1]])
    drafted = torch.tensor([[4, 2, 0], [4, 3, 0], [0, 2, 0]])
    verdict = verify(drafted, point_mass(drafted, VOCAB), point_mass(target, VOCAB), Fixed(number))
    assert (verdict.accepted_B.tolist(), verdict.token_B.tolist()) == ([3, 1, 0], [1, 2, 4])


def test_a_stream_gives_the_same_verdict_again_and_moves_on_by_k_plus_one_numbers_a_row() -> None:
    p_SV, q_SV = chain(0)
    draft_BK = torch.tensor([[int(q_SV[0].argmax())] * 2] * 3)
    q_BKV, p_BJV = q_SV[0].expand(3, 2, -1), p_SV[0].expand(3, 3, -1)
    first, second = random.Random(7), random.Random(7)
    a, b = verify(draft_BK, q_BKV, p_BJV, first), verify(draft_BK, q_BKV, p_BJV, second)
    assert torch.equal(a.accepted_B, b.accepted_B)
    assert torch.equal(a.token_B, b.token_B)
    counted = random.Random(7)
    for _ in range(3 * (2 + 1)):
        counted.random()
    assert first.random() == counted.random()


def chain(seed: int) -> tuple[Tensor, Tensor]:
    """p(next | state) and q(next | state) of a Markov target and draft [V, V], about a fifth of them zero."""
    generator = torch.Generator().manual_seed(seed)

    def table() -> Tensor:
        weight = torch.rand(VOCAB, VOCAB, generator=generator, dtype=torch.float64) + 1e-3
        dropped = torch.rand(VOCAB, VOCAB, generator=generator) < 0.2
        dropped[torch.arange(VOCAB), weight.argmax(-1)] = False
        weight[dropped] = 0
        return weight / weight.sum(-1, keepdim=True)

    return table(), table()


def emit(p_SV: Tensor, q_SV: Tensor, state_B: Tensor, k: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """First and second token emitted after `state_B` by one draft of `k`; the second is -1 where only one was."""
    drafted = [state_B]
    for _ in range(k):
        drafted.append(draw(q_SV[drafted[-1]], rng))
    seen_BJ = torch.stack(drafted, 1)
    verdict = verify(seen_BJ[:, 1:], q_SV[seen_BJ[:, :-1]], p_SV[seen_BJ], rng)
    emitted_BJ = torch.cat((seen_BJ[:, 1:], seen_BJ[:, :1]), 1)
    emitted_BJ[torch.arange(len(state_B)), verdict.accepted_B] = verdict.token_B
    return emitted_BJ[:, 0], torch.where(verdict.accepted_B > 0, emitted_BJ[:, 1], -1)


def chi_square_of_first_two(seed: int, draft: str, k: int) -> float:
    p_SV, q_SV = chain(seed)
    if draft == "greedy":
        q_SV = point_mass(q_SV.argmax(-1), VOCAB)
    rng = random.Random(seed)
    first_B, second_B = emit(p_SV, q_SV, torch.zeros(RUNS, dtype=torch.int64), k, rng)
    again_B, _ = emit(p_SV, q_SV, first_B, k, rng)
    second_B = torch.where(second_B < 0, again_B, second_B)
    counts = torch.bincount(first_B * VOCAB + second_B, minlength=VOCAB**2)
    return chi_square(counts, p_SV[0][:, None] * p_SV)


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_two_tokens_have_the_targets_joint_distribution(seed: int, draft: str, k: int) -> None:
    assert chi_square_of_first_two(seed, draft, k) > ALPHA


def accept_the_targets_argmax(draft_BK: Tensor, _q_BKV: Tensor, p_BKV: Tensor) -> Tensor:
    return (draft_BK == p_BKV.argmax(-1)).double()


def accept_everything(draft_BK: Tensor, _q_BKV: Tensor, _p_BKV: Tensor) -> Tensor:
    return torch.ones(draft_BK.shape, dtype=torch.float64)


def accept_with_p(draft_BK: Tensor, _q_BKV: Tensor, p_BKV: Tensor) -> Tensor:
    return p_BKV.gather(-1, draft_BK[..., None]).squeeze(-1)


def replace_from_p(_q_BV: Tensor, p_BV: Tensor) -> Tensor:
    return p_BV


WRONG = [
    ("acceptance", accept_the_targets_argmax, "greedy"),
    ("acceptance", accept_the_targets_argmax, "sampled"),
    ("acceptance", accept_everything, "greedy"),
    ("acceptance", accept_everything, "sampled"),
    ("acceptance", accept_with_p, "sampled"),  # right for a greedy draft
    ("residual", replace_from_p, "greedy"),
    ("residual", replace_from_p, "sampled"),
]


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize(("part", "rule", "draft"), WRONG)
def test_the_same_test_rejects_a_wrong_rule_on_every_chain(
    monkeypatch: pytest.MonkeyPatch, part: str, rule: object, draft: str, k: int
) -> None:
    monkeypatch.setattr(rejection, part, rule)
    assert max(chi_square_of_first_two(seed, draft, k) for seed in SEEDS) < ALPHA
