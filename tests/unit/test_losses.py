"""Chunked distillation against plain float64 torch with autograd."""

import shutil

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
    plain = LmHead.block_logits

    def block_logits(self: LmHead, rows: torch.Tensor, block: slice, out: torch.Tensor) -> torch.Tensor:
        held.append(len(rows))
        return plain(self, rows, block, out)

    monkeypatch.setattr(LmHead, "block_logits", block_logits)
    distillation_kl(state.requires_grad_(), weight, teacher, finals, LmHead(lm_head), 5)[0].backward()
    assert max(held) == 5
    assert len(held) == 2 * 5  # draft and teacher of five chunks; a state that several rows share is projected once
    assert sum(held) < 2 * S


COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILER)], ids=["as it is", "compiled"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("own", [False, True], ids=["frozen projection", "own projection"])
def test_a_vocabulary_of_several_blocks(softcap: float | None, own: bool, compiled: bool) -> None:
    torch.manual_seed(1)
    state, finals = torch.randn(7, 12, requires_grad=True), torch.randn(5, 12)
    projection = torch.randn(2500, 12, requires_grad=True) if own else None
    weight, teacher = torch.rand(7), torch.tensor([0, 3, 3, 1, 4, 0, 3])
    lm_head = LmHead(torch.randn(2500, 12), scale=0.5, softcap=softcap)  # three blocks of rows, the last one shorter
    loss, rows = distillation_kl(state, weight, teacher, finals, lm_head, 3, projection, compiled)
    loss.backward()
    exact = state.detach().double().requires_grad_()
    exact_projection = None if projection is None else projection.detach().double().requires_grad_()
    log_p = plain_logits(finals.double(), lm_head.weight_VH.double(), 0.5, softcap).log_softmax(-1)[teacher]
    if exact_projection is None:
        log_q = plain_logits(exact, lm_head.weight_VH.double(), 0.5, softcap).log_softmax(-1)
    else:
        log_q = (exact @ exact_projection.T).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    (kl * weight.double()).sum().backward()
    torch.testing.assert_close(rows.kl_S.double(), kl.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rows.overlap_S.double(), torch.minimum(log_p.exp(), log_q.exp()).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(rows.match_S, (log_p.argmax(-1) == log_q.argmax(-1)).float())
    torch.testing.assert_close(state.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    if projection is not None and exact_projection is not None:
        torch.testing.assert_close(projection.grad.double(), exact_projection.grad, rtol=1e-4, atol=1e-6)


def test_equal_logits_in_several_blocks_count_as_the_first() -> None:
    weight = torch.zeros(2500, 2)
    weight[[700, 1500, 1501, 2400], 0] = 1.0  # the largest logits of a state (1, 0), all equal
    weight[900, 1] = 1.0
    finals = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    _, rows = distillation_kl(finals[[0, 1, 0]], torch.ones(3), torch.tensor([0, 1, 1]), finals, LmHead(weight), 8)
    assert rows.match_S.tolist() == [1.0, 1.0, 0.0]


def test_choices_are_the_first_largest_logits_of_the_whole() -> None:
    torch.manual_seed(2)
    state, weight = torch.randn(1100, 12), torch.randn(2500, 12)
    ids = torch.arange(2500) * 2
    weight[30] *= 3
    weight[2000], state[0] = weight[30], weight[30]  # equal logits in different blocks
    lm_head = LmHead(weight, ids_V=ids)
    assert torch.equal(lm_head.choices(state), ids[lm_head.logits(state).argmax(-1)])
    assert lm_head.choices(state)[0] == 60
    assert len(lm_head.choices(state[:0])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.3, 5.0)])
@pytest.mark.parametrize("part", [False, True], ids=["all ids", "every second id"])
def test_wanted_choices_are_the_choices_where_they_are_equal(dtype: torch.dtype, scale: float, softcap: float | None, part: bool) -> None:
    torch.manual_seed(3)
    state, weight = torch.randn(3000, 12), torch.randn(2500, 12).to(dtype)
    lm_head = LmHead(weight, scale, softcap, ids_V=torch.arange(2500) * 2 if part else None)
    choices = lm_head.choices(state)
    wanted = torch.where(torch.rand(3000) < 0.4, choices, torch.randint(5000 if part else 2500, (3000,)))
    assert torch.equal(lm_head.choices(state, wanted), torch.where(choices == wanted, choices, -1))
    assert 900 < int((choices == wanted).sum()) < 1500


def test_logits_of_blocks_are_the_whole_ones() -> None:
    state, weight = torch.randn(7, 12), torch.randn(2500, 12)
    torch.testing.assert_close(LmHead(weight, 0.5, 3.0).logits(state), plain_logits(state, weight, 0.5, 3.0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        LmHead(weight.bfloat16()).logits(state), (state.bfloat16() @ weight.bfloat16().T).float(), rtol=1e-2, atol=1e-2
    )


def test_autocast_does_not_round_the_sums_over_the_vocabulary() -> None:
    torch.manual_seed(0)
    state, finals, weight = (torch.randn(n, 16).bfloat16() for n in (6, 6, 3000))
    teacher = torch.tensor([0, 3, 5, 1, 0, 2])
    lm_head = LmHead(weight)
    with torch.autocast("cpu", torch.bfloat16):
        _, found = distillation_kl(state, torch.ones(6), teacher, finals, lm_head, 4)
    log_p, log_q = (lm_head.logits(x).double().log_softmax(-1) for x in (finals[teacher], state))
    torch.testing.assert_close(found.kl_S.double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-5, atol=1e-5)
