"""oneDNN-packed layers give the plain product, for any number of rows, with and without bias."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtptrain.errors import UserError
from mtptrain.target.packed_linear import PackedLinear, can_pack, pack_linears


@settings(max_examples=40)
@given(st.integers(1, 130), st.integers(1, 70), st.integers(1, 90), st.booleans())
def test_product_equals_float64(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows * 7919 + inputs * 31 + outputs)
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(1, rows, inputs, generator=generator)
    exact = x.double() @ linear.weight.detach().double().T + (linear.bias.detach().double() if bias else 0.0)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(x).double(), exact, rtol=1e-5, atol=1e-5)


def test_every_linear_is_replaced_and_the_embedding_it_is_tied_to_stays() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(11, 6), "inner": torch.nn.Sequential(torch.nn.Linear(6, 6))})
    model["head"] = torch.nn.Linear(6, 11, bias=False)
    model["head"].weight = model["embed"].weight
    model.requires_grad_(False)
    expected = model["head"](model["inner"](model["embed"].weight))
    before = model["embed"].weight.clone()
    assert can_pack(model)
    pack_linears(model)
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert torch.equal(model["embed"].weight, before)
    with torch.inference_mode():
        torch.testing.assert_close(model["head"](model["inner"](model["embed"].weight)), expected, rtol=1e-5, atol=1e-6)


def test_wrong_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda _self, x: x * 0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(UserError, match="oneDNN"):
        pack_linears(model)


def test_bfloat16_is_left_alone() -> None:
    assert not can_pack(torch.nn.Linear(2, 2).bfloat16())
