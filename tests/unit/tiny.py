"""Tiny random-weight targets for tests."""

from pathlib import Path
from typing import Any

from mtptrain.target.tiny import make_tiny_target, tiny_tokenizer

__all__ = ["FAMILY_KEYS", "make_tiny_target", "tiny_family", "tiny_llama", "tiny_tokenizer"]

_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {**_WINDOW, "tie_word_embeddings": True},
    "qwen3": _WINDOW,
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "smollm3": {"tie_word_embeddings": True},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05},
    "phi3": {"sliding_window": 8},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True, "tie_word_embeddings": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 8, "tie_word_embeddings": True},
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_WINDOW, "max_window_layers": 3, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_WINDOW, **_EXPERTS},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
}
"""config.json keys that bring out what a model type does differently, at a tiny size."""


def tiny_llama(folder: Path, **overrides: Any) -> Path:
    """A tiny Llama folder: hidden 64, 3 layers, 4 heads and 2 KV heads, 320 tokens, untied unless overridden."""
    return make_tiny_target(folder, **overrides)


def tiny_family(folder: Path, model_type: str) -> Path:
    """A tiny folder of any model type mtptrain reads."""
    return make_tiny_target(folder, model_type, **FAMILY_KEYS[model_type])
