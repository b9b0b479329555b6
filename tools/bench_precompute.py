#!/usr/bin/env python3
"""Precompute throughput: the stage against a forward a document, and against the model's bare forward at its best batch shape.

    python tools/bench_precompute.py [--rounds N] [--documents N] [--json FILE] [key=value ...]

Each side runs in a process of its own, in turn. `one at a time`: transformers, a document a call, in the target's compute dtype (and in
bfloat16 where that is another). `bare forward`: no hooks, no store, the fastest of several batch shapes of equal rows, on the same tokens.
The engine's backend is measured in tools/bench_engine.py.
"""

import argparse
import contextlib
import io
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench import SMALL, apart, prepare_store, save
from transformers import PreTrainedModel

from mtptrain.cli import compose
from mtptrain.data.documents import read_documents
from mtptrain.stages import precompute
from mtptrain.target.model import load_model, pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target

SHAPES = [(1, 512), (1, 1024), (1, 2048), (2, 512), (4, 256), (4, 512), (8, 128), (16, 64)]
_SHAPE_SECONDS = 4.0


def _model(overrides: list[str], dtype: torch.dtype | None) -> tuple[PreTrainedModel, list[list[int]]]:
    cfg = compose(overrides)[0]
    set_threads(cfg.threads)
    device = pick_device(cfg.device)
    model = load_model(resolve_target(cfg.target), dtype or pick_dtype(cfg.target.dtype, device), device, cfg.target.trust_remote_code)
    return model, [d.tokens for d in read_documents(cfg.data_dir)]


@torch.inference_mode()
def one_at_a_time(overrides: list[str], documents: int, dtype: torch.dtype | None) -> dict[str, Any]:
    model, every = _model(overrides, dtype)
    chosen = every[:: max(1, len(every) // documents)][:documents]
    decoder = model.get_decoder()
    decoder(input_ids=torch.tensor([chosen[0]]), use_cache=False)
    began = time.perf_counter()
    for tokens in chosen:
        decoder(input_ids=torch.tensor([tokens]), use_cache=False)
    return {"tokens_per_second": sum(map(len, chosen)) / (time.perf_counter() - began)}


@torch.inference_mode()
def bare_forward(overrides: list[str]) -> dict[str, Any]:
    model, every = _model(overrides, None)
    flat = [token for tokens in every for token in tokens]
    decoder, rates = model.get_decoder(), {}
    for rows, length in SHAPES:
        ids = torch.tensor((flat * (1 + rows * length // len(flat)))[: rows * length]).reshape(rows, length)
        decoder(input_ids=ids, use_cache=False)
        taken: list[float] = []
        stop = time.perf_counter() + _SHAPE_SECONDS
        while not taken or time.perf_counter() < stop:
            began = time.perf_counter()
            decoder(input_ids=ids, use_cache=False)
            taken.append(time.perf_counter() - began)
        rates[f"{rows} x {length}"] = rows * length / statistics.median(taken)
    best = max(rates, key=lambda shape: rates[shape])
    return {"tokens_per_second": rates[best], "shape": best, "shapes": rates}


def stage(overrides: list[str]) -> dict[str, Any]:
    """The rate the stage itself states: packing, forward and writing to the last byte, without what it does once (loading, parity)."""
    cfg = compose(overrides)[0]
    shutil.rmtree(cfg.store_dir, ignore_errors=True)
    printed = io.StringIO()
    began = time.perf_counter()
    with contextlib.redirect_stdout(printed):
        precompute.run(cfg)
    stated = re.search(r"computed ([\d,]+) at ([\d,]+) tokens/s", printed.getvalue())
    assert stated, printed.getvalue()
    tokens, rate = (int(figure.replace(",", "")) for figure in stated.groups())
    return {"tokens_per_second": float(rate), "once_seconds": time.perf_counter() - began - tokens / rate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--documents", type=int, default=32, help="of the side that takes them one at a time")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    overrides = [*SMALL, *overrides]
    apart(prepare_store, overrides)
    cfg = compose(overrides)[0]
    dtype = pick_dtype(cfg.target.dtype, pick_device(cfg.device))
    sides: dict[str, Any] = {
        "stage": lambda: apart(stage, overrides),
        "bare forward": lambda: apart(bare_forward, overrides),
        "one at a time": lambda: apart(one_at_a_time, overrides, arguments.documents, None),
    }
    if dtype != torch.bfloat16:
        sides["one at a time, bf16"] = lambda: apart(one_at_a_time, overrides, max(2, arguments.documents // 8), torch.bfloat16)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, side in sides.items():
            runs[name].append(side())
    found = {
        name: {
            "tokens_per_second": statistics.median(r["tokens_per_second"] for r in each),
            "peak_bytes": max(r["peak_bytes"] for r in each),
        }
        for name, each in runs.items()
    }
    found["bare forward"]["shape"] = runs["bare forward"][-1]["shape"]
    found["stage"]["once_seconds"] = statistics.median(run["once_seconds"] for run in runs["stage"])
    ours = found["stage"]["tokens_per_second"]
    print("\n| side | tokens/s | the stage is | peak memory |\n|---|---|---|---|")
    for name, row in found.items():
        row["ratio"] = ours / row["tokens_per_second"]
        shape = f" ({row['shape']} tokens)" if "shape" in row else ""
        print(f"| {name}{shape} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f} times as fast | {row['peak_bytes'] / 1e9:.2f} GB |")
    once = found["stage"]["once_seconds"]
    print(f"\nbefore its first forward the stage took {once:.1f} s (loading, comparing a packed forward with single ones)")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
