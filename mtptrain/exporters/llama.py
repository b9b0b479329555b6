"""Keys of a Llama config.json that engines' draft classes read."""

from typing import Any

import torch

from mtptrain.heads.layers import LayerConfig
from mtptrain.target.spec import TargetSpec


def llama_config(layer: LayerConfig, spec: TargetSpec, dtype: torch.dtype) -> dict[str, Any]:
    """One layer of the head's shapes. RoPE in both schemas: the first for old loaders, `rope_parameters` for transformers 5.

    max_position_embeddings is the target's: a smaller one silently ends acceptance at long contexts.
    """
    rope = dict(layer.rope)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": max(layer.max_position_embeddings, spec.max_position_embeddings),
        "attention_bias": layer.attention_bias,
        "tie_word_embeddings": False,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
    }
