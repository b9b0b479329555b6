#!/usr/bin/env python3
"""Does a head train alike on any number of ranks, by any stage of ZeRO, and across a change of either in the middle?

    python tools/check_ranks.py [--ranks 1,2,4] [--zero 0,1,2,3] [--json FILE] [key=value ...]

The same batches an update for all: losses and weights may differ by rounding alone (sums in another order). Every run is compared with
the first, one process. `2, then 1` goes on from the checkpoint that two ranks wrote half-way, on one. On a CPU over gloo. Exit status 1
where a loss differs by more than 1e-5 of itself.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from mtptrain import manifest
from mtptrain.checkpoint import checkpoints
from mtptrain.cli import compose
from mtptrain.config import Config, DeepSpeedConfig
from mtptrain.files import write_json
from mtptrain.stages import precompute, prepare, train

_TRAINING = ["train.batch_tokens=384", "train.log_every=1", "train.checkpoint_every=3", "train.keep=100"]
BOUND = 1e-5
"""Largest relative difference of a loss. One update's rounding is 1e-7; AdamW carries it on."""


@dataclass(frozen=True)
class Way:
    """How a head is trained: on so many ranks, and from the middle on as `then` says."""

    ranks: int
    zero: int = 0
    then: "Way | None" = None

    def __str__(self) -> str:
        told = f"{self.ranks}" + (f" ZeRO-{self.zero}" if self.zero else "")
        return told if self.then is None else f"{told}, then {self.then}"


def ways(ranks: list[int], stages: list[int]) -> list[Way]:
    several = [n for n in ranks if n > 1]
    found = [Way(1), *(Way(n, zero) for n in several for zero in stages)]
    for two in several[:1]:
        for zero in stages:
            found += [Way(two, zero, then=Way(1)), Way(1, then=Way(two, zero))]
    return found


def trained(cfg: Config, way: Way) -> Path:
    """The folder of a head trained that way; of the first part of a way in two, which is there already, the first half is taken."""
    last = way.then or way
    chosen = replace(cfg.train, ranks=last.ranks, deepspeed=DeepSpeedConfig(stage=last.zero))
    config = replace(cfg, train=chosen, head=replace(cfg.head, label=_label(way)))
    if way.then is not None:
        whole = config.train_dir.parents[1] / _label(replace(way, then=None)) / "train"
        shutil.copytree(whole, config.train_dir)
        (config.train_dir / manifest.MANIFEST).unlink()
        saved = checkpoints(config.train_dir / "checkpoints")
        for late in saved[len(saved) // 2 :]:
            shutil.rmtree(late)
    train.run(config)
    return config.train_dir


def _label(way: Way) -> str:
    return str(way).replace(" ", "").replace(",", "-")


def found_in(folder: Path) -> tuple[dict[int, float], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {r["update"]: r["loss"] for r in rows if "loss" in r}, load_file(checkpoints(folder / "checkpoints")[-1] / "head.safetensors")


def compared(folder: Path, first: Path) -> dict[str, float]:
    losses, weights = found_in(folder)
    expected_losses, expected = found_in(first)
    if losses.keys() != expected_losses.keys():
        raise RuntimeError(f"{folder} logged updates {sorted(losses)}")
    return {
        "updates": len(losses),
        "loss": max(abs(losses[u] - expected_losses[u]) / expected_losses[u] for u in losses),
        "weights": max(
            float((weights[n].double() - w.double()).norm() / w.double().norm()) for n, w in expected.items() if w.is_floating_point()
        ),
    }


def _apart(weight: Tensor, expected: Tensor) -> float:
    return float((weight.double() - expected.double()).norm() / expected.double().norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--zero", default="0,1,2,3")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    ranks, stages = ([int(n) for n in text.split(",")] for text in (arguments.ranks, arguments.zero))
    if "train.accumulate" not in " ".join(arguments.overrides):
        arguments.overrides.append(f"train.accumulate={max(ranks)}")
    with tempfile.TemporaryDirectory() as folder:
        given = ["+recipe=tiny", "device=cpu", f"root={folder}", *_TRAINING]
        (cfg,) = compose([*given, *arguments.overrides])
        prepare.run(cfg, for_training=True)
        precompute.run(cfg)
        folders = {way: trained(cfg, way) for way in ways(ranks, stages)}
        first = next(iter(folders.values()))
        table = {str(way): compared(folder, first) for way, folder in folders.items()}
    print(f"{'ranks':28} {'updates':>8} {'loss':>10} {'weights':>10}   largest relative difference from one process")
    for name, row in table.items():
        print(f"{name:28} {row['updates']:8} {row['loss']:10.1e} {row['weights']:10.1e}")
    if arguments.json:
        write_json(arguments.json, table)
    worst = max(row["loss"] for row in table.values())
    print(f"largest: {worst:.1e}, allowed {BOUND:.0e}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
