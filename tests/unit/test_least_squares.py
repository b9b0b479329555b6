"""First weights by least squares, against the normal equations solved by numpy in float64 from rows found by their definition."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.config import HeadKind, NormsConfig
from mtptrain.errors import UserError
from mtptrain.heads import least_squares
from mtptrain.heads.least_squares import init_least_squares
from mtptrain.heads.unroll import Unroll, rows_of
from tests.unit.heads import EPS, HIDDEN, bound, small_batch, small_embed, small_head, small_spec

LENGTHS, SPANS = [40, 30, 35, 25], [[(10, 40)], [(3, 12), (15, 30)], [(20, 35)], [(1, 25)]]
NORM = torch.linspace(0.5, 2.0, HIDDEN)


def pairs(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Embedding of p + 1, state at p, state at p + 1, of every row p that predicts a token of a span: p + 1 and p + 2 lie in it."""
    start, final, embed = 0, batch.final_TH.double(), small_embed().double()
    for length, spans in zip(LENGTHS, SPANS, strict=True):
        for first, end in spans:
            for p in range(start + first - 1, start + end - 2):
                yield embed[batch.token_T[p + 1]], final[p], final[p + 1]
        start += length


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt()


def solved(inputs: list[np.ndarray], outputs: list[np.ndarray]) -> np.ndarray:
    """Ridge regression as an ordinary least-squares problem with one more row an input."""
    u, y = np.stack(inputs), np.stack(outputs)
    penalty = np.sqrt(1e-3 * (u**2).mean() * len(u))
    rows = np.concatenate([u, penalty * np.eye(u.shape[1])])
    return np.linalg.lstsq(rows, np.concatenate([y, np.zeros((u.shape[1], y.shape[1]))]), rcond=None)[0].T


def test_an_mtp_head_is_the_best_linear_guess_of_the_next_state() -> None:
    head, batch = small_head(small_spec()), small_batch(LENGTHS, SPANS, 1)
    enorm, hnorm = head.enorm.weight.detach().double().clone(), head.hnorm.weight.detach().double().clone()
    rows = init_least_squares(bound(head), [batch], NORM)
    found = list(pairs(batch))
    assert rows == len(found) == 29 + 8 + 14 + 14 + 23
    expected = solved(
        [torch.cat((rms(e) * enorm, rms(h) * hnorm)).numpy() for e, h, _ in found], [(y / NORM.double()).numpy() for *_, y in found]
    )
    # float32 sums of about a hundred products, solved in float64
    np.testing.assert_allclose(head.eh_proj.weight.detach().numpy(), expected, atol=2e-5)
    assert torch.equal(head.norm.weight, NORM)


@pytest.mark.parametrize(
    "options", [{"kind": HeadKind.eagle}, {"norms": NormsConfig(embed=False, hidden=False, input=False, output=False)}]
)
def test_a_head_without_norms_guesses_the_state_itself(options: dict[str, Any]) -> None:
    head, batch = small_head(small_spec(), **options), small_batch(LENGTHS, SPANS, 1)
    init_least_squares(bound(head), [batch], NORM)
    expected = solved([torch.cat((e, h)).numpy() for e, h, _ in pairs(batch)], [y.numpy() for *_, y in pairs(batch)])
    np.testing.assert_allclose(head.fusion.weight.detach().numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("kind", [HeadKind.mtp, HeadKind.eagle])
def test_the_head_computes_its_linear_guess_and_can_be_trained(kind: HeadKind) -> None:
    head, batch = small_head(small_spec(), kind=kind), small_batch(LENGTHS, SPANS, 1)
    init_least_squares(bound(head), [batch], NORM)
    rows, valid = batch.rows, batch.rows.valid_RK[:, 0].nonzero().squeeze(-1)
    unroll = Unroll(bound(head), documents=len(LENGTHS))
    unroll.extend(batch.token_T[rows.input_RK[:, 0]], rows_of(batch.states, rows.row_R), rows.position_R, rows.document_R)
    state_RH = unroll.start(valid)
    linear_RH = head.fusion(head.fused(small_embed()[batch.token_T[rows.input_RK[valid, 0]]], batch.final_TH[rows.row_R[valid]]))
    expected = head.norm(linear_RH) if kind is HeadKind.mtp else linear_RH
    assert torch.equal(state_RH, expected)
    (state_RH - batch.final_TH[rows.teacher_RK[valid, 0]]).square().sum().backward()
    assert all(float(m.weight.grad.abs().max()) > 0 for m in (head.layer.self_attn.o_proj, head.layer.mlp.down_proj))


def test_a_channel_that_the_final_norm_drops_is_not_guessed() -> None:
    head, batch = small_head(small_spec()), small_batch(LENGTHS, SPANS, 1)
    init_least_squares(bound(head), [batch], NORM * (torch.arange(HIDDEN) != 3))
    assert not head.eh_proj.weight[3].any()
    assert head.eh_proj.weight[2].any()


def test_rows_beyond_what_the_inputs_need_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "_ROWS_PER_INPUT", 2)
    batch, read = small_batch(LENGTHS, SPANS, 1), []

    def batches() -> Iterator[Batch]:
        for n in range(9):
            read.append(n)
            yield batch

    assert init_least_squares(bound(small_head(small_spec())), batches(), NORM) == 88
    assert read == [0]  # 2 * 2 * HIDDEN rows are enough


def test_without_rows_it_is_one_line() -> None:
    with pytest.raises(UserError, match="no row to fit"):
        init_least_squares(bound(small_head(small_spec())), [small_batch([8], [[]], 1)], NORM)
