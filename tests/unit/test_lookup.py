"""First weights of an eagle3 head: it looks up what followed a token before, and its outputs are least-squares solutions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.config import HeadKind, OutputProjection
from mtptrain.errors import UserError
from mtptrain.heads import lookup
from mtptrain.heads.alignment import align, pack_alignments
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.lookup import init_lookup
from mtptrain.heads.unroll import Unroll, true_token_steps
from tests.unit.heads import small_head, small_spec

VOCAB, HIDDEN, HALF = 41, 128, 20
SPEC = small_spec(
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=VOCAB,
    rope={"rope_type": "default", "rope_theta": 1e6},
)
NORM = torch.linspace(0.5, 2.0, HIDDEN)
EMBED = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))


def repeating(documents: int, seed: int = 0) -> Batch:
    """Documents of distinct tokens that come a second time in the same order.

    The target knows the next token: its final state is that token's row of lm_head. Its first stream shows the token itself, so that
    nothing but what followed the first time tells the token after the next.
    """
    random = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(VOCAB, generator=random)[:HALF] for _ in range(documents)]
    tokens = torch.cat([torch.cat((order, order)) for order in orders])
    after = torch.cat([torch.cat((order[1:], order, order[:1])) for order in orders])
    noise = torch.randn(3, len(tokens), HIDDEN, generator=random)
    streams = {"after_1": EMBED[tokens] + 0.05 * noise[0], "after_3": noise[1], "after_4": LM_HEAD[after] + 0.05 * noise[2]}
    lengths = [2 * HALF] * documents
    rows = pack_alignments([align(n, [(0, n)], 2) for n in lengths], lengths)
    return Batch(list(range(documents)), tokens, streams | {"final": LM_HEAD[after] * NORM}, rows)


def drafter(**options: Any) -> Drafter:
    head = small_head(
        SPEC, kind=HeadKind.eagle3, lm_head=OutputProjection.target, aux_captures=["after_1", "after_3", "after_4"], **options
    )
    with torch.no_grad():
        for p in head.parameters():
            if p.dim() == 1:
                p.fill_(1.0)
    return Drafter(head, EMBED, 1.0, LmHead(LM_HEAD))


def drafted(bound: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """For each row of step 0, whether its token repeats, and whether the head drafts the right one."""
    with torch.no_grad():
        row_A, state_AH = next(true_token_steps(Unroll(bound, len(batch.documents)), batch.rows, batch.token_T, batch.states, 1))
    right_A = bound.choices(state_AH) == batch.token_T[batch.rows.label_RK[row_A, 0]]
    return batch.rows.position_R[row_A] + 1 >= HALF, right_A


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_before_residual": True}, {"num_kv_heads": 2}, {"norm_before_fc": True}])
def test_an_untrained_head_drafts_what_followed_its_token_before(options: dict[str, Any]) -> None:
    bound = drafter(**options)
    repeats_A, right_A = drafted(bound, repeating(4, seed=1))
    assert float(right_A.float().mean()) < 0.15  # at random
    assert init_lookup(bound, lambda: [repeating(40)], NORM, seed=0) == 40 * 2 * HALF
    repeats_A, right_A = drafted(bound, repeating(4, seed=1))
    assert float(right_A[repeats_A].float().mean()) > 0.9
    assert float(right_A[~repeats_A].float().mean()) < 0.15  # nothing to look up, and nothing else to know


def test_what_attention_adds_is_a_least_squares_solution() -> None:
    bound, batch = drafter(fc_norm=True), repeating(20)
    init_lookup(bound, lambda: [batch], NORM, seed=0)
    head = bound.head.double()
    read: list[Tensor] = []
    out: list[Tensor] = []
    weight_HX = head.layer.self_attn.o_proj.weight
    head.layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: read.append(given[0].detach()))
    head.norm.register_forward_pre_hook(lambda _, given: out.append(given[0]))
    states = {name: state.double() for name, state in batch.states.items()}
    wide = Drafter(head, EMBED.double(), 1.0, LmHead(LM_HEAD.double()))
    row_A, _ = next(true_token_steps(Unroll(wide, len(batch.documents)), batch.rows, batch.token_T, states, 1))
    next_AH = states["final"][batch.rows.teacher_RK[row_A, 0]] / NORM.double()
    penalty_X = 1e-3 * read[0].square().sum(0)
    objective = (out[0] - next_AH).square().sum() + (penalty_X * weight_HX.square()).sum()
    (slope_HX,) = torch.autograd.grad(objective, weight_HX)
    scale = 2 * (next_AH.T @ read[0]).abs().max()
    assert float(slope_HX.abs().max() / scale) < 1e-4  # zero but for float32 sums


def test_the_same_seed_gives_the_same_head() -> None:
    heads = []
    for seed in (0, 0, 1):
        bound = drafter()
        init_lookup(bound, lambda: [repeating(8)], NORM, seed)
        heads.append(bound.head.state_dict())
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert not torch.equal(heads[0]["layer.self_attn.v_proj.weight"], heads[2]["layer.self_attn.v_proj.weight"])


def test_a_target_without_slow_channels_still_gets_weights() -> None:
    spec = small_spec(num_layers=8)  # head size 4, theta 100: both pairs of channels turn fast
    head = small_head(spec, kind=HeadKind.eagle3, lm_head=OutputProjection.target)
    streams = {name: torch.randn(30, 16, generator=torch.Generator().manual_seed(i)) for i, name in enumerate((*head.captures, "final"))}
    embed = torch.randn(31, 16, generator=torch.Generator().manual_seed(9))
    batch = Batch([0], torch.arange(30), streams, pack_alignments([align(30, [(0, 30)], 1)], [30]))
    init_lookup(Drafter(head, embed, 1.0, LmHead(embed)), lambda: [batch], torch.ones(16), seed=0)
    assert all(bool(p.isfinite().all()) for p in head.parameters())


def test_text_of_one_token_alone_still_gives_weights() -> None:
    bound, batch = drafter(), repeating(2)
    batch.token_T.fill_(7)
    init_lookup(bound, lambda: [batch], NORM, seed=0)
    assert all(bool(p.isfinite().all()) for p in bound.head.parameters())


def test_it_reads_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_ROWS_PER_INPUT", 0.5)  # of 384 inputs: 192 rows, five documents of 40
    read: list[int] = []

    def batches() -> Iterator[Batch]:
        for i in range(9):
            read.append(i)
            yield repeating(1, seed=i)

    assert init_lookup(drafter(), batches, NORM, seed=0) == 5 * 2 * HALF
    assert max(read) == 4


def test_without_a_row_there_is_nothing_to_fit() -> None:
    with pytest.raises(UserError, match=r"head\.init=least_squares: no row to fit"):
        init_lookup(drafter(), lambda: [], NORM, seed=0)


def test_values_carry_what_says_most_about_the_state() -> None:
    random = torch.Generator().manual_seed(2)
    embed = torch.randn(4000, 12, generator=random) @ torch.randn(12, 12, generator=random)
    map_HY = torch.randn(12, 2, generator=random) @ torch.randn(2, 6, generator=random)
    pairs = lookup.Moments()
    pairs.add(embed + 3.0, embed @ map_HY + 1.0)
    carried = (embed - embed.mean(0)) @ lookup._telling(pairs, 2)
    state = embed @ map_HY
    fit = torch.linalg.lstsq(carried.double(), (state - state.mean(0)).double())
    left = (carried.double() @ fit.solution - (state - state.mean(0))).square().sum()
    assert float(left / state.square().sum()) < 1e-8  # two of twelve directions say all there is


def test_a_code_is_of_what_the_streams_tell_of_the_token() -> None:
    random = torch.Generator().manual_seed(3)
    embed = torch.randn(20000, 8, generator=random)
    told = embed[:, :3] + 0.1 * torch.randn(20000, 3, generator=random)  # correlation 0.995 in three directions, none in the others
    fit = torch.linalg.lstsq(told.double(), embed.double()).solution
    covariance = embed.double().T @ embed.double() / len(embed)
    explained = fit.T @ (told.double().T @ embed.double()) / len(embed)
    basis = lookup._readable(covariance, explained, 4)
    shares = basis[:3].square().sum() / basis.square().sum()
    assert float(shares) > 0.99
    assert torch.linalg.matrix_rank(basis[:3].double(), rtol=1e-2) == 3
