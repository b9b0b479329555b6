"""What mtptrain knows of a target from its config.json alone.

A model type is read only if it is in `FAMILIES`: reading an unknown one as if it were a Llama would train on wrong
norms, scales or rotations without a sign of it.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mtptrain.errors import UserError, one_line


@dataclass(slots=True, frozen=True, kw_only=True)
class Experts:
    """MLPs of which a router chooses a few for each token."""

    count: int
    chosen: int
    """Of them, for a token."""
    width: int
    """Intermediate size of one."""
    shared_width: int
    """Of those that every token goes through, together; 0: none."""
    shared_gate: bool
    """Whether a weight a channel scales what the shared ones give."""
    layers: int
    """Layers that have experts; the others have one MLP."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values are made of one small vector a token (MLA); sizes a head but for the ranks."""

    query_rank: int | None
    """None: queries are made at once."""
    rank: int
    plain: int
    """Of keys without rotation."""
    rotated: int
    value: int


@dataclass(slots=True, kw_only=True)
class TargetSpec:
    """Architecture facts of a target, in one vocabulary for all model types. Sizes in elements."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rms_norm_offset: float = 0.0
    """RMSNorm multiplies by (offset + weight): 0 for Llama, 1 for Gemma."""
    norm_type: str = "rms"
    """`layer`: the target's norms subtract the mean first (Cohere), weight without bias."""
    hidden_act: str = "silu"
    rope: dict[str, Any] = field(default_factory=dict)
    """transformers-5 `rope_parameters` of full-attention layers: rope_theta, rope_type and the type's own keys."""
    last_layer_rope: dict[str, Any] | None = None
    """`rope_parameters` of the last layer where they differ from `rope` (a sliding last layer of Gemma 3)."""
    attention_bias: bool = False
    """Bias on q, k, v."""
    attention_out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    """Window of the last layer if it slides, else None."""
    tie_word_embeddings: bool = False
    embed_scale: float = 1.0
    """Embeddings are multiplied by this (Gemma: sqrt(hidden_size))."""
    logit_scale: float = 1.0
    """Logits are multiplied by this (Granite divides by logits_scaling, Cohere multiplies by logit_scale)."""
    logit_softcap: float | None = None
    """logits = softcap * tanh(logits / softcap)."""
    attention_scale: float | None = None
    """Score factor where it is not head_dim ** -0.5."""
    attention_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    residual_scale: float = 1.0
    """Attention and MLP outputs are multiplied by this before they are added (Granite)."""
    eos_token_ids: list[int] = field(default_factory=list)
    quantization: str = ""
    """`quant_method` of a quantised checkpoint."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Family:
    """What a config.json does not say of its model type."""

    qkv_bias: str = ""
    """`always`, a config key that decides, or empty."""
    out_bias: str = ""
    qk_norm: str = ""
    """As above."""
    gemma_norm: bool = False
    layer_norm: bool = False
    embed_sqrt: bool = False
    fused: bool = False
    """q, k, v and gate, up are stored as one matrix each; they are split when read."""
    mla: bool = False
    experts: str = ""
    """The config key of their number."""
    shared_gate: bool = False
    odd_layer: str = ""
    """Why the last layer can't initialise a pre-norm GQA layer with one gated MLP; empty where it can."""


