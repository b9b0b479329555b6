#!/usr/bin/env python3
"""Responses and hidden states: the vLLM backend against the transformers backend, the same prompts, in one run.

    python tools/bench_engine.py [overrides of the recipe] [--prompts N] [--json FILE]

Each side runs the prepare and precompute jobs as a user does, in a run folder of its own, in turn. Seconds are those of the stage
alone and of the whole job (start, loading and parity included); memory is the largest sum of resident sizes of the job and what it
started.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from mtptrain.data.self_prompts import own_prompts
from mtptrain.store.reader import Store

SIDES = ("hf", "vllm")


def run_job(job: str, overrides: list[str], log: Path) -> dict[str, Any]:
    """One job from start to end: seconds, peak memory of its process tree, and what it printed."""
    began, peak = time.monotonic(), 0
    with open(log, "w") as out:
        process = psutil.Popen(
            [sys.executable, "-m", f"mtptrain.{job}", "+recipe=smollm2", "head=mtp", *overrides], stdout=out, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            peak = max(peak, _resident(process))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"error: {job} ended with status {process.returncode}: {log.read_text()[-2000:]}")
    return {"job_seconds": round(time.monotonic() - began, 1), "peak_mb": peak >> 20}


def _resident(process: psutil.Popen) -> int:
    total = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += each.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure(side: str, folder: Path, arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    common = [f"root={folder}", f"name={side}", "data.source=files", f"data.train=[{folder / 'prompts.json'}]", "data.limit=null", *rest]
    prepare = run_job("prepare", [*common, f"data.responses.backend={side}"], folder / f"prepare-{side}.log")
    responses = [json.loads(line) for line in (folder / side / "data" / "responses.jsonl").read_text().splitlines()]
    tokens = sum(len(r["tokens"]) for r in responses)
    data = folder / side / "data"
    prepare |= {"tokens": tokens, "stage_seconds": round(_between(data / "started.json", data / "manifest.json"), 1)}
    precompute = run_job(
        "precompute", [*common, f"data.responses.backend={side}", f"precompute.backend={side}"], folder / f"precompute-{side}.log"
    )
    store = folder / side / "store"
    precompute |= {"tokens": sum(e.length for e in Store.open(store, ["final"]).entries)}
    precompute |= {"stage_seconds": round(_between(store / "started.json", store / "manifest.json"), 1)}
    for each in (prepare, precompute):
        each["tokens_per_second"] = round(each["tokens"] / each["stage_seconds"], 1)
    return {"responses": prepare, "precompute": precompute, "answers": {r["id"]: r["tokens"] for r in responses}}


def _between(first: Path, last: Path) -> float:
    return last.stat().st_mtime - first.stat().st_mtime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=128, help="of the project's own")
    parser.add_argument("--json", type=Path)
    arguments, rest = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp())
    prompts = own_prompts()[: arguments.prompts]
    (folder / "prompts.json").write_text(json.dumps([{"id": p["id"], "messages": p["messages"]} for p in prompts]))
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    found = {side: measure(side, folder, arguments, rest) for side in SIDES}
    hf, vllm = (found[side].pop("answers") for side in SIDES)
    found["same_answers"] = f"{sum(vllm[name] == tokens for name, tokens in hf.items())} of {len(hf)}"
    for stage in ("responses", "precompute"):
        ratio = found["vllm"][stage]["tokens_per_second"] / found["hf"][stage]["tokens_per_second"]
        print(f"{stage}: vLLM {ratio:.2f} times the transformers backend's tokens/s (stage), loading of the engine included")
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print((folder / "precompute-vllm.log").read_text().split("precompute: engine against")[-1].splitlines()[0])
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
