#!/usr/bin/env python3
"""Acceptance for time: mtptrain and the rival train on the same responses for the same time, then draft in one real vLLM.

    python tools/bench_acceptance.py --rival RIVAL/bin/python [--seconds 720] [--ours head=lookup] [--json FILE] [key=value ...]

The sides train at the same time, each on half of the cores, so that what else the machine does hits both: once for all of the time and once
for a third of it. Their steps are counted out beforehand, so that each ends its learning-rate schedule. The rival trains EAGLE-3 over 8,192
ids. Seconds are those of updates; what comes before the first one is listed. vLLM drafts 3 tokens a step on
`validate.documents` held-out prompts, n-gram lookup beside the heads. The default is short; the table in tools/README.md says its own call.
"""

import argparse
import math
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench import SMALL, apart, save
from bench_heads import made
from bench_train import ours as probe
from rival import Rival, shared_data

from mtptrain.cli import compose
from mtptrain.config import HeadKind
from mtptrain.data.order import epoch_batches
from mtptrain.engines.process import require_engine
from mtptrain.report.measurement import measure
from mtptrain.stages.context import open_context, open_store
from mtptrain.stages.engine_trial import NGRAM, draft_of, run_trials, walks_of
from mtptrain.stages.train import spread, training_documents

VOCABULARY = 8192
_PROBE = 8


def train_ours(overrides: list[str], label: str, updates: int) -> dict[str, Any]:
    """One head, exported for vLLM: its folder, seconds of updates, seconds in all, rows."""
    began = time.monotonic()
    cfg = compose([*overrides, f"head.label={label}"])[0]
    store = open_store(cfg, [])
    documents = training_documents(store)
    an_epoch = len(epoch_batches(documents, [store.entries[i].length for i in documents], budget=cfg.train.batch_tokens, seed=0, epoch=0))
    length = [f"train.epochs={math.ceil(updates / an_epoch) + 1}", f"train.max_updates={updates}", f"train.eval_every={updates}"]
    cfg = compose([*overrides, f"head.label={label}", *length])[0]
    shutil.rmtree(cfg.head_dir, ignore_errors=True)
    _, folder, facts = made(cfg, open_context(cfg))
    return facts | {"folder": str(folder), "wall_seconds": time.monotonic() - began, "updates": updates}


def train_both(arguments: argparse.Namespace, overrides: list[str], rival: Rival) -> dict[str, dict[str, Any]]:
    """Rival and ours at the same time, for all of the time and for a third of it, after a probe of both that says how many steps fit."""
    with ThreadPoolExecutor(2) as pool:
        theirs = pool.submit(rival.train, "probe", VOCABULARY, _PROBE)
        mine = pool.submit(apart, probe, overrides, _PROBE)
        their_step = statistics.median(seconds for seconds, _ in theirs.result()["steps"][2:])
        my_step = mine.result()["update_seconds"]
        found: dict[str, dict[str, Any]] = {}
        for number, (label, seconds) in enumerate({", a third": arguments.seconds / 3, "": arguments.seconds}.items()):
            steps = int(seconds / their_step)
            epochs = math.ceil(steps / theirs.result()["steps_per_epoch"])
            at_once = pool.submit(rival.train, f"acceptance-{number}", VOCABULARY, steps, epochs)
            found[f"ours{label}"] = apart(train_ours, overrides, f"bench-{number}", int(seconds / my_step))
            report = at_once.result()
            found[f"rival{label}"] = {
                "folder": report["head"],
                "training_seconds": sum(seconds for seconds, _ in report["steps"]),
                "supervised_rows": sum(tokens for _, tokens in report["steps"]),
                "updates": len(report["steps"]),
                "peak_bytes": report["peak_bytes"],
            }
    return found


def compare(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    engine = require_engine(compose(overrides)[0], "this benchmark")
    threads = max(1, torch.get_num_threads() // 2)
    wanted, store = shared_data(overrides)
    rival = Rival(arguments.rival, compose(wanted)[0], store, threads)
    found = train_both(arguments, [*wanted, arguments.ours, f"threads={threads}"], rival)
    cfg = compose([*wanted, arguments.ours, "head.label=bench-vllm"])[0]
    drafts: dict[str, dict[str, Any] | None] = {
        label: draft_of(Path(row["folder"]), HeadKind.eagle3 if label.startswith("rival") else cfg.head.kind)
        for label, row in found.items()
    }
    drafts["n-gram lookup"] = NGRAM
    documents = spread(store.indices("held_out"), cfg.validate.documents)
    runs = run_trials(cfg, open_context(cfg), engine, drafts, store, documents)
    for label, run in runs.items():
        found.setdefault(label, {})["engine"] = measure(walks_of(run, store, documents), cfg.validate.k)
    return {"documents": len(documents), "k": cfg.validate.k, "threads": threads, "sides": found}


def show(found: dict[str, Any]) -> None:
    sides = found["sides"]
    head = ["side", "training s", "before it s", "updates", "supervised rows", "peak memory"]
    head += ["accepted length", "95 % interval", "by depth", "tokens a target step"]
    print(f"\n| {' | '.join(head)} |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for label, row in sides.items():
        overall = row["engine"]["overall"]
        low, high = overall["mean_accepted_length_ci95"]
        cells = ["-"] * 5
        if "updates" in row:
            before = f"{row['wall_seconds'] - row['training_seconds']:.0f}" if "wall_seconds" in row else "-"
            cells = [f"{row['training_seconds']:.0f}", before, f"{row['updates']}", f"{row['supervised_rows']:,}"]
            cells.append(f"{row['peak_bytes'] / 1e9:.2f} GB")
        depth = " ".join(f"{rate:.3f}".lstrip("0") for rate in overall["conditional_accept_rate"])
        cells += [f"{overall['mean_accepted_length']:.3f}", f"{low:.3f} .. {high:.3f}", depth, f"{overall['tokens_per_target_step']:.3f}"]
        print(f"| {label} | {' | '.join(cells)} |")
    print(f"\n| source | {' | '.join(sides)} |\n|{'---|' * (len(sides) + 1)}")
    for source in sorted(sides["rival"]["engine"]["by_source"]):
        cells = [f"{row['engine']['by_source'][source]['mean_accepted_length']:.3f}" for row in sides.values()]
        print(f"| {source} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", type=Path, required=True, help="the Python of an environment with speculators")
    parser.add_argument("--seconds", type=float, default=60, help="of training, each side")
    parser.add_argument("--ours", default="head=lookup", help="our head")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    found = compare(arguments, [*SMALL, *overrides])
    show(found)
    save(found, arguments.json)


if __name__ == "__main__":
    main()