_EXPERTS = "its last layer has experts instead of one MLP"
_LATENT = "its attention is latent (MLA)"
_SANDWICH = "its layers also norm what attention and MLP return"
_LLAMA: dict[str, Any] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
FAMILIES = {
    "llama": Family(**_LLAMA),
    "mistral": Family(),
    "qwen2": Family(qkv_bias="always"),
    "qwen3": Family(**_LLAMA, qk_norm="always"),
    "seed_oss": Family(qkv_bias="attention_bias", out_bias="attention_out_bias"),
    "smollm3": Family(**_LLAMA, odd_layer="some of its layers have no rotary embedding"),
    "granite": Family(**_LLAMA),
    "phi3": Family(fused=True),
    "gemma": Family(**_LLAMA, gemma_norm=True, embed_sqrt=True),
    "gemma2": Family(**_LLAMA, gemma_norm=True, embed_sqrt=True, odd_layer=_SANDWICH),
    "gemma3_text": Family(**_LLAMA, gemma_norm=True, embed_sqrt=True, qk_norm="always", odd_layer=_SANDWICH),
    "cohere": Family(**_LLAMA, layer_norm=True, qk_norm="use_qk_norm", odd_layer="attention and MLP run side by side in its layers"),
    "cohere2": Family(**_LLAMA, layer_norm=True, odd_layer="attention and MLP run side by side in its layers"),
    "olmo2": Family(**_LLAMA, qk_norm="always", odd_layer="its layers norm outputs, not inputs"),
    "olmo3": Family(**_LLAMA, qk_norm="always", odd_layer="its layers norm outputs, not inputs"),
    "mixtral": Family(experts="num_local_experts", odd_layer=_EXPERTS),
    "qwen2_moe": Family(qkv_bias="qkv_bias", experts="num_experts", shared_gate=True, odd_layer=_EXPERTS),
    "qwen3_moe": Family(**_LLAMA, qk_norm="always", experts="num_experts", odd_layer=_EXPERTS),
    "deepseek_v2": Family(mla=True, experts="n_routed_experts", odd_layer=_LATENT),
    "deepseek_v3": Family(mla=True, experts="n_routed_experts", odd_layer=_LATENT),
}
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_MOST_LAYERS = 10_000
_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def spec_from_config(config: dict[str, Any]) -> TargetSpec:
    """Facts of a target from the parsed config.json, old or new schema. UserError for a model type not in `FAMILIES`, and for values
    that no target has.
    """
    family = _family(config)
    if missing := [key for key in _REQUIRED if key not in config]:
        raise UserError(f"config.json of this {config['model_type']} target lacks {', '.join(missing)}; take a complete folder")
    for key in _REQUIRED:  # before transformers makes lists of that length
        if not _is_count(config[key]) or (key == "num_hidden_layers" and config[key] > _MOST_LAYERS):
            raise UserError(f"config.json: {key} is {config[key]!r:.60}, not a positive whole number that a target has; fetch it again")
    full = full_config(config)
    try:
        spec = _facts(config, full, family)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as e:
        raise UserError(f"config.json of this {config['model_type']} target holds a value of another kind ({e}); fetch it again") from e
    _check(spec)
    return spec


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and 0 < value < 2**31


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _check(spec: TargetSpec) -> None:
    for key in _COUNTS:
        value = getattr(spec, key)
        if not _is_count(value):
            raise UserError(f"config.json: {key} is {value!r:.60}, not a positive whole number; fetch the target again")
    for key in ("rms_norm_eps", "embed_scale", "logit_scale", "residual_scale"):
        value = getattr(spec, key)
        if not _is_number(value) or value == 0:
            raise UserError(f"config.json: {key} is {value!r:.60}, not a number other than zero; fetch the target again")
    for key in ("logit_softcap", "attention_softcap", "sliding_window"):
        value = getattr(spec, key)
        if value is not None and not (_is_number(value) and value > 0):
            raise UserError(f"config.json: {key} is {value!r:.60}, not a positive number; fetch the target again")
    if spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"config.json: {spec.num_heads} query heads cannot share {spec.num_kv_heads} key/value heads; fetch the target again"
        )
    if not isinstance(spec.hidden_act, str):
        raise UserError(f"config.json: hidden_act is {spec.hidden_act!r:.60}, not a name; fetch the target again")
    theta = spec.rope.get("rope_theta")
    if not (_is_number(theta) and theta > 0):
        raise UserError(f"config.json: rope_theta is {theta!r:.60}, not a positive number; fetch the target again")
    if bad := [i for i in spec.eos_token_ids if not (_is_number(i) and isinstance(i, int) and i >= 0)]:
        raise UserError(f"config.json: eos_token_id {bad[0]!r:.60} is no token id; fetch the target again")


def _facts(config: dict[str, Any], full: Any, family: Family) -> TargetSpec:
    rope, last_rope, window = rope_of(full), rope_of(full, _layer_types(full)[-1]), _last_window(full)
    head_dim = full.v_head_dim if family.mla else getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads
    offset = 1.0 if family.gemma_norm else 0.0
    return TargetSpec(
        model_type=full.model_type,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=full.num_attention_heads,
        num_kv_heads=getattr(full, "num_key_value_heads", None) or full.num_attention_heads,
        head_dim=head_dim,
        vocab_size=full.vocab_size,
        max_position_embeddings=full.max_position_embeddings,
        rms_norm_eps=full.layer_norm_eps if family.layer_norm else full.rms_norm_eps,
        rms_norm_offset=offset,
        norm_type="layer" if family.layer_norm else "rms",
        hidden_act=getattr(full, "hidden_activation", None) or full.hidden_act,
        rope=rope,
        last_layer_rope=last_rope if last_rope != rope else None,
        attention_bias=_says(full, family.qkv_bias),
        attention_out_bias=_says(full, family.out_bias),
        qk_norm=_says(full, family.qk_norm),
        sliding_window=window,
        tie_word_embeddings=bool(full.tie_word_embeddings),
        embed_scale=full.hidden_size**0.5 if family.embed_sqrt else float(getattr(full, "embedding_multiplier", 1.0)),
        logit_scale=float(getattr(full, "logit_scale", 1.0)) / float(getattr(full, "logits_scaling", 1.0)),
        logit_softcap=getattr(full, "final_logit_softcapping", None),
        attention_scale=_attention_scale(full, head_dim),
        attention_softcap=getattr(full, "attn_logit_softcapping", None),
        experts=_experts(full, family) if family.experts else None,
        latent=_latent(full) if family.mla else None,
        residual_scale=float(getattr(full, "residual_multiplier", 1.0)),
        eos_token_ids=id_list(full.eos_token_id),
        quantization=(config.get("quantization_config") or {}).get("quant_method", ""),
    )


