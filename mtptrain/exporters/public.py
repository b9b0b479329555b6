"""Draft heads of public layouts, read as heads of ours, and our own `hf` export.

    SafeAILab, HASS                        EAGLE-1: fc, layers.0 (public_eagle.py); EAGLE-3: fc, midlayer, norm, d2t (public_eagle3.py)
    SpecForge, SGLang, TensorRT-LLM, vLLM  the same names, more keys in config.json
    speculators                            a config.json of its own; eagle3 calls its layer layers.0, eagle has fusion_fc, transformer
    hf                                     ours (public_hf.py)

Which one a folder holds is told by its config.json and tensor names. A `model.` before a name is dropped, as engines do. Weights are
safetensors, one file or sharded, or one pytorch_model.bin, of which nothing but tensors is unpickled. Nothing is used unchecked: a tensor
without a place in the head, a missing one or one of another shape is refused, as is a head for another target.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtptrain.exporters import public_eagle, public_eagle3, public_hf
from mtptrain.exporters.folder import CONFIG, WEIGHTS
from mtptrain.exporters.hf import KEY
from mtptrain.exporters.public_checkpoint import Checkpoint, Stored, refusal
from mtptrain.heads.head import DraftHead
from mtptrain.target.ends import INDEX, TargetEnds
from mtptrain.target.spec import TargetSpec

PICKLE = "pytorch_model.bin"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_SPECULATORS = "speculators_model_type"
_SPECULATORS_EAGLE = {"fusion_fc.": "fc.", "transformer.": "layers.0."}


def captures_in(folder: Path, spec: TargetSpec) -> list[str]:
    """Target states the checkpoint's head reads, `final` first (the teacher needs it). No weight is read. Raises as `import_head` does."""
    kind, found = _open(folder)
    if kind == "hf":
        return public_hf.captures(found, spec)
    return ["final", *public_eagle3.shape(found, spec).captures] if kind == "eagle3" else public_eagle.captures(found, spec)


def import_head(folder: Path, ends: TargetEnds) -> DraftHead:
    """The checkpoint as a head, float32 on the CPU. UserError where it is damaged, of an unknown layout, or made for another target."""
    kind, found = _open(folder)
    return {"hf": public_hf.read, "eagle": public_eagle.read, "eagle3": public_eagle3.read}[kind](found, ends)


def files_of(folder: Path) -> list[Path]:
    """The files that the head in `folder` is read from, and no other. Raises as `import_head` does where they can't be told."""
    _config(folder)
    weights = _weights(folder)
    shards = sorted(set(_weight_map(folder).values())) if weights == INDEX else []
    return [folder / file for file in (CONFIG, weights, *shards) if file is not None]


def _open(folder: Path) -> tuple[str, Checkpoint]:
    """The kind of head, and the checkpoint with SafeAILab's names (`layers.0` of eagle3 as `midlayer`); names and shapes alone are read."""
    config = _config(folder)
    stored = {item.name: item for item in _stored(folder)}
    if KEY in config:
        return "hf", Checkpoint(folder, config, stored)
    stored = _renamed(folder, stored, {"model.": ""})
    speculators = config.get(_SPECULATORS)
    if speculators is not None:
        if speculators not in ("eagle", "eagle3"):
            raise refusal(folder, f"{_SPECULATORS} is {speculators!r}", "mtptrain reads eagle and eagle3")
        renamed = {"layers.0.": "midlayer."} if speculators == "eagle3" else _SPECULATORS_EAGLE
        return speculators, Checkpoint(folder, config, _renamed(folder, stored, renamed), speculators=True)
    named = "Eagle3" in str(config.get("architectures"))
    if named or any(name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in stored):
        return "eagle3", Checkpoint(folder, config, _renamed(folder, stored, {"layers.0.": "midlayer."}))
    if "fc.weight" in stored and any(name.startswith("layers.0.") for name in stored):
        return "eagle", Checkpoint(folder, config, stored)
    some = ", ".join(sorted(stored)[:3]) or "none"
    raise refusal(
        folder, f"its tensors ({some}, ...) are of no layout that mtptrain reads", "give an EAGLE-1 or EAGLE-3 head, or an hf export"
    )


