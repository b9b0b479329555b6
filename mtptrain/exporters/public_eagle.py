"""EAGLE-1 heads (EAGLE-2 and HASS have the same): SafeAILab's names, vLLM's, and the `eagle` type of the speculators library.

Sources: SafeAILab/EAGLE eagle/model/cnets1.py; vllm-project/speculators src/speculators/models/eagle.py, whose extra norms
(`layernorms`) have no place in our head. Legend: H hidden.
"""

from typing import Any

from mtptrain.exporters.eagle_names import eagle_parameters
from mtptrain.exporters.public_checkpoint import Checkpoint, check_rope, layer_shapes, llama_layer
from mtptrain.heads.eagle import EagleConfig, EagleHead
from mtptrain.target.ends import TargetEnds
from mtptrain.target.spec import TargetSpec

_COPIES = ("embed_tokens.weight", "lm_head.weight")


def captures(found: Checkpoint, spec: TargetSpec) -> list[str]:
    _shape(found, spec)
    return ["final"]


def read(found: Checkpoint, ends: TargetEnds) -> EagleHead:
    """The head. A copy of the target's embeddings or lm_head must be the target's."""
    config = _shape(found, ends.spec)
    found.check_copy("embed_tokens.weight", ends.embed_VH, "the target's embeddings")
    found.check_copy("lm_head.weight", ends.lm_head_VH, "the target's lm_head where EAGLE-1 heads draft")
    tensors = {name: found.weight(name) for name in _expected(config)}
    if config.fc_bias and not tensors["fc.bias"].any():
        del tensors["fc.bias"]  # SGLang's class wants one, so heads without carry zeros
        config.fc_bias = False
    head = EagleHead(config)
    head.load_state_dict(eagle_parameters(tensors))
    return head


def _shape(found: Checkpoint, spec: TargetSpec) -> EagleConfig:
    """The bias of fc is there where its tensor is, or where config.json says so (and it is missing)."""
    key = "fusion_bias" if found.speculators else "bias"
    said = found.flag(False, {key: found.config.get(key)})
    if found.speculators and found.flag(False, {"layernorms": found.config.get("layernorms")}):
        raise found.refuse("config.json: layernorms=true, EAGLE-1 heads have no such norms", "this head can't be imported")
    values: Any = found.config.get("transformer_layer_config") if found.speculators else found.config
    if not isinstance(values, dict):
        raise found.refuse("config.json has no transformer_layer_config", "fetch the checkpoint again")
    config = EagleConfig(layer=llama_layer(found, values, spec, 0), fc_bias=said or "fc.bias" in found.stored)
    found.check(_expected(config), _COPIES)
    check_rope(found, config.layer)
    return config


def _expected(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    size = config.layer.hidden_size
    bias: dict[str, tuple[int, ...]] = {"fc.bias": (size,)} if config.fc_bias else {}
    return {"fc.weight": (size, 2 * size), **bias, **layer_shapes(config.layer, "layers.0.")}
