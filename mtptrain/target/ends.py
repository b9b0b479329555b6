"""The frozen ends of a target, read tensor by tensor: embeddings, final norm, lm_head, and its last layer if asked.

Shapes: V vocabulary, H hidden size.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from mtptrain.errors import UserError
from mtptrain.files import hash_bytes, hash_file, hash_json, read_hashed, with_hash, write_json
from mtptrain.target.cache import cache_dir, locked
from mtptrain.target.spec import FAMILIES, TargetSpec, read_spec

INDEX = "model.safetensors.index.json"
_PREFIXES = ("model.", "")
"""`model.` in a causal-LM checkpoint; nothing in one saved from the bare decoder."""


@dataclass(slots=True)
class TargetEnds:
    """What training holds of a target. The tensors are frozen buffers, never parameters."""

    spec: TargetSpec
    embed_VH: Tensor
    final_norm_H: Tensor
    lm_head_VH: Tensor
    """`embed_VH` itself where the target ties them."""


def load_ends(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetEnds:
    """Read the ends of the target in `folder` in `dtype` on `device`; no other weight is read.

    Tied means what transformers makes of the checkpoint: the config ties them and it holds no lm_head of its own, or an equal one.
    UserError where a weight is missing, is not [V, H], or the folder holds no safetensors.
    """
    spec = read_spec(folder)
    files = tensor_files(folder)
    embed_VH = _read(files, _name(files, "embed_tokens.weight", folder), device)
    norm_H = _read(files, _name(files, "norm.weight", folder), device)
    head_VH = _read(files, "lm_head.weight", device) if "lm_head.weight" in files else None
    if head_VH is None and not spec.tie_word_embeddings:
        raise UserError(f"{folder} has no lm_head.weight though its config.json says tie_word_embeddings=false; fetch it again")
    if head_VH is None or (spec.tie_word_embeddings and torch.equal(head_VH, embed_VH)):
        head_VH = embed_VH
    for name, weight, shape in (
        ("embed_tokens.weight", embed_VH, (spec.vocab_size, spec.hidden_size)),
        ("norm.weight", norm_H, (spec.hidden_size,)),
        ("lm_head.weight", head_VH, (spec.vocab_size, spec.hidden_size)),
    ):
        if weight.shape != shape:
            raise UserError(f"{folder}: {name} is {list(weight.shape)}, but config.json says {list(shape)}; they do not belong together")
    tied = head_VH is embed_VH
    embed_VH = embed_VH.to(dtype)
    return TargetEnds(spec, embed_VH, norm_H.to(dtype), embed_VH if tied else head_VH.to(dtype))


def load_last_layer(folder: Path) -> dict[str, Tensor]:
    """Weights of the target's last decoder layer, as stored, by their names inside the layer.

    `self_attn.{q,k,v,o}_proj.*`, `self_attn.{q,k}_norm.weight`, `mlp.{gate,up,down}_proj.*`, `input_layernorm.weight`,
    `post_attention_layernorm.weight`. Fused matrices (Phi-3) are split; a residual multiplier (Granite) is folded into the
    matrices whose output it scales. UserError for a layer of another form.
    """
    spec = read_spec(folder)
    family = FAMILIES[spec.model_type]
    if family.odd_layer:
        raise UserError(f"head.init=last_layer: not possible for a {spec.model_type} target, {family.odd_layer}; use head.init=random")
    files = tensor_files(folder)
    layer = f"layers.{spec.num_layers - 1}."
    prefix = _name(files, f"{layer}input_layernorm.weight", folder).removesuffix("input_layernorm.weight")
    weights = {name.removeprefix(prefix): _read(files, name, torch.device("cpu")) for name in files if name.startswith(prefix)}
    if family.fused:
        weights = _unfuse(weights, spec)
    if spec.residual_scale != 1.0:
        for name in weights:
            if name.startswith(("self_attn.o_proj.", "mlp.down_proj.")):
                weights[name] = weights[name] * spec.residual_scale
    return weights


def weights_hash(folder: Path) -> str:
    """Content hash of config.json and every safetensors file of `folder`; a file is read once per (path, size, times).

    The times are mtime, and ctime, which nobody can set: a copy that keeps the old file's mtime is read all the same.
    """
    paths = [folder / "config.json", *sorted(set(tensor_files(folder).values()))]
    size = sum(path.stat().st_size for path in paths)
    quiet = size < 4 << 30
    return hash_json({path.name: _cached_hash(path) for path in tqdm(paths, "hashing target weights", disable=quiet)})


def tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of the checkpoint lies: a sharded index, or the one file (model.safetensors)."""
    if (folder / INDEX).exists():
        try:
            weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError) as e:
            raise UserError(f"{folder / INDEX} is damaged ({e!r}); fetch the target again") from e
        if missing := sorted({file for file in weight_map.values() if not (folder / file).exists()}):
            raise UserError(f"{folder} lacks {missing[0]} that {INDEX} names ({len(missing)} missing); fetch the target again")
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return dict.fromkeys(_names_in(files[0]), files[0])
    if files:
        raise UserError(f"{folder} has {len(files)} safetensors files and no {INDEX}; fetch the target again")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UserError(f"{folder} has only pickled weights, which mtptrain does not load; save them as safetensors (save_pretrained does)")
    raise UserError(f"{folder} has no *.safetensors weights; target.path must be a complete Hugging Face model folder")


def _name(files: dict[str, Path], suffix: str, folder: Path) -> str:
    for prefix in _PREFIXES:
        if prefix + suffix in files:
            return prefix + suffix
    raise UserError(f"{folder} has no tensor {_PREFIXES[0]}{suffix}; the checkpoint is incomplete or of another form")


def _names_in(path: Path) -> Iterator[str]:
    try:
        with safe_open(path, framework="pt") as f:
            yield from f.keys()
    except SafetensorError as e:
        raise UserError(f"{path} is damaged ({e}); fetch the target again") from e


def _read(files: dict[str, Path], name: str, device: torch.device) -> Tensor:
    with ExitStack() as stack:
        try:
            return stack.enter_context(safe_open(files[name], framework="pt", device=str(device))).get_tensor(name)
        except SafetensorError as e:
            raise UserError(f"{files[name]} is damaged at {name} ({e}); fetch the target again") from e


def _unfuse(weights: dict[str, Tensor], spec: TargetSpec) -> dict[str, Tensor]:
    """Split `qkv_proj` and `gate_up_proj` by rows."""
    kv = spec.num_kv_heads * spec.head_dim
    parts = {
        "self_attn.qkv_proj.weight": (("q", "k", "v"), [spec.num_heads * spec.head_dim, kv, kv]),
        "mlp.gate_up_proj.weight": (("gate", "up"), [spec.intermediate_size] * 2),
    }
    split = {}
    for name, weight in weights.items():
        if name not in parts:
            split[name] = weight
            continue
        letters, rows = parts[name]
        module = name.split(".")[0]
        split |= {f"{module}.{letter}_proj.weight": piece for letter, piece in zip(letters, weight.split(rows), strict=True)}
    return split


def _cached_hash(path: Path) -> str:
    stat = path.stat()
    where = str(path.resolve())
    key = {"path": where, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    entry = cache_dir() / "hashes" / f"{hash_bytes(where.encode())}.json"
    with locked(entry):
        known = read_hashed(entry) if entry.exists() else None  # a damaged one is made anew
        if known is not None and known["key"] == key:
            return str(known["digest"])
        digest = hash_file(path)
        write_json(entry, with_hash({"key": key, "digest": digest}))
        return digest
