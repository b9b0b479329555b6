"""W8A8 in transformers against integer arithmetic."""

import torch

from mtptrain.target.quantized_linear import Int8Linear


def test_product_is_that_of_the_integers() -> None:
    """Sums of 96 products of int8 numbers are exact in float32, so the only roundings are those of the scales."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (24, 96), generator=generator, dtype=torch.int8)
    scale, bias = torch.rand(24, 1, generator=generator) + 0.1, torch.randn(24, generator=generator)
    x = torch.randn(5, 96, generator=generator)
    step = x.abs().amax(1, keepdim=True) / 127
    integers = (x / step).round().long() @ weight.long().T
    expected = integers.double() * step.double() * scale.flatten().double() + bias.double()
    torch.testing.assert_close(Int8Linear(weight, scale, bias)(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_row_of_zeros_gives_the_bias() -> None:
    weight, bias = torch.ones(3, 4, dtype=torch.int8), torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(Int8Linear(weight, torch.ones(3, 1), bias)(torch.zeros(2, 4)), bias.expand(2, 3))


def test_largest_input_uses_the_whole_range() -> None:
    linear = Int8Linear(torch.eye(2, dtype=torch.int8), torch.ones(2, 1), None)
    torch.testing.assert_close(linear(torch.tensor([[-3.0, 1.0]])), torch.tensor([[-3.0, 3.0 * 42 / 127]]), rtol=1e-6, atol=0.0)
