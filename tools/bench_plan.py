#!/usr/bin/env python3
"""What `plan` foretells against what the stages then take: tokens a second and peak memory of prepare, precompute and train.

    python tools/bench_plan.py [--json FILE] [key=value ...]

The run is made anew in a temporary folder (a few minutes): `plan` first, with `plan.measure=true` and without, then the stages, each in a
process of its own.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import SMALL, apart, save

from mtptrain import manifest
from mtptrain.cli import compose
from mtptrain.data.responses import Completed, Request
from mtptrain.estimate import Plan, estimate
from mtptrain.stages import precompute, prepare, train
from mtptrain.stages.generation import Target
from mtptrain.stages.plan import calibrate, measure_flops_per_second, seconds
from mtptrain.target.model import pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec

STAGES = ("prepare", "precompute", "train")


def foretell(overrides: list[str], measured: bool) -> dict[str, Any]:
    """Of each stage tokens a second and bytes."""
    cfg = compose(overrides)[0]
    set_threads(cfg.threads)
    width = pick_dtype(cfg.target.dtype, pick_device(cfg.device)).itemsize
    plan: Plan = estimate(cfg, width, spec=read_spec(resolve_target(cfg.target)))
    began = time.monotonic()
    if measured:
        calibrate(cfg, plan)
    rates = {s.rows: measure_flops_per_second(cfg, plan.spec, s.rows) for s in plan.stages.values() if s.flops}
    found: dict[str, Any] = {"seconds": time.monotonic() - began}
    for name, stage in plan.stages.items():
        taken = seconds(stage, rates)
        found[name] = {"tokens_per_second": stage.tokens / taken if taken else None, "bytes": stage.memory}
    return found


def run_prepare(overrides: list[str]) -> dict[str, Any]:
    """The rate of generation alone, as a plan means it."""
    tokens, taken = 0, 0.0
    generate = Target.generate

    def timed(self: Target, requests: Sequence[Request], *options: Any) -> Iterator[list[Completed]]:
        nonlocal tokens, taken
        self._loaded()
        began = time.monotonic()
        for answers in generate(self, requests, *options):
            tokens += sum(len(answer.tokens) for answer in answers)
            yield answers
        taken += time.monotonic() - began

    Target.generate = timed  # type: ignore[method-assign]
    prepare.run(compose(overrides)[0], for_training=True)
    return {"tokens_per_second": tokens / taken}


def run_precompute(overrides: list[str]) -> dict[str, Any]:
    cfg = compose(overrides)[0]
    taken = 0.0
    compute = precompute._compute

    def timed(*arguments: Any) -> float:
        nonlocal taken
        taken = compute(*arguments)
        return taken

    precompute._compute = timed
    precompute.run(cfg)
    return {"tokens_per_second": manifest.require(cfg.store_dir, "", "")["results"]["tokens"] / taken}


def run_train(overrides: list[str]) -> dict[str, Any]:
    cfg = compose(overrides)[0]
    train.run(cfg)
    results = manifest.require(cfg.train_dir, "", "")["results"]
    return {"tokens_per_second": results["tokens"] / results["seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as root:
        wanted = [*SMALL, "head=lookup", "train.max_updates=60", *overrides, f"root={root}"]
        plans = {"measured": foretell(wanted, measured=True), "from sizes": foretell(wanted, measured=False)}
        took = {name: apart(run, wanted) for name, run in zip(STAGES, (run_prepare, run_precompute, run_train), strict=True)}
        again = foretell(wanted, measured=True)  # of what prepare has counted
    print(f"\nmeasuring took {plans['measured']['seconds']:.0f} s")
    head = ["stage", "tokens/s: measured", "again, tokens counted", "from products alone", "real", "peak: measured", "from sizes", "real"]
    print(f"| {' | '.join(head)} |")
    print("|---|---|---|---|---|---|---|---|")
    for name in STAGES:
        real, cells = took[name], []
        for plan in (plans["measured"], again, plans["from sizes"]):
            rate = plan[name]["tokens_per_second"]
            cells.append("-" if rate is None else f"{rate:,.0f} ({rate / real['tokens_per_second']:.2f})")
        cells.append(f"{real['tokens_per_second']:,.0f}")
        for plan in (plans["measured"], plans["from sizes"]):
            cells.append(f"{plan[name]['bytes'] / 1e9:.2f} GB ({plan[name]['bytes'] / real['peak_bytes']:.2f})")
        print(f"| {name} | {' | '.join(cells)} | {real['peak_bytes'] / 1e9:.2f} GB |")
    save({"plans": plans, "again": again, "real": took}, arguments.json)


if __name__ == "__main__":
    main()
