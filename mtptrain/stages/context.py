"""What train, validate and export need of target, store and head, opened once."""

import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mtptrain import __version__, manifest
from mtptrain.checkpoint import load_checkpoint
from mtptrain.config import Config
from mtptrain.files import hash_json, read_json
from mtptrain.heads.mtp import MtpHead, build_head
from mtptrain.losses import LmHead, lm_head_of
from mtptrain.store.reader import Store
from mtptrain.target.ends import TargetEnds, load_ends
from mtptrain.target.model import pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec

BEST = "best"


@dataclass(slots=True)
class Context:
    """The target's ends on the device, in the compute dtype of training."""

    folder: Path
    spec: TargetSpec
    ends: TargetEnds
    lm_head: LmHead
    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> torch.autocast:
        """Mixed precision where the compute dtype asks for it; weights keep float32 masters."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)


def open_context(cfg: Config) -> Context:
    set_threads(cfg.threads)
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.train.dtype, device)
    folder = resolve_target(cfg.target)
    ends = load_ends(folder, dtype, device)
    return Context(folder, ends.spec, ends, lm_head_of(ends.spec, ends.lm_head_VH), device, dtype)


def store_fingerprint(cfg: Config) -> str:
    """Of the finished store's inputs: what a head was trained on."""
    found = manifest.require(cfg.store_dir, "the hidden-state store", "python -m mtptrain.precompute (with the same arguments)")
    return hash_json(found["inputs"])


def open_store(cfg: Config) -> Store:
    return Store.open(cfg.store_dir, ["final"])


def load_trained_head(cfg: Config, context: Context) -> tuple[MtpHead, dict[str, Any]]:
    """The best checkpoint's head in evaluation mode, and what its manifest says about the training."""
    found = manifest.require(cfg.train_dir, "the trained head", "python -m mtptrain.train (with the same arguments)")
    groups, _ = load_checkpoint(cfg.train_dir / BEST, f"delete {cfg.train_dir} and train again")
    head = build_head(cfg.head, context.spec)
    head.load_state_dict(groups["head"])
    return head.to(context.device).eval().requires_grad_(False), found


def trained_head_hash(cfg: Config) -> str:
    """Content hash of the best checkpoint's weights: which head a report or an export is about."""
    return read_json(cfg.train_dir / BEST / "state.json")["hashes"]["head"]


def versions() -> dict[str, str]:
    return {
        "mtptrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def as_plain(config: Any) -> dict[str, Any]:
    """A config group as JSON: enums by name."""
    return {k: _plain(v) for k, v in asdict(config).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return getattr(value, "name", value)
