"""An opened checkpoint of a public layout: checks of names, shapes, dtypes and values, and its decoder layer's shape.

Legend: H hidden, V vocabulary of the target.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mtptrain.errors import UserError
from mtptrain.heads.layers import LayerConfig, Rope
from mtptrain.target.spec import TargetSpec, full_config, rope_of

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
UNTRUSTED = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, StrictDataclassError, TypeError, ValueError)
"""What building a RoPE or a head raises for values of any kind: transformers and torch trust them."""
_LONGEST = 400
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
"""Counts of which no default is anybody's head."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_REASONS = (
    (r"layers\.[1-9]|^additional_layers\.", "mtptrain's heads have one layer"),
    (r"\.(weight_scale|input_scale|scales|qweight|qzeros|g_idx|weight_packed|weight_zero_point)$", "it is of a quantised checkpoint"),
    (r"[qk]_norm\.", "the layer is a Llama layer, without q and k norms"),
    (r"^[eh]norm\.", "this is an MTP head, of which mtptrain reads hf exports alone"),
    (r"\.bias$", "mtptrain's EAGLE heads have no biases but EAGLE-1's on fc"),
)
"""Why a tensor has no place, by its name."""


def refusal(folder: Path, what: str, mend: str) -> UserError:
    """One line, whatever a damaged file put into `what`."""
    plain = " ".join(what.split())
    return UserError(f"head.checkpoint={folder}: {plain if len(plain) <= _LONGEST else plain[:_LONGEST] + '...'}; {mend}")


@dataclass(slots=True)
class Stored:
    """A tensor in a file. `name`: the file's; `dtype` None: one that no layout has, or not a dense tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]


@dataclass(slots=True)
class Checkpoint:
    folder: Path
    config: dict[str, Any]
    stored: dict[str, Stored]
    """By SafeAILab's names."""
    speculators: bool = False

    def refuse(self, what: str, mend: str) -> UserError:
        return refusal(self.folder, what, mend)

    def check(self, expected: dict[str, tuple[int, ...]], others: Iterable[str] = ()) -> None:
        """UserError unless the weights are exactly `expected`, by name and shape; `others` are looked at by the caller.

        The inverse frequencies of a rotary embedding are ignored: config.json says them.
        """
        for name in sorted(set(self.stored) - set(expected) - set(others)):
            if not name.endswith("rotary_emb.inv_freq"):
                reason = next((why for pattern, why in _REASONS if re.search(pattern, name)), "mtptrain's head has no place for it")
                raise self.refuse(
                    f"{self.stored[name].name!r} would change what the head computes ({reason})", "this head can't be imported"
                )
        for name, shape in expected.items():
            self.check_one(name, shape, FLOATS)

    def check_one(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if name not in self.stored:
            raise self.refuse(f"{name} is missing", "fetch the checkpoint again")
        found = self.stored[name]
        if found.shape != shape:
            raise self.refuse(
                f"{found.name} is {list(found.shape)}, but config.json and target make it {list(shape)}", "they do not belong together"
            )
        if found.dtype not in dtypes:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(f"{found.name} is not a plain tensor of {kinds}", "quantised checkpoints can't be imported")

    def weight(self, name: str) -> Tensor:
        """A checked weight, float32."""
        weight = self.stored[name].read().to(torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise self.refuse(f"{self.stored[name].name} holds values that are not finite", "fetch the checkpoint again")
        return weight

    def check_copy(self, name: str, target_VH: Tensor, whose: str) -> None:
        """A copy of the target's matrix in the file must be bit-equal, in the file's dtype or in the one mtptrain computes in."""
        if name not in self.stored:
            return
        self.check_one(name, tuple(target_VH.shape), FLOATS)
        theirs, ours = self.stored[name].read(), target_VH.detach().cpu()
        if not (torch.equal(theirs, ours.to(theirs.dtype)) or torch.equal(theirs.to(ours.dtype), ours)):
            raise self.refuse(f"{self.stored[name].name} is not the target's", f"mtptrain's heads use {whose}; this head can't be imported")

    def flag(self, default: bool, values: dict[str, Any]) -> bool:
        """A switch that config.json may say at several places (`values`, by where); UserError where they disagree."""
        said = {where: value for where, value in values.items() if value is not None}
        if bad := [where for where, value in said.items() if not isinstance(value, bool)]:
            raise self.refuse(f"config.json: {bad[0]}={said[bad[0]]!r} is not true or false", "mend it")
        if len(set(said.values())) > 1:
            raise self.refuse(f"config.json says both {' and '.join(f'{w}={v}'.lower() for w, v in said.items())}", "mend it")
        return next(iter(said.values()), default)


def llama_layer(found: Checkpoint, values: dict[str, Any], spec: TargetSpec, attention_input: int) -> LayerConfig:
    """The head's layer from the Llama keys `values`. What they may leave out is LlamaConfig's default, as for engines.

    `sliding_window` is passed over: no engine's class of these layouts reads it from there.

    RoPE and max_position_embeddings are the checkpoint's own. UserError for a head of another target, more than one layer, a quantised
    checkpoint, or a layer that is not Llama's.
    """
    for config in (found.config, values):
        if key := next((key for key in ("quantization_config", "compression_config") if config.get(key)), None):
            raise found.refuse(f"config.json has {key}", "quantised checkpoints can't be imported")
    if spec.embed_scale != 1.0:
        raise found.refuse(f"the target scales its embeddings by {spec.embed_scale:g}, EAGLE heads read them unscaled", "use head=mtp")
    _check_kind(found, values)
    full = _full(found, values)
    for key, ours in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size)):
        if getattr(full, key) != ours:
            raise found.refuse(f"{key} is {getattr(full, key)}, the target's {ours}", "this head was made for another target")
    heads, kv_heads = full.num_attention_heads, full.num_key_value_heads
    if heads % kv_heads or full.head_dim % 2:
        raise found.refuse(f"{heads} heads of {full.head_dim} on {kv_heads} key heads fit no attention", "mend config.json")
    return LayerConfig(
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=full.head_dim,
        rms_norm_eps=full.rms_norm_eps,
        max_position_embeddings=full.max_position_embeddings,
        rope=rope_of(full),
        input_norm=False,
        attention_input=attention_input,
    )


