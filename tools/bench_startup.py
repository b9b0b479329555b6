#!/usr/bin/env python3
"""How long a command takes before it does anything: help, and mistakes that must be told before torch is imported.

    python tools/bench_startup.py [--rounds N] [--json FILE]

Each command runs in a process of its own, in turn; the baseline in the same run is Python importing hydra, which the commands are built on.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = "import hydra"
COMMANDS: dict[str, list[str]] = {
    BASELINE: ["-c", "import hydra"],
    "--help": ["-m", "mtptrain.train", "--help"],
    "unknown recipe": ["-m", "mtptrain.train", "+recipe=smolm2"],
    "unknown key": ["-m", "mtptrain.train", "+recipe=smollm2", "train.lrr=1"],
    "value out of range": ["-m", "mtptrain.train", "+recipe=smollm2", "train.steps=99"],
    "--cfg job": ["-m", "mtptrain.train", "+recipe=smollm2", "--cfg", "job"],
    "mistake in a sweep's last run": ["-m", "mtptrain.train", "-m", "+recipe=smollm2", "train.steps=1,2,99"],
}


def seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.rounds):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    base = statistics.median(taken[BASELINE])
    found = {
        name: {
            "median_s": round(statistics.median(all_s), 3),
            "slowest_s": round(max(all_s), 3),
            "ratio": round(statistics.median(all_s) / base, 2),
        }
        for name, all_s in taken.items()
    }
    for name, row in found.items():
        print(f"{name:30} median {row['median_s']:.2f} s, slowest {row['slowest_s']:.2f} s, {row['ratio']:.1f} x `{BASELINE}`")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
