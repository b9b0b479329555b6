"""Frozen float32 linear layers on a CPU, with their weights laid out once for oneDNN.

torch multiplies float32 matrices with MKL, which is slow for the thin matrices of decoding on some processors (about half of oneDNN's
rate on AMD's). inductor uses the same two operators for frozen weights. The results differ from torch's by rounding only.
"""

import torch
from torch import Tensor, nn

from mtptrain.errors import UserError

_HINT_ROWS = 96
"""Rows the layout is chosen for; others work with it too."""
_TOLERANCE = 1e-4


class PackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's blocked layout; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _HINT_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")


def can_pack(model: nn.Module) -> bool:
    """Float32 on a CPU, and a torch with oneDNN."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


@torch.inference_mode()
def pack_linears(model: nn.Module) -> None:
    """Replace every nn.Linear of `model` but quantised ones, in place; the original weights are freed (a tied embedding keeps its own).

    Checked on the first layer: UserError if oneDNN's product is not the plain one.
    """
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not hasattr(child, "quantization_scheme")  # compressed-tensors' mark
    ]
    for i, (parent, name, linear) in enumerate(linears):
        packed = PackedLinear(linear)
        if i == 0:
            x_TH = torch.linspace(-1, 1, 3 * linear.in_features).view(3, -1)
            plain, ours = linear(x_TH), packed(x_TH)
            if not torch.allclose(plain, ours, rtol=_TOLERANCE, atol=_TOLERANCE * float(plain.abs().max())):
                raise UserError(
                    "oneDNN's float32 linear layers are wrong on this machine; set ONEDNN_MAX_CPU_ISA=AVX2 or use another torch"
                )
        setattr(parent, name, packed)
