"""What an export states about itself, because engines differ in it (mtptrain.json)."""

from typing import Any

from mtptrain import __version__
from mtptrain.exporters.vllm import HeadShape
from mtptrain.exporters.vllm_eagle import entering, leaving
from mtptrain.heads.eagle import EagleConfig
from mtptrain.heads.eagle3 import Eagle3Config
from mtptrain.heads.mtp import MtpConfig
from mtptrain.target.spec import TargetSpec


def conventions(config: HeadShape, spec: TargetSpec, engine: str, layout: str) -> dict[str, Any]:
    """Every convention that has two sides somewhere. `layout`: vLLM's; another engine's is its name."""
    layer = config.layer
    return {
        "capture_names": "after_<i>: residual stream after decoder layer i, 0-based; final: after the target's final norm",
        "row_alignment": "row p: state at p, embedding of token p+1, RoPE position p, predicts token p+2; step k: position p+k",
        "position_0_embedding_zeroed": False,
        "concat_order": ["embedding", "hidden"],
        **_of_head(config, engine),
        "qkv": "fused" if isinstance(config, MtpConfig) and layout == "stock" else "apart",
        "rms_norm": "weight",
        "target_rms_norm": "1+weight" if spec.rms_norm_offset == 1.0 else "weight",
        "rope_parameters": layer.rope,
        "rope_layout": "neighbouring channels" if engine == "gguf" else "half_rotation",
        "max_position_embeddings": layer.max_position_embeddings,
        "tied_embeddings_of_target": spec.tie_word_embeddings,
        "embeddings_in_file": False,
        "embed_scale": spec.embed_scale,
        "logit_scale": spec.logit_scale,
        "logit_softcap": spec.logit_softcap,
        "attention_bias": layer.attention_bias,
        "qk_norm": layer.qk_norm,
        "sliding_window": layer.sliding_window,
    }


def _of_head(config: HeadShape, engine: str) -> dict[str, Any]:
    if isinstance(config, Eagle3Config):
        reduced = config.draft_vocab_size < config.vocab_size
        return {
            "captures": config.captures,
            "layer_ids": {"entering": entering(config.captures), "after": leaving(config.captures)},
            "hidden_input": "streams between layers, un-normed",
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "recycled_hidden": "post_norm" if config.norm_output else "pre_norm",
            "draft_vocabulary": config.draft_vocab_size if reduced else "full",
            "d2t": ("absolute" if engine == "gguf" else "offset") if reduced else None,
            "fc_bias": False,
            "lm_head_in_file": config.own_lm_head or reduced,
        }
    post_norm = "post_norm" if isinstance(config, MtpConfig) and config.output_norm else "no_output_norm"
    return {
        "captures": ["final"],
        "layer_ids": None,
        "hidden_input": "post_final_norm",
        "norm_before_residual": None,
        "recycled_hidden": post_norm,
        "draft_vocabulary": "full",
        "d2t": None,
        "fc_bias": isinstance(config, EagleConfig) and config.fc_bias,
        "lm_head_in_file": False,
    }


def certificate_file(
    config: HeadShape, spec: TargetSpec, *, engine: str, layout: str, proof: str, target: dict[str, Any], certificate: dict[str, Any] | None
) -> dict[str, Any]:
    """Content of mtptrain.json. `proof`: engine, reference or contract."""
    return {
        "mtptrain": __version__,
        "engine": engine,
        "layout": layout,
        "proof": proof,
        "target": target,
        "conventions": conventions(config, spec, engine, layout),
        "certificate": certificate,
    }
