"""Quantised targets in transformers, computed as engines serve them.

Legend: T tokens, I input size, O output size.
"""

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class Int8Linear(nn.Module):
    """W8A8: int8 weights with a scale a channel, activations rounded to int8 with a scale a token, s = max |x| / 127.

    The sum of products of int8 numbers is exact in float32 below 2**24: for inputs up to 1,024 wide always, beyond that in practice.
    """

    weight_OI: Tensor
    scale_O: Tensor

    def __init__(self, weight_OI: Tensor, scale_O1: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight_OI", weight_OI.float(), persistent=False)
        self.register_buffer("scale_O", scale_O1.flatten().float(), persistent=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale_T1 = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        rounded = (wide / scale_T1).round().clamp(-128, 127)
        out = (rounded @ self.weight_OI.T) * scale_T1 * self.scale_O
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def serve_quantized(model: PreTrainedModel) -> None:
    """Replace or unpack, in place, every linear layer that compressed-tensors marked."""
    from compressed_tensors.compressors import decompress_module

    for hook in list(model._forward_pre_hooks):  # it would unpack everything at the first forward of the whole model
        del model._forward_pre_hooks[hook]
    marked: list[tuple[nn.Module, str, Any]] = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if getattr(child, "quantization_scheme", None) is not None
    ]
    for parent, name, linear in marked:
        if _is_w8a8(linear.quantization_scheme):
            setattr(parent, name, Int8Linear(linear.weight, linear.weight_scale, linear.bias))
        else:
            decompress_module(linear)


def _is_w8a8(scheme: Any) -> bool:
    """Int8 weights a channel, int8 activations a token, both symmetric: the one scheme that is computed here exactly as engines do."""
    weights, inputs = scheme.weights, scheme.input_activations
    return bool(
        inputs
        and (weights.num_bits, inputs.num_bits) == (8, 8)
        and (weights.type, inputs.type) == ("int", "int")
        and (weights.strategy, inputs.strategy) == ("channel", "token")
        and weights.symmetric
        and inputs.symmetric
        and inputs.dynamic
    )
