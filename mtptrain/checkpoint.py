"""Training checkpoints: safetensors by parameter name plus JSON, atomic, hashed, independent of the world size.

train/checkpoints/00000400/{head,optimizer,ema}.safetensors + state.json     state.json holds the files' hashes and its own
"""

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mtptrain.errors import UserError
from mtptrain.files import hash_file, read_hashed, save_tensors, with_hash, write_folder_atomic, write_json

_STATE = "state.json"


def save_checkpoint(folder: Path, groups: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
    """Write each tensor group to `<group>.safetensors` and the state beside them; the folder appears whole."""

    def write(tmp: Path) -> None:
        for group, tensors in groups.items():
            save_tensors(tmp / f"{group}.safetensors", {name: t.detach().cpu().contiguous() for name, t in tensors.items()})
        hashes = {group: hash_file(tmp / f"{group}.safetensors") for group in groups}
        write_json(tmp / _STATE, with_hash({"hashes": hashes, **state}))

    write_folder_atomic(folder, write)


def load_checkpoint(folder: Path, mend: str = "") -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensor groups and the state. A damaged file is named, never silently passed over; `mend` is what to do then."""
    mend = mend or f"delete {folder} to resume from the checkpoint before it"
    if not (folder / _STATE).exists():
        raise UserError(f"{folder} has no {_STATE}; {mend}")
    state = read_hashed(folder / _STATE)
    if state is None:
        raise UserError(f"{folder / _STATE} is damaged or was changed; {mend}")
    groups = {}
    for group, expected in state["hashes"].items():
        file = folder / f"{group}.safetensors"
        if not file.exists() or hash_file(file) != expected:
            raise UserError(f"{file} is missing or damaged; {mend}")
        groups[group] = load_file(file)
    return groups, state


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders in `folder`, oldest first."""
    if not folder.exists():
        return []
    return sorted(f for f in folder.iterdir() if f.is_dir() and f.name.isdigit())


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
