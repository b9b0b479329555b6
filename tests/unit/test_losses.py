"""Chunked distillation against plain float64 torch with autograd."""

import pytest
import torch

from mtptrain.heads.lm_head import LmHead
from mtptrain.losses import distillation_kl, hidden_match, step_weights

S, T, H, V = 23, 9, 8, 40


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(S, H, generator=generator),
        torch.rand(S, generator=generator),
        torch.randint(T, (S,), generator=generator),
        torch.randn(T, H, generator=generator),
        torch.randn(V, H, generator=generator),
    )


def plain_logits(state: torch.Tensor, weight: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    raw = state @ weight.T * scale
    return raw if softcap is None else softcap * torch.tanh(raw / softcap)


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 3.0), (0.5, 2.0)])
def test_kl_and_its_gradient_equal_the_unchunked_float64_result(chunk: int, scale: float, softcap: float | None) -> None:
    state, weight, teacher, finals, lm_head = inputs()
    state.requires_grad_()
    loss, rows = distillation_kl(state, weight, teacher, finals, LmHead(lm_head, scale, softcap), chunk)
    (3 * loss).backward()
    exact = state.detach().double().requires_grad_()
    log_p = plain_logits(finals.double(), lm_head.double(), scale, softcap).log_softmax(-1)[teacher]
    log_q = plain_logits(exact, lm_head.double(), scale, softcap).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = (kl * weight.double()).sum()
    (3 * expected).backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert state.grad is not None
    torch.testing.assert_close(state.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows.kl_S.double(), kl.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows.overlap_S.double(), torch.minimum(log_p.exp(), log_q.exp()).sum(-1).detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(rows.match_S, (log_p.argmax(-1) == log_q.argmax(-1)).float())


def test_kl_is_zero_with_zero_gradient_for_the_teachers_own_state() -> None:
    _, weight, teacher, finals, lm_head = inputs()
    state = finals[teacher].clone().requires_grad_()
    loss, rows = distillation_kl(state, weight, teacher, finals, LmHead(lm_head), 4)
    loss.backward()
    assert float(loss) == pytest.approx(0.0, abs=1e-5)
    assert state.grad is not None
    assert float(state.grad.abs().max()) < 1e-6
    assert float(rows.match_S.min()) == 1.0


def test_hidden_match_equals_its_definition() -> None:
    state, weight, teacher, finals, _ = inputs()
    difference = (state.double() - finals.double()[teacher]).abs()
    smooth = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean(-1)
    assert float(hidden_match(state, weight, teacher, finals)) == pytest.approx(float((smooth * weight).sum()), rel=1e-5)


def test_step_weights() -> None:
    assert step_weights(3, 0.5, []) == [1.0, 0.5, 0.25]
    assert step_weights(2, 0.5, [0.7, 0.3]) == [0.7, 0.3]


def test_fault_17_logits_never_hold_more_rows_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    state, weight, teacher, finals, lm_head = inputs()
    held: list[int] = []
    plain = LmHead.logits

    def logits(self: LmHead, rows: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        held.append(len(rows))
        return plain(self, rows, room)

    monkeypatch.setattr(LmHead, "logits", logits)
    distillation_kl(state.requires_grad_(), weight, teacher, finals, LmHead(lm_head), 5)[0].backward()
    assert max(held) == 5
    assert len(held) == 2 * 5  # draft and teacher of five chunks; a state that several rows share is projected once
    assert sum(held) < 2 * S


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_made_in_a_given_room_are_the_same(softcap: float | None) -> None:
    state, weight = torch.randn(7, 12), torch.randn(2500, 12)  # three blocks of rows, the last one shorter
    lm_head, room = LmHead(weight, scale=0.5, softcap=softcap), torch.full((9, 2500), float("nan"))
    torch.testing.assert_close(lm_head.logits(state, room[:7]), lm_head.logits(state), rtol=1e-5, atol=1e-6)
    assert room[7:].isnan().all()


def test_autocast_does_not_round_the_sums_over_the_vocabulary() -> None:
    torch.manual_seed(0)
    state, finals, weight = (torch.randn(n, 16).bfloat16() for n in (6, 6, 3000))
    teacher = torch.tensor([0, 3, 5, 1, 0, 2])
    lm_head = LmHead(weight)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = distillation_kl(state, torch.ones(6), teacher, finals, lm_head, 4)
    log_p, log_q = (lm_head.logits(x).double().log_softmax(-1) for x in (finals[teacher], state))
    torch.testing.assert_close(found.kl_S.double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-5, atol=1e-5)
