"""llama.cpp: one GGUF file of its architecture `eagle3`, for `llama-server -md draft.gguf --spec-type draft-eagle3`.

    g_0 = fc(streams entering target_layers)                   enc.output_norm over all three before it with norm_before_fc
    z = [attn_norm(E[t]); attn_norm_2(g_k)]                    read by attn_q, attn_k, attn_v
    out = u + ffn(ffn_norm(u)), u = g_k + attn(z)              with norm_before_residual: attn_norm_2(g_k) + attn(z)
    logits = output(output_norm(out)), g_{k+1} = out           row i is token d2t[i], the id itself

RoPE turns neighbouring channels, so q and k have their rows reordered; llama3's frequencies are divisors, `rope_freqs`. Matrices have the
export's dtype, norms are float32. Embeddings are the target's, and so is an output projection the head has none of.

The file has no tokenizer: llama.cpp loads `none` as that many nameless tokens, and drafting by eagle3 goes by ids.

Source: ggml-org/llama.cpp, src/models/eagle3.cpp, conversion/llama.py, common/speculative.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtptrain.exporters.eagle_names import D2T, eagle3_tensors, unchanged
from mtptrain.exporters.vllm_eagle import entering
from mtptrain.heads.eagle3 import Eagle3Config, Eagle3Head
from mtptrain.heads.layers import LayerConfig, Rope
from mtptrain.target.spec import TargetSpec

FILE = "draft.gguf"
_ARCH = "eagle3"
_STREAMS = 3
_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
"""What each type takes beside rope_theta."""
_ROPE_FIXED = {"beta_fast": 32, "beta_slow": 1, "truncate": True}
"""Values of yarn that the architecture reads no key for."""


@dataclass(slots=True)
class GgufFile:
    """Metadata by key, tensors by llama.cpp's names."""

    layout: str
    metadata: dict[str, Any]
    """bool, int (as uint32), float (as float32), str, or a list of int (as int32)."""
    tensors: dict[str, Tensor]
    """float32, float16, bfloat16 or int64."""

    def write(self, folder: Path) -> None:
        from gguf import GGMLQuantizationType, GGUFWriter

        writer = GGUFWriter(folder / FILE, _ARCH)
        add: dict[type, Callable[[str, Any], None]] = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        for key, value in self.metadata.items():
            add[type(value)](key, value)
        for name, tensor in self.tensors.items():
            if tensor.dtype is torch.bfloat16:  # numpy has no such type: bytes
                writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def why_not(config: Any, spec: TargetSpec) -> str | None:
    """The first thing of head or target that the architecture has no place for; None where it fits."""
    if not isinstance(config, Eagle3Config):
        return "its draft files hold eagle3 heads; its MTP layers are part of a target's own file"
    layer, streams = config.layer, ",".join(config.captures)
    reasons = []
    if len(config.captures) != _STREAMS:
        reasons.append(f"head.aux_captures={streams}: its eagle3 reads {_STREAMS} streams")
    elif entering(config.captures)[-1] >= spec.num_layers:
        reasons.append(f"head.aux_captures={streams}: it reads what enters a layer, and {config.captures[-1]} enters none")
    if config.fc_norm:
        reasons.append("head.fc_norm=true: its eagle3 norms the streams all at once (norm_before_fc) or not at all")
    if config.norm_output:
        reasons.append("head.norm_output=true: its eagle3 recycles the un-normed state")
    for key, value in (("attention_bias", layer.attention_bias), ("qk_norm", layer.qk_norm), ("sliding_window", layer.sliding_window)):
        if value:
            reasons.append(f"{key}={value}: its eagle3 has none")
    if spec.embed_scale != 1.0:
        reasons.append(f"embed_scale={spec.embed_scale:g}: its eagle3 applies none")
    if reason := _rope_why_not(layer.rope):
        reasons.append(reason)
    return reasons[0] if reasons else None


