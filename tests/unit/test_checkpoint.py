"""Checkpoints: exact round trip, damage named, never silently passed over."""

import os
from pathlib import Path

import pytest
import torch

from mtptrain.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from mtptrain.errors import UserError


def saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    groups = {"head": {"a.weight": torch.randn(3, 2)}, "optimizer": {"a.weight.step": torch.tensor(7.0)}}
    save_checkpoint(folder, groups, {"progress": {"update": 7}})
    return groups


def test_round_trip_is_exact(tmp_path: Path) -> None:
    groups = saved(tmp_path / "00000007")
    loaded, state = load_checkpoint(tmp_path / "00000007")
    assert torch.equal(loaded["head"]["a.weight"], groups["head"]["a.weight"])
    assert torch.equal(loaded["optimizer"]["a.weight.step"], groups["optimizer"]["a.weight.step"])
    assert state["progress"] == {"update": 7}


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "state"])
def test_fault_18_an_unreadable_checkpoint_is_named_not_skipped(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "00000007"
    saved(folder)
    file = folder / ("state.json" if damage == "state" else "head.safetensors")
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=file.name):
        load_checkpoint(folder)


def test_newest_are_kept_in_order(tmp_path: Path) -> None:
    for update in (5, 20, 100):
        saved(tmp_path / f"{update:08d}")
    (tmp_path / ".00000300.tmp").mkdir()
    assert [f.name for f in checkpoints(tmp_path)] == ["00000005", "00000020", "00000100"]
    prune(tmp_path, 2)
    assert [f.name for f in checkpoints(tmp_path)] == ["00000020", "00000100"]


def test_an_exported_folder_can_be_read_by_who_may_read_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "c", {"head": {"w": torch.zeros(2)}}, {})
    finally:
        os.umask(before)
    assert {f.name: f.stat().st_mode & 0o777 for f in (tmp_path / "c").iterdir()} == {"head.safetensors": 0o640, "state.json": 0o640}
