#!/usr/bin/env python3
"""What a smaller store costs: error of the states, of the teacher, and the acceptance of heads trained from each codec.

    python tools/bench_codecs.py RUN [--codecs int8 fp8 int8+int4] [--heads mtp lookup] [--seeds N] [--json FILE] [key=value ...]

RUN holds a finished store in bf16; RUN/store/config.yaml is the base of every training, `key=value` changes it. `int8+int4` means int8 for
`final`, int4 for the other captures. The store is coded anew in RUN/codecs; each head trains from each codec with the same seeds,
tokens and order, and is walked on all held-out documents, which every store keeps in bf16, so that only what it learnt from differs.
"""

import argparse
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from bench import apart, run_config, save, write_store
from torch import Tensor

from mtptrain.config import Config
from mtptrain.data.documents import FILE, Document, read_documents
from mtptrain.report.measurement import measure
from mtptrain.sizes import stored_bytes_per_token
from mtptrain.stages.capture import codecs
from mtptrain.stages.context import open_context, wanted_captures
from mtptrain.stages.first_weights import initial_head
from mtptrain.stages.train import make_trainer, training_documents
from mtptrain.stages.walk import walk_documents
from mtptrain.store.reader import Store

TEACHER_ROWS = 4096
HEADS: dict[str, dict[str, Any]] = {
    "mtp": {},
    "eagle3": {"head": {"kind": "eagle3", "draft_vocabulary": 32000}, "train": {"loss": {"hidden_weight": 0, "vocabulary": None}}},
    "lookup": {
        "head": {"kind": "eagle3", "lm_head": "target", "num_kv_heads": 0, "fc_norm": True, "norm_before_residual": True},
        "train": {"loss": {"hidden_weight": 0}},
    },
}


def configured(run: Path, codec: str, head: str, seed: int, overrides: list[str]) -> Config:
    final, _, aux = codec.partition("+")
    changes = HEADS[head] | {"store": {"codec": final, "aux_codec": aux or None}, "seed": seed, "wandb": {"mode": "disabled"}}
    config = run_config(run, changes, overrides)
    config.head.label = f"codec-{codec}-{head}-{seed}"
    return config


def recode(run: Path, codec: str, captures: list[str]) -> Path:
    """The store of `run` in another codec, or as it is for bf16."""
    if codec == "bf16":
        return run / "store"
    folder = run / "codecs" / codec
    cfg = configured(run, codec, "mtp", 0, [])
    source = Store.open(run / "store", captures)
    documents: list[Document] = read_documents(run / "data")
    if len(documents) != len(source.entries):
        sys.exit(f"error: {run / 'data' / FILE} holds {len(documents)} documents, the store {len(source.entries)}")
    inputs = source.manifest["inputs"] | {"recoded": codec}
    shutil.rmtree(folder, ignore_errors=True)

    def states(members: range) -> dict[str, Tensor]:
        source.release()
        return {c: torch.cat([source.state(i, c) for i in members]) for c in captures}

    write_store(folder, inputs, codecs(cfg.store), documents, inputs["store.shard_tokens"], states)
    return folder