def to_gguf(head: Any, spec: TargetSpec, dtype: torch.dtype, rows_DH: Tensor | None = None) -> GgufFile:
    """The file. Call only where `why_not` is None. `rows_DH`: the target's rows of a reduced draft vocabulary.

    `dtype`: of the matrices; float32, float16 or bfloat16.
    """
    assert isinstance(head, Eagle3Head)
    layer = head.config.layer
    frequencies = Rope(layer).embedding.inv_freq  # anew: a head in bfloat16 has rounded ones
    named = eagle3_tensors(head, torch.float32, rows_DH)
    ids_D = named.pop(D2T, None)
    tensors = {_NAMES[name]: t.to(dtype) if t.dim() == 2 else t for name, t in named.items()}
    if head.lm_head is None and "lm_head.weight" in named:
        tensors["output.weight"] = unchanged(named["lm_head.weight"], dtype)
    for name, heads in (("blk.0.attn_q.weight", layer.num_heads), ("blk.0.attn_k.weight", layer.num_kv_heads)):
        tensors[name] = _interleaved(tensors[name], heads, 2 * len(frequencies))
    if ids_D is not None:
        assert head.draft_ids is not None
        tensors["d2t"] = head.draft_ids.cpu().contiguous()
    if layer.rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _plain_frequencies(layer.rope["rope_theta"], len(frequencies)) / frequencies
    return GgufFile("gguf", _metadata(head.config, spec, 2 * len(frequencies)), dict(sorted(tensors.items())))


def _metadata(config: Eagle3Config, spec: TargetSpec, rotary: int) -> dict[str, Any]:
    layer, ids = config.layer, entering(config.captures)
    values = {
        "vocab_size": spec.vocab_size,
        "context_length": max(layer.max_position_embeddings, spec.max_position_embeddings),
        "embedding_length": layer.hidden_size,
        "block_count": 1,
        "feed_forward_length": layer.intermediate_size,
        "attention.head_count": layer.num_heads,
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": float(layer.rms_norm_eps),
        "rope.dimension_count": rotary,
        **_rope_metadata(layer),
        "target_layers": ids,
        "extract_layers": ids,  # what the first versions with eagle3 call target_layers
        "target_hidden_size": spec.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
    }
    return {"tokenizer.ggml.model": "none"} | {f"{_ARCH}.{key}": value for key, value in values.items()}


def _rope_why_not(rope: dict[str, Any]) -> str | None:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_KEYS:
        return f"rope_type={kind}: its eagle3 knows {', '.join(_ROPE_KEYS)}"
    known = _ROPE_KEYS[kind] | {"rope_type", "rope_theta", "partial_rotary_factor"}
    odd = [f"{key}={value}" for key, value in rope.items() if key not in known and value not in (None, _ROPE_FIXED.get(key))]
    return f"rope_type={kind} with {odd[0]}: its eagle3 reads no key for it" if odd else None


def _rope_metadata(layer: LayerConfig) -> dict[str, Any]:
    rope = layer.rope
    base = {"rope.freq_base": float(rope["rope_theta"])}
    if rope.get("rope_type") not in ("linear", "yarn"):
        return base
    scaled = base | {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "linear":
        return scaled
    return scaled | {"rope.scaling.original_context_length": int(rope["original_max_position_embeddings"])}


def _plain_frequencies(theta: float, count: int) -> Tensor:
    """float32 [count]: radians a position of each pair, before any scaling."""
    return 1.0 / theta ** (torch.arange(count, dtype=torch.float32) / count)


def _interleaved(weight: Tensor, heads: int, rotary: int) -> Tensor:
    """Rows of q or k, head by head: those that turn together, i and i + rotary/2, become 2i and 2i + 1; the rest stay."""
    rows = weight.unflatten(0, (heads, -1))
    turned = rows[:, :rotary].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((turned, rows[:, rotary:]), dim=1).flatten(0, 1).contiguous()
