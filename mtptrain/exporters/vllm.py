"""The folder vLLM loads, in one of two layouts: a class that vLLM ships, or mtptrain's plugin."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtptrain.config import VllmLayout
from mtptrain.errors import UserError
from mtptrain.exporters.vllm_plugin import from_plugin, to_plugin
from mtptrain.exporters.vllm_stock import from_stock, to_stock, why_not
from mtptrain.files import read_json, write_json
from mtptrain.heads.mtp import MtpConfig, MtpHead
from mtptrain.target.spec import TargetSpec

CONFIG, WEIGHTS = "config.json", "model.safetensors"
METHOD = "eagle"
"""Of vLLM's speculative config, for both layouts."""


@dataclass(slots=True)
class VllmExport:
    layout: VllmLayout
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        write_json(folder / CONFIG, self.config)
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})


def pick_layout(wanted: VllmLayout, config: MtpConfig, spec: TargetSpec, tensor_parallel: int = 1) -> VllmLayout:
    """`auto` resolved. UserError where the stock class is asked for and cannot express the head."""
    reason = why_not(config, spec)
    if tensor_parallel > 1 and not reason:
        reason = f"engine.tensor_parallel={tensor_parallel}: its fused q, k, v can't be split between ranks"
    if wanted is VllmLayout.stock and reason:
        raise UserError(f"export.vllm.layout=stock: vLLM's own class cannot express this head ({reason}); use export.vllm.layout=plugin")
    if wanted is VllmLayout.auto:
        return VllmLayout.plugin if reason else VllmLayout.stock
    return wanted


def to_vllm(head: MtpHead, spec: TargetSpec, wanted: VllmLayout, dtype: torch.dtype = torch.bfloat16) -> VllmExport:
    """What the folder holds. Raises UserError as `pick_layout` does."""
    layout = pick_layout(wanted, head.config, spec)
    config, tensors = (to_stock if layout is VllmLayout.stock else to_plugin)(head, spec, dtype)
    return VllmExport(layout, config, tensors)


def from_vllm(folder: Path) -> dict[str, Tensor]:
    """The head's parameters by our names, as the folder holds them."""
    config, tensors = read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    return from_stock(config, tensors) if "fc.weight" in tensors else from_plugin(tensors)