def layer_shapes(layer: LayerConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Weights of a Llama layer after its input norm, by name."""
    size, width, inner = layer.hidden_size, layer.attention_input or layer.hidden_size, layer.intermediate_size
    rows, kv_rows = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (rows, width),
        "self_attn.k_proj": (kv_rows, width),
        "self_attn.v_proj": (kv_rows, width),
        "self_attn.o_proj": (size, rows),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
        "post_attention_layernorm": (size,),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def check_rope(found: Checkpoint, layer: LayerConfig) -> None:
    """UserError where the rotary embedding can't be built. Call once the weights have the layer's shapes."""
    try:
        usable = bool(torch.isfinite(Rope(layer).embedding.inv_freq).all())
    except UNTRUSTED as e:
        raise found.refuse(f"config.json: RoPE of {layer.rope!r} can't be built ({e!r})", "mend it") from e
    if not usable:
        raise found.refuse(f"config.json: RoPE of {layer.rope!r} has frequencies that are not finite", "mend it")


def _check_kind(found: Checkpoint, values: dict[str, Any]) -> None:
    """What would make the layer, or what is done with it, another than Llama's."""
    usual: dict[str, tuple[Any, ...]] = {
        "num_hidden_layers": (1, None),
        "hidden_act": ("silu", "swish", None),
        **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias"), (False, None)),
        "logit_scale": (1, None),
        "parallel_drafting": (False, None),
    }
    if found.speculators:
        usual["model_type"] = ("llama", None)
    for key, allowed in usual.items():
        if not any(values.get(key) is a or values.get(key) == a for a in allowed):
            raise found.refuse(f"config.json: {key}={values.get(key)!r}, mtptrain's head has {allowed[0]!r}", "this head can't be imported")
    if "sliding_attention" in str(values.get("layer_types")):
        raise found.refuse("config.json: its layer has sliding attention, mtptrain's attends to everything", "this head can't be imported")


def _full(found: Checkpoint, values: dict[str, Any]) -> Any:
    """`values` as a LlamaConfig, numbers checked. A RoPE in both schemas must be one RoPE: loaders differ in which they believe."""
    given = {key: values[key] for key in (*_COUNTS, *_ROPE, "rms_norm_eps") if values.get(key) is not None}
    for key in _COUNTS:
        if key in _NEEDED and key not in given:
            raise found.refuse(f"config.json has no {key}", "fetch the checkpoint again")
        if key in given and not (type(given[key]) is int and 0 < given[key] < 1 << 31):
            raise found.refuse(f"config.json: {key}={given[key]!r} is not a positive whole number", "mend it")
    older = given.pop("rope_scaling", None) if given.get("rope_parameters") else None
    try:
        full = full_config({"model_type": "llama", **given})
        rope = rope_of(full)
        if older and _scaling(full_config({"model_type": "llama", **given, "rope_parameters": None, "rope_scaling": older})) != _scaling(
            full
        ):
            raise UserError(f"rope_scaling={older!r} and rope_parameters={given['rope_parameters']!r} are not the same RoPE")
    except (*UNTRUSTED, UserError) as e:
        raise found.refuse(f"config.json is not a valid Llama config ({e})", "mend it") from e
    numbers: dict[str, Any] = {"rms_norm_eps": full.rms_norm_eps, "rope_theta": rope.get("rope_theta")}
    for key, value in numbers.items():
        if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            raise found.refuse(f"config.json: {key}={value!r} is not a positive number", "mend it")
    return full


def _scaling(full: Any) -> dict[str, Any]:
    return {key: value for key, value in rope_of(full).items() if key != "rope_theta"}
