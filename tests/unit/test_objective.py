"""A long document in windows: the very loss and gradient of the whole one, by any number of ranks, in bounded memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtptrain.config import HeadKind, LossConfig, TrainConfig
from mtptrain.heads import layers
from mtptrain.heads.lm_head import LmHead
from mtptrain.objective import Objective
from mtptrain.ranks import Ranks
from tests.unit.heads import HIDDEN, bound, small_batch, small_embed, small_head, small_spec

CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": HeadKind.mtp},
    "mtp, window": {"kind": HeadKind.mtp, "sliding_window": 5},
    "eagle": {"kind": HeadKind.eagle},
    "eagle3": {"kind": HeadKind.eagle3, "num_kv_heads": 4},
}


def case(kind: dict[str, Any], length: int, steps: int) -> tuple[Any, Any, Objective, Tensor]:
    head = small_head(small_spec(num_layers=8), **kind)
    batch = small_batch([length], [[(2, length // 2), (length // 2 + 2, length)]], steps, captures=("final", *head.captures))
    hidden = 0.0 if kind["kind"] is HeadKind.eagle3 else 0.5
    config = TrainConfig(steps=steps, loss=LossConfig(hidden_weight=hidden, chunk_rows=4))
    noise = 0.1 * torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(1))
    return head, batch, Objective(config, bound(head), LmHead(small_embed()), CPU), noise


def gradients(head: Any, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in head.named_parameters()]
    found = torch.autograd.grad(loss, list(head.parameters()), allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


@pytest.mark.parametrize("kind", HEADS.values(), ids=HEADS)
@settings(max_examples=6, deadline=None)
@given(length=st.integers(12, 40), steps=st.integers(1, 4), window=st.integers(1, 17))
def test_windows_give_the_loss_and_the_gradient_of_the_whole(kind: dict[str, Any], length: int, steps: int, window: int) -> None:
    """Both are float32 sums, in another order: 1e-5 of the largest element, and more in an eagle head, which has no norm to stop growth."""
    head, batch, objective, noise = case(kind, length, steps)
    whole, statistics = objective.of(batch, noise)
    expected = gradients(head, whole)
    loss, parts = objective.of_long(batch, noise, window)
    found = gradients(head, loss)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    allowed = 1e-4 if kind["kind"] is HeadKind.eagle else 1e-5
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= allowed * gradient.abs().max() + 1e-7, name
    for one, other in zip(statistics, parts, strict=True):
        torch.testing.assert_close(one.kl_S, other.kl_S, rtol=1e-4, atol=1e-5)
        assert torch.equal(one.match_S, other.match_S)


def test_windows_of_bfloat16_are_as_near_to_float32_as_the_whole_is() -> None:
    """Autocast keeps copies of weights; one that a window's graph made is of no use to the next."""
    head, batch, objective, noise = case(HEADS["mtp"], 40, 3)
    exact = gradients(head, objective.of(batch, noise)[0])
    with torch.autocast("cpu", torch.bfloat16):
        whole = gradients(head, objective.of(batch, noise)[0])
        parts = gradients(head, objective.of_long(batch, noise, 7)[0])

    def error(found: dict[str, Tensor]) -> float:
        return sum(float((found[n] - g).square().sum()) for n, g in exact.items()) ** 0.5

    assert error(parts) < 1.5 * error(whole)
    assert error(whole) > 0


def test_ranks_share_the_windows_of_a_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over ranks of what each returns is the whole's; the keys' gradient is summed between (here by running all in turn)."""
    head, batch, objective, noise = case(HEADS["mtp"], 37, 3)
    expected = gradients(head, objective.of_long(batch, noise, 5)[0])
    sums: list[list[Tensor]] = []
    world = 3

    def note(self: Ranks, tensors: list[Tensor]) -> None:
        sums.append([t.clone() for t in tensors])

    monkeypatch.setattr(Ranks, "sum_", note)
    for rank in range(world):
        objective.of_long(batch, noise, 5, Ranks(rank, world))
    whole = [sum(parts) for parts in zip(*sums, strict=True)]

    def met(self: Ranks, tensors: list[Tensor]) -> None:
        for tensor, total in zip(tensors, whole, strict=True):
            tensor.copy_(total)

    monkeypatch.setattr(Ranks, "sum_", met)
    found: dict[str, Tensor] = {}
    for rank in range(world):
        for name, gradient in gradients(head, objective.of_long(batch, noise, 5, Ranks(rank, world))[0]).items():
            found[name] = found.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, name


def test_attention_in_parts_is_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    head, batch, objective, noise = case(HEADS["mtp"], 33, 3)
    whole = objective.of(batch, noise)[0]
    expected = gradients(head, whole)
    monkeypatch.setattr(layers, "_SCORES", 33 * 4 * 5)
    loss = objective.of(batch, noise)[0]
    assert float(loss) == pytest.approx(float(whole), rel=1e-6)
    for name, gradient in gradients(head, loss).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", HEADS.values(), ids=HEADS)
def test_recomputed_activations_are_the_same_bits(kind: dict[str, Any]) -> None:
    head, batch, objective, noise = case(kind, 33, 3)
    whole = objective.of(batch, noise)[0]
    expected = gradients(head, whole)
    again = Objective(replace(objective._config, recompute=True), bound(head), LmHead(small_embed()), CPU)
    loss = again.of(batch, noise)[0]
    assert torch.equal(loss.detach(), whole.detach())
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(head, loss).items())
