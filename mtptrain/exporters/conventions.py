"""What an export states about itself, because engines differ in it (mtptrain.json)."""

from typing import Any

from mtptrain import __version__
from mtptrain.heads.mtp import MtpConfig
from mtptrain.target.spec import TargetSpec


def conventions(config: MtpConfig, spec: TargetSpec, layout: str = "stock") -> dict[str, Any]:
    """Every convention that has two sides somewhere."""
    return {
        "captures": ["final"],
        "capture_names": "after_<i>: residual stream after decoder layer i, 0-based; final: after the target's final norm",
        "layer_ids": None,
        "hidden_input": "post_final_norm",
        "concat_order": ["embedding", "hidden"],
        "position_0_embedding_zeroed": False,
        "row_alignment": "row p: state at p, embedding of token p+1, RoPE position p, predicts token p+2; step k: position p+k",
        "norm_before_residual": None,
        "recycled_hidden": "post_norm" if config.output_norm else "no_output_norm",
        "draft_vocabulary": "full",
        "d2t": None,
        "fc_bias": False,
        "qkv": "fused" if layout == "stock" else "apart",
        "rms_norm": "weight",
        "target_rms_norm": "1+weight" if spec.rms_norm_offset == 1.0 else "weight",
        "rope_parameters": config.layer.rope,
        "rope_layout": "half_rotation",
        "max_position_embeddings": config.layer.max_position_embeddings,
        "tied_embeddings_of_target": spec.tie_word_embeddings,
        "embeddings_in_file": False,
        "lm_head_in_file": False,
        "embed_scale": spec.embed_scale,
        "logit_scale": spec.logit_scale,
        "logit_softcap": spec.logit_softcap,
        "attention_bias": config.layer.attention_bias,
        "qk_norm": config.layer.qk_norm,
        "sliding_window": config.layer.sliding_window,
    }


def certificate_file(
    config: MtpConfig, spec: TargetSpec, *, engine: str, layout: str, proof: str, target: dict[str, Any], certificate: dict[str, Any] | None
) -> dict[str, Any]:
    """Content of mtptrain.json. `proof`: engine, reference or contract."""
    return {
        "mtptrain": __version__,
        "engine": engine,
        "layout": layout,
        "proof": proof,
        "target": target,
        "conventions": conventions(config, spec, layout),
        "certificate": certificate,
    }