def errors(run: Path, codec: str, captures: list[str]) -> dict[str, Any]:
    """Of some training documents' states: relative error of each capture; the teacher's divergence and changed first choices."""
    exact, coded = (Store.open(f, captures) for f in (run / "store", recode(run, codec, captures)))
    context = open_context(configured(run, codec, "mtp", 0, ["train.dtype=float32"]))
    chosen = exact.indices("train")[:: max(1, len(exact.indices("train")) // 120)]
    found: dict[str, Any] = {}
    for capture in captures:
        true_NH, read_NH = (torch.cat([s.state(i, capture).float() for i in chosen]) for s in (exact, coded))
        found[capture] = ((read_NH - true_NH).norm(dim=1) / true_NH.norm(dim=1)).mean().item()
        if capture == "final":
            every = max(1, len(true_NH) // TEACHER_ROWS)
            divergence, changed, rows = 0.0, 0, 0
            for true_RH, read_RH in zip(true_NH[::every].split(256), read_NH[::every].split(256), strict=True):
                p_RV, q_RV = (context.lm_head.logits(state_RH.to(context.device)).log_softmax(-1) for state_RH in (true_RH, read_RH))
                divergence += (p_RV.exp() * (p_RV - q_RV)).sum().item()
                changed += int((p_RV.argmax(-1) != q_RV.argmax(-1)).sum())
                rows += len(true_RH)
            found["teacher_kl"], found["first_choice_changed"] = divergence / rows, changed / rows
    return found


def trained(run: Path, codec: str, head: str, seed: int, overrides: list[str], captures: list[str]) -> dict[str, Any]:
    """Accepted length, on the held-out documents, of a head trained from the codec."""
    cfg = configured(run, codec, head, seed, overrides)
    shutil.rmtree(cfg.train_dir, ignore_errors=True)
    context = open_context(cfg)
    own = Store.open(recode(run, codec, captures) if codec == "bf16" else run / "codecs" / codec, wanted_captures(cfg, context.spec))
    documents = training_documents(own)
    draft = initial_head(cfg, context, own, documents)

    trainer = make_trainer(cfg, context, own, documents, draft, lambda _: {"mean_accepted_length": 0.0}, lambda _: None)
    progress = trainer.run()
    walks, _ = walk_documents(draft, context, own, own.indices("held_out"), [cfg.validate.k], hits_only=True)
    length = measure(walks[cfg.validate.k], cfg.validate.k)["overall"]["mean_accepted_length"]
    found = {"accepted_length": length, "rows": progress.supervised}
    shutil.rmtree(cfg.train_dir)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--codecs", nargs="+", default=["int8", "fp8", "int8+int4"])
    parser.add_argument("--heads", nargs="+", default=["mtp", "lookup"], choices=list(HEADS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    if bad := [o for o in overrides if "=" not in o]:
        sys.exit(f"error: {bad[0]} is neither an option nor key=value")
    run = arguments.run
    spec = open_context(configured(run, "bf16", "mtp", 0, [])).spec
    wanted = {h: wanted_captures(configured(run, "bf16", h, 0, overrides), spec) for h in arguments.heads}
    captures = list(dict.fromkeys(c for names in wanted.values() for c in names))
    found: dict[str, Any] = {}
    for codec in dict.fromkeys(["bf16", *arguments.codecs]):
        cfg = configured(run, codec, "mtp", 0, overrides)
        row = found[codec] = {"errors": apart(errors, run, codec, captures), "heads": {}}
        for head in arguments.heads:
            each = [apart(trained, run, codec, head, seed, overrides, captures) for seed in range(arguments.seeds)]
            row["heads"][head] = {"bytes_per_token": stored_bytes_per_token(cfg.store, wanted[head], spec), "seeds": each}
            print(codec, head, [round(r["accepted_length"], 3) for r in each], flush=True)
    _print(found)
    save(found, arguments.json)


def _print(found: dict[str, Any]) -> None:
    print("\n| codec | head | bytes a token | accepted length, each seed | mean | less than bf16 |\n|---|---|---|---|---|---|")
    for codec, row in found.items():
        for head, of_head in row["heads"].items():
            scores = [r["accepted_length"] for r in of_head["seeds"]]
            lost = [b["accepted_length"] - s for b, s in zip(found["bf16"]["heads"][head]["seeds"], scores, strict=True)]
            noise = f" +- {statistics.stdev(lost) / len(lost) ** 0.5:.3f}" if len(lost) > 1 and codec != "bf16" else ""
            print(
                f"| {codec} | {head} | {of_head['bytes_per_token']:,} | {' '.join(f'{s:.3f}' for s in scores)} | "
                f"{statistics.mean(scores):.3f} | {statistics.mean(lost):.3f}{noise} |"
            )
    print("\n| codec | error of each capture | teacher's KL | first choices changed |\n|---|---|---|---|")
    for codec, row in found.items():
        error = row["errors"]
        shown = ", ".join(f"{c} {e:.4f}" for c, e in error.items() if c == "final" or c.startswith("after_"))
        print(f"| {codec} | {shown} | {error['teacher_kl']:.2e} | {error['first_choice_changed']:.2%} |")


if __name__ == "__main__":
    main()
