"""What train, validate and export need of target, store and head, opened once."""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mtptrain import __version__, manifest
from mtptrain.checkpoint import load_checkpoint
from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.exporters.public import captures_in, files_of, import_head
from mtptrain.files import hash_file, hash_json, read_hashed
from mtptrain.heads.build import head_from_record, kind_of
from mtptrain.heads.captures import captures_of
from mtptrain.heads.drafter import Drafter, bind
from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead, lm_head_of
from mtptrain.store.reader import Store
from mtptrain.target.ends import TargetEnds, load_ends
from mtptrain.target.model import pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec

BEST = "best"
_TRAIN_AGAIN = "delete {} and train again"


@dataclass(slots=True)
class Context:
    """The target's ends on the device, in the compute dtype of training."""

    folder: Path
    spec: TargetSpec
    ends: TargetEnds
    lm_head: LmHead
    device: torch.device
    dtype: torch.dtype

    def bind(self, head: DraftHead) -> Drafter:
        """The head on the target's ends."""
        return bind(head, self.ends)

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


def wanted_captures(cfg: Config, spec: TargetSpec) -> list[str]:
    """States that training the head, or measuring `head.checkpoint`, needs."""
    if cfg.head.checkpoint is None:
        return captures_of(cfg.head, spec)
    return captures_in(Path(cfg.head.checkpoint).expanduser(), spec)


def open_store(cfg: Config, captures: Sequence[str]) -> Store:
    """The finished store, with `final` and the captures checked."""
    return Store.open(cfg.store_dir, list(dict.fromkeys(("final", *captures))))


@dataclass(slots=True)
class TrainedHead:
    """A head to measure or export, in evaluation mode."""

    head: DraftHead
    weights: str
    """Content hash: which head a report or an export is about."""
    results: dict[str, Any]
    """What its training says about itself."""


def load_trained_head(cfg: Config, context: Context) -> TrainedHead:
    """The best checkpoint of the finished training, or without one `head.checkpoint` as it is."""
    if cfg.head.checkpoint is not None and not cfg.train_dir.exists():
        head = open_checkpoint(cfg, context)
        results = {"checkpoint": cfg.head.checkpoint, "parameters": sum(p.numel() for p in head.parameters())}
    else:
        results = manifest.require(cfg.train_dir, "the trained head", "python -m mtptrain.train (with the same arguments)")["results"]
        groups, state = load_checkpoint(cfg.train_dir / BEST, _TRAIN_AGAIN.format(cfg.train_dir))
        head = head_from_record(state["head"])
        head.load_state_dict(groups["head"])
    return TrainedHead(head.to(context.device).eval().requires_grad_(False), trained_head_hash(cfg), results)


def open_checkpoint(cfg: Config, context: Context) -> DraftHead:
    """The head of `head.checkpoint`. UserError where it is none of `head.kind` for this target."""
    assert cfg.head.checkpoint is not None
    head = import_head(Path(cfg.head.checkpoint).expanduser(), context.ends)
    if (kind := kind_of(head)) is not cfg.head.kind:
        raise UserError(f"head.checkpoint={cfg.head.checkpoint} is of kind {kind.name}; use head={kind.name}")
    ids = context.spec.vocab_size if head.draft_ids is None else len(head.draft_ids)
    print(f"head.checkpoint={cfg.head.checkpoint}: its own shape, reads {', '.join(head.captures)}, drafts {ids:,} ids", flush=True)
    return head


def trained_head_hash(cfg: Config) -> str:
    """Content hash of the head that `load_trained_head` loads."""
    if cfg.head.checkpoint is not None and not cfg.train_dir.exists():
        return checkpoint_hash(cfg)
    path = cfg.train_dir / BEST / "state.json"
    if (state := read_hashed(path)) is None:
        raise UserError(f"{path} is missing or damaged; {_TRAIN_AGAIN.format(cfg.train_dir)}")
    return str(state["hashes"]["head"])


def checkpoint_hash(cfg: Config) -> str:
    """Content hash of the files that `head.checkpoint` is read from, whatever its layout."""
    assert cfg.head.checkpoint is not None
    return hash_json({file.name: hash_file(file) for file in files_of(Path(cfg.head.checkpoint).expanduser())})


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
