"""The folder vLLM loads: a class that vLLM ships (raw config, or in the speculators format), or mtptrain's plugin for mtp heads."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mtptrain.config import HeadKind, VllmLayout
from mtptrain.errors import UserError
from mtptrain.exporters import vllm_eagle, vllm_stock
from mtptrain.exporters.eagle_names import eagle3_parameters, eagle_parameters
from mtptrain.exporters.folder import CONFIG, WEIGHTS, Export
from mtptrain.exporters.vllm_eagle import to_eagle, to_eagle3, to_speculators
from mtptrain.exporters.vllm_plugin import from_plugin, to_plugin
from mtptrain.exporters.vllm_stock import from_stock, to_stock
from mtptrain.files import read_json
from mtptrain.heads.eagle import EagleConfig, EagleHead
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.heads.head import DraftHead
from mtptrain.heads.mtp import MtpConfig, MtpHead
from mtptrain.target.spec import TargetSpec

METHODS = {HeadKind.mtp: "eagle", HeadKind.eagle: "eagle", HeadKind.eagle3: "eagle3"}
"""`method` of vLLM's speculative config."""
HeadShape = MtpConfig | EagleConfig | Eagle3Config


def pick_layout(wanted: VllmLayout, config: HeadShape, spec: TargetSpec, tensor_parallel: int = 1) -> VllmLayout:
    """`auto` resolved. UserError where vLLM cannot express the head in the layout asked for."""
    if wanted is VllmLayout.speculators and not isinstance(config, Eagle3Config):
        raise UserError("export.vllm.layout=speculators: vLLM reads eagle3 heads alone in that format; use export.vllm.layout=auto")
    if isinstance(config, MtpConfig):
        return _pick_mtp(wanted, config, spec, tensor_parallel)
    if wanted is VllmLayout.plugin:
        raise UserError("export.vllm.layout=plugin: the plugin serves mtp heads; vLLM has a class of its own for this one, use stock")
    if reason := vllm_eagle.why_not(config, spec):
        raise UserError(f"vLLM's own class cannot express this head ({reason}); leave vllm out of export.engines, or use head=mtp")
    return VllmLayout.speculators if wanted is VllmLayout.speculators else VllmLayout.stock


def _pick_mtp(wanted: VllmLayout, config: MtpConfig, spec: TargetSpec, tensor_parallel: int) -> VllmLayout:
    reason = vllm_stock.why_not(config, spec)
    if tensor_parallel > 1 and not reason:
        reason = f"engine.tensor_parallel={tensor_parallel}: its fused q, k, v can't be split between ranks"
    if wanted is VllmLayout.stock and reason:
        raise UserError(f"export.vllm.layout=stock: vLLM's own class cannot express this head ({reason}); use export.vllm.layout=plugin")
    if wanted is VllmLayout.auto:
        return VllmLayout.plugin if reason else VllmLayout.stock
    return wanted


def to_vllm(
    head: DraftHead,
    spec: TargetSpec,
    wanted: VllmLayout,
    dtype: torch.dtype = torch.bfloat16,
    rows_DH: Tensor | None = None,
    k: int = 3,
    target: str = "",
) -> Export:
    """What the folder holds. Raises UserError as `pick_layout` does.

    `rows_DH`: the target's rows of a reduced draft vocabulary (Drafter.lm_head has them); `k` and `target` are of the speculators format.
    """
    layout = pick_layout(wanted, head.config, spec)
    if isinstance(head, EagleHead):
        made = to_eagle(head, spec, dtype)
    elif isinstance(head, Eagle3Head):
        speculators = layout is VllmLayout.speculators
        made = to_speculators(head, spec, dtype, rows_DH, k, target) if speculators else to_eagle3(head, spec, dtype, rows_DH)
    else:
        assert isinstance(head, MtpHead)
        made = (to_stock if layout is VllmLayout.stock else to_plugin)(head, spec, dtype)
    return Export(layout.name, *made)


def from_vllm(folder: Path, head: DraftHead) -> dict[str, Tensor]:
    """`head.state_dict()` as the folder holds it. `head` gives the shape."""
    config, tensors = read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    if isinstance(head, EagleHead):
        return eagle_parameters(tensors)
    if isinstance(head, Eagle3Head):
        return eagle3_parameters({name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}, head)
    return from_stock(config, tensors) if "fc.weight" in tensors else from_plugin(tensors)
