"""The layer's functions with a backward of their own, against autograd of their formulas in float64; and what they keep for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtptrain.heads import layers
from mtptrain.heads.layers import RmsNorm, SwiGlu, attend


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(autouse=True, params=[1 << 16, 25, 1])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows at once, some of them with a shorter end, and one at a time."""
    monkeypatch.setattr(layers, "_CACHED", request.param)


@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 8), (0, 8)])
def test_an_rms_norm_has_the_gradient_of_its_formula(shape: tuple[int, ...]) -> None:
    norm, x, grad = RmsNorm(8, 1e-2), drawn(*shape).requires_grad_(), drawn(*shape, seed=1)
    with torch.no_grad():
        norm.weight.copy_(drawn(8, seed=2))
    out = norm(x)
    out.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=0)
    assert x.grad is not None
    assert norm.weight.grad is not None
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=2e-6, rtol=0)  # float32 against float64, values of order one
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, atol=5e-6, rtol=0)


def test_an_rms_norm_of_bf16_gives_bf16_and_learns_in_float32() -> None:
    norm, x = RmsNorm(8, 1e-5), drawn(5, 8, dtype=torch.bfloat16).requires_grad_()
    norm(x).sum().backward()
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert (norm(x).dtype, x.grad.dtype, norm.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_an_rms_norm_of_a_frozen_input_trains_its_weight_alone() -> None:
    norm, x = RmsNorm(8, 1e-5), drawn(5, 8)
    norm(x).sum().backward()
    expected = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).sum(0)
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rows", [7, 0])
def test_a_gated_mlp_has_the_gradient_of_its_formula(rows: int) -> None:
    mlp, x, grad = SwiGlu(6, 10), drawn(rows, 6).requires_grad_(), drawn(rows, 6, seed=1)
    out = mlp(x)
    out.backward(grad)
    wide = x.detach().double().requires_grad_()
    gate, up, down = (p.weight.detach().double().requires_grad_() for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    middle = wide @ gate.T
    expected = (middle / (1 + (-middle).exp()) * (wide @ up.T)) @ down.T
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), wide.grad, atol=1e-6, rtol=0)
    for ours, theirs in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, down)):
        assert ours.weight.grad is not None
        torch.testing.assert_close(ours.weight.grad.double(), theirs.grad, atol=1e-6, rtol=0)


def attention_case() -> tuple[Any, ...]:
    rows, keys, heads, groups, size = 12, 20, 4, 2, 4
    position = torch.arange(keys - rows, keys)
    own = [(drawn(rows, groups, size, seed=3).requires_grad_(), drawn(rows, groups, size, seed=4).requires_grad_())]
    prefix = (drawn(keys, groups, size, seed=1).requires_grad_(), drawn(keys, groups, size, seed=2).requires_grad_())
    return drawn(rows, heads, size).requires_grad_(), position + 1, prefix, position, own, 0


def test_attention_keeps_no_scores_for_backward_and_loses_nothing_by_it() -> None:
    found: list[list[Tensor]] = []
    largest: list[int] = []
    for function in (layers._attend, attend):
        case = attention_case()
        sizes: list[int] = []

        def kept(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(kept, lambda t: t):
            out = function(*case)
        out.backward(drawn(*out.shape, seed=9))
        leaves = [case[0], *case[2], *case[4][0]]
        found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        largest.append(max(sizes))
    assert [len(each) for each in found] == [6, 6]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert largest[0] >= 4 * 12 * 20 > largest[1]
