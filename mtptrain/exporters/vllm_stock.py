"""Stock vLLM contract for a norm-complete MTP head: method `eagle`, architecture DeepseekV3ForCausalLM (EagleDeepseekV3ForCausalLM).

A pure function head -> (config.json, tensors), and its inverse. With the three MLA head sizes at 0 the class uses plain grouped-query
attention with fused q, k, v. It has every norm of the head, concatenates [embedding; hidden], uses the embedding at position 0 as it
is, recycles the post-norm state, and takes embeddings and lm_head from the target.
"""

from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.llama import llama_config
from mtptrain.heads.mtp import MtpConfig, MtpHead
from mtptrain.target.spec import TargetSpec

_RENAMED = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "layer.input_layernorm.weight": "layers.0.input_layernorm.weight",
    "layer.post_attention_layernorm.weight": "layers.0.post_attention_layernorm.weight",
    "layer.self_attn.o_proj.weight": "layers.0.self_attn.o_proj.weight",
    "layer.mlp.gate_proj.weight": "layers.0.mlp.gate_proj.weight",
    "layer.mlp.up_proj.weight": "layers.0.mlp.up_proj.weight",
    "layer.mlp.down_proj.weight": "layers.0.mlp.down_proj.weight",
}
_QKV = tuple(f"layer.self_attn.{x}_proj.weight" for x in "qkv")
_FUSED = "layers.0.self_attn.qkv_proj.weight"


def why_not(config: MtpConfig, spec: TargetSpec) -> str | None:
    """The first thing of head or target that this class has no place for; None where it fits."""
    layer = config.layer
    norms = {
        "embed": config.embed_norm,
        "hidden": config.hidden_norm,
        "input": layer.input_norm,
        "post_attention": layer.post_attention_norm,
        "output": config.output_norm,
    }
    reasons = [f"head.norms.{name}=false: the class always applies that norm" for name, on in norms.items() if not on]
    if layer.attention_bias:
        reasons.append("attention_bias: the class has no q, k, v biases")
    if layer.qk_norm:
        reasons.append("qk_norm: the class has no q and k norms")
    if layer.sliding_window:
        reasons.append(f"sliding_window={layer.sliding_window}: the class attends to everything")
    if layer.num_heads * layer.head_dim != layer.hidden_size:
        reasons.append(f"head_dim={layer.head_dim}: the class takes hidden_size/num_heads = {layer.hidden_size / layer.num_heads:g}")
    for name, value in (("embed_scale", spec.embed_scale), ("logit_scale", spec.logit_scale)):
        if value != 1.0:
            reasons.append(f"{name}={value:g}: the class applies none")
    if spec.quantization:
        reasons.append(f"a target quantised by {spec.quantization}: vLLM would read the class's weights as quantised too")
    if spec.logit_softcap is not None:
        reasons.append(f"logit_softcap={spec.logit_softcap:g}: the class applies none")
    return reasons[0] if reasons else None


def to_stock(head: MtpHead, spec: TargetSpec, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of the folder. Call only where `why_not` is None."""
    own = {name: p.detach() for name, p in head.named_parameters()}
    tensors = {theirs: own[ours] for ours, theirs in _RENAMED.items()}
    tensors[_FUSED] = torch.cat([own[name] for name in _QKV])
    return _config(head.config, spec, dtype), {name: t.to(dtype).contiguous() for name, t in sorted(tensors.items())}


def from_stock(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head's parameters by our names, from a folder written by `to_stock`."""
    own = {ours: tensors[theirs] for ours, theirs in _RENAMED.items()}
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    q, k, v = tensors[_FUSED].split([config["num_attention_heads"] * head_dim, kv, kv])
    return own | dict(zip(_QKV, (q, k, v), strict=True))


def _config(config: MtpConfig, spec: TargetSpec, dtype: torch.dtype) -> dict[str, Any]:
    layer = config.layer
    shared = llama_config(layer, spec, dtype)
    del shared["head_dim"]  # the class takes hidden_size / num_attention_heads
    return shared | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "moe_intermediate_size": layer.intermediate_size,
        "num_nextn_predict_layers": 1,
        # zero MLA sizes select plain grouped-query attention
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "q_lora_rank": None,
        "kv_lora_rank": 0,
        # no mixture of experts
        "first_k_dense_replace": 100000,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 1,
    }
