#!/usr/bin/env python3
"""The demo as a newcomer runs it: a fresh clone, no caches, one command. Wall time, peak memory, acceptance.

    python3 tools/bench_demo.py [--json FILE] [--keep FOLDER]

Needs git and a Python that tools/demo accepts; nothing installed. Peak memory is the largest resident size of any one process.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD = "runs/smollm2/heads/lookup"


def run_demo(folder: Path) -> dict[str, object]:
    """Clone into `folder`, run tools/demo there with an empty cache of its own, and read what it left."""
    clone = folder / "mtptrain"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    environment = os.environ | {"MTPTRAIN_CACHE": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    done = subprocess.run([str(clone / "tools/demo")], env=environment, check=False)
    seconds = time.monotonic() - began
    if done.returncode:
        sys.exit(f"error: tools/demo ended with status {done.returncode}")
    report = json.loads((clone / HEAD / "report/report.json").read_text())
    stages = {}
    head = HEAD.removeprefix("runs/smollm2/")
    for stage in ("data", "store", f"{head}/train", f"{head}/report"):
        manifest = clone / "runs/smollm2" / stage
        stages[stage] = round((manifest / "manifest.json").stat().st_mtime - (manifest / "started.json").stat().st_mtime)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seconds": round(seconds),
        "stage_seconds": stages,
        "peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "supervised_rows": report["training"]["supervised_rows"],
        "by_k": {k: m["overall"]["mean_accepted_length"] for k, m in report["by_k"].items()},
        "walk": report["walk"]["overall"],
        "measured": {n: report[n] and report[n]["overall"] for n in ("reference", "engine")},
        "baselines": {n: m["overall"] for n, m in (report["baselines"] or {}).items()},
        "speed": report["speed"],
        "expected_at_temperature_1": report["expected_at_temperature_1"],
        "certificate": report["certificate"],
        "proof": report["proof"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="run in this new folder and leave it")
    arguments = parser.parse_args()
    if arguments.keep:
        if arguments.keep.exists():
            parser.error(f"--keep {arguments.keep}: is there already; name a new folder")
        arguments.keep.mkdir(parents=True)
        found = run_demo(arguments.keep)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = run_demo(Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