def _experts(full: Any, family: Family) -> Experts:
    width = getattr(full, "moe_intermediate_size", None) or full.intermediate_size
    shared = getattr(full, "shared_expert_intermediate_size", None) or (getattr(full, "n_shared_experts", None) or 0) * width
    dense = set(getattr(full, "mlp_only_layers", None) or ()) | set(range(getattr(full, "first_k_dense_replace", 0)))
    every = getattr(full, "decoder_sparse_step", 1)
    return Experts(
        count=getattr(full, family.experts),
        chosen=full.num_experts_per_tok,
        width=width,
        shared_width=shared,
        shared_gate=family.shared_gate,
        layers=sum(i not in dense and (i + 1) % every == 0 for i in range(full.num_hidden_layers)),
    )


def _latent(full: Any) -> Latent:
    return Latent(
        query_rank=full.q_lora_rank,
        rank=full.kv_lora_rank,
        plain=full.qk_nope_head_dim,
        rotated=full.qk_rope_head_dim,
        value=full.v_head_dim,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a target's folder."""
    path = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path} is missing; target.path must be a Hugging Face model folder") from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not valid JSON ({e}); fetch the target again") from e
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no object; fetch the target again")
    return config


def read_spec(folder: Path) -> TargetSpec:
    """Facts of the target in `folder`."""
    return spec_from_config(read_config(folder))


def full_config(config: dict[str, Any]) -> Any:
    """The transformers config object: class defaults filled in, RoPE in the transformers-5 schema. `config` is not changed."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _family(config)
    copied = json.loads(json.dumps(config))
    try:
        return AutoConfig.for_model(copied.pop("model_type"), **copied)
    except StrictDataclassError as e:
        raise UserError(f"config.json is not a valid {config['model_type']} config: {one_line(e)}") from e
    except Exception as e:  # transformers checks little before it uses a value, so a strange one raises anything
        raise UserError(f"config.json is not a valid {config['model_type']} config: {one_line(e)[:300]}; fetch the target again") from e


def id_list(value: int | list[int] | None) -> list[int]:
    """Token ids of a config key that holds none, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _family(config: dict[str, Any]) -> Family:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    own_code = " (it needs the folder's own code)" if "auto_map" in config else ""
    raise UserError(f"config.json: model_type {model_type!r} can't be read{own_code}; mtptrain reads {', '.join(sorted(FAMILIES))}")


def _says(full: Any, key: str) -> bool:
    return key == "always" or (key != "" and bool(getattr(full, key, False)))


def _layer_types(full: Any) -> list[str]:
    return getattr(full, "layer_types", None) or ["full_attention"] * full.num_hidden_layers


def rope_of(full: Any, layer_type: str = "full_attention") -> dict[str, Any]:
    """`rope_parameters` of one layer type, without the old schema's `type` that transformers leaves beside `rope_type`."""
    entry = full.rope_parameters.get(layer_type, full.rope_parameters)
    return {key: value for key, value in entry.items() if key != "type"}


def _last_window(full: Any) -> int | None:
    if getattr(full, "layer_types", None) and _layer_types(full)[-1] != "sliding_attention":
        return None
    return getattr(full, "sliding_window", None) or None


def _attention_scale(full: Any, head_dim: int) -> float | None:
    if (scalar := getattr(full, "query_pre_attn_scalar", None)) is not None:
        return None if scalar == head_dim else float(scalar) ** -0.5
    if (multiplier := getattr(full, "attention_multiplier", None)) is not None:
        return None if multiplier == head_dim**-0.5 else float(multiplier)
    return None
