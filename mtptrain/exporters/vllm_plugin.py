"""mtptrain's own class in vLLM (engines/vllm_model.py): method `eagle`, architecture EagleMtpHead, for a target of any kind.

A pure function head -> (config.json, tensors), and its inverse. The tensors keep the head's own names, q, k, v and gate, up apart, so that
any number of tensor-parallel ranks can split them. The config is a Llama config; what a Llama has no key for is in `mtptrain_head`.
"""

from typing import Any

import torch
from torch import Tensor

from mtptrain.engines.plugin import ARCHITECTURE
from mtptrain.exporters.llama import llama_config
from mtptrain.heads.mtp import MtpConfig, MtpHead
from mtptrain.target.spec import TargetSpec

_OURS, _THEIRS = "layer.", "layers.0."


def to_plugin(head: MtpHead, spec: TargetSpec, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the folder."""
    tensors = {_renamed(name, _OURS, _THEIRS): p.detach().to(dtype).contiguous() for name, p in sorted(head.named_parameters())}
    return _config(head.config, spec, dtype), tensors


def from_plugin(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's parameters by our names, from a folder written by `to_plugin`."""
    return {_renamed(name, _THEIRS, _OURS): t for name, t in tensors.items()}


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _config(config: MtpConfig, spec: TargetSpec, dtype: torch.dtype) -> dict[str, Any]:
    layer = config.layer
    return llama_config(layer, spec, dtype) | {
        "architectures": [ARCHITECTURE],
        "mtptrain_head": {
            "embed_norm": config.embed_norm,
            "hidden_norm": config.hidden_norm,
            "input_norm": layer.input_norm,
            "post_attention_norm": layer.post_attention_norm,
            "output_norm": config.output_norm,
            "qk_norm": layer.qk_norm,
            "sliding_window": layer.sliding_window,
            "embed_scale": spec.embed_scale,
            "logit_scale": spec.logit_scale,
            "logit_softcap": spec.logit_softcap,
        },
    }