def _renamed(folder: Path, stored: dict[str, Stored], prefixes: dict[str, str]) -> dict[str, Stored]:
    renamed: dict[str, Stored] = {}
    for name, item in stored.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        ours = prefixes.get(prefix, "") + name.removeprefix(prefix)
        if ours in renamed:
            raise refusal(folder, f"{item.name} and {renamed[ours].name} are one tensor under two names", "keep one")
        renamed[ours] = item
    return renamed


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise refusal(folder, f"there is no {CONFIG}", "give the folder of a draft head") from e
    except OSError as e:
        raise refusal(folder, f"{CONFIG} can't be read ({e.strerror})", "give the folder of a draft head") from e
    except (ValueError, RecursionError) as e:
        raise refusal(folder, f"{CONFIG} is not valid JSON ({e})", "fetch the checkpoint again") from e
    if not isinstance(config, dict):
        raise refusal(folder, f"{CONFIG} holds no object", "fetch the checkpoint again")
    return config


def _weights(folder: Path) -> str | None:
    """The file the weights are read from, or found by: the first of those that are there."""
    return next((file for file in (WEIGHTS, INDEX, PICKLE) if (folder / file).exists()), None)


def _stored(folder: Path) -> Iterator[Stored]:
    """Every tensor of the checkpoint, its values not read yet."""
    weights = _weights(folder)
    if weights == WEIGHTS:
        yield from _of_safetensors(folder, WEIGHTS)
    elif weights == INDEX:
        weight_map = _weight_map(folder)
        found = {(item.name, file) for file in sorted(set(weight_map.values())) for item in _of_safetensors(folder, file)}
        for name, file in sorted(weight_map.items()):
            if (name, file) not in found:
                raise refusal(folder, f"{file} lacks {name}, which {INDEX} names", "fetch the checkpoint again")
        yield from (i for file in sorted(set(weight_map.values())) for i in _of_safetensors(folder, file) if weight_map.get(i.name) == file)
    elif weights == PICKLE:
        yield from _of_pickle(folder)
    else:
        raise refusal(folder, f"there are no weights ({WEIGHTS}, {INDEX} or {PICKLE})", "fetch the checkpoint again")


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(file) for file in weight_map.values()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        raise refusal(folder, f"{INDEX} is damaged ({e!r})", "fetch the checkpoint again") from e
    if bad := sorted(file for file in files if Path(file).name != file or not (folder / file).is_file()):
        raise refusal(folder, f"{INDEX} names {bad[0]!r}, which is not a file of the folder", "fetch the checkpoint again")
    return weight_map


def _of_safetensors(folder: Path, file: str) -> Iterator[Stored]:
    def read(name: str) -> Tensor:
        with safe_open(folder / file, framework="pt") as f:
            return f.get_tensor(name)

    try:
        with safe_open(folder / file, framework="pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 - it is no mapping
            described = [(name, tuple(s.get_shape()), _DTYPES.get(s.get_dtype())) for name, s in slices.items()]
    except (SafetensorError, OSError) as e:
        raise refusal(folder, f"{file} is damaged ({e})", "fetch the checkpoint again") from e
    for name, shape, dtype in described:
        yield Stored(name, shape, dtype, lambda name=name: read(name))  # type: ignore[misc]


def _of_pickle(folder: Path) -> Iterator[Stored]:
    try:
        tensors = torch.load(folder / PICKLE, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # damaged bytes make the reader raise anything
        what = f"{PICKLE} is damaged or holds more than tensors ({type(e).__name__})"
        raise refusal(folder, what, "fetch it again, or save it as safetensors where you trust it") from e
    if not isinstance(tensors, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()):
        raise refusal(folder, f"{PICKLE} holds no tensors by name", "save the head's state_dict")
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
        dtype = tensor.dtype if plain and tensor.dtype in _DTYPES.values() else None
        yield Stored(name, tuple(tensor.shape), dtype, lambda tensor=tensor: tensor.detach())  # type: ignore[misc]
