"""Heads side by side: trained on one store with the same tokens and seed, then drafting in one real vLLM for the same prompts.

    python tools/bench_heads.py +recipe=smollm2 name=heads [--heads mtp no_norms eagle eagle3 eagle3.1 lookup] [--json FILE] [key=value ...]

Stages that are complete in runs/NAME are reused. Prints, for each head, the engine's accepted length by source, whether the engine drafted
what the reference head drafts, weights of a drafted token, bytes of a stored token, and training seconds; n-gram lookup beside them.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from mtptrain.cli import compose
from mtptrain.config import Config, VllmLayout
from mtptrain.engines.process import require_engine
from mtptrain.exporters.vllm import from_vllm, to_vllm
from mtptrain.files import write_folder_atomic, write_json
from mtptrain.heads.head import DraftHead
from mtptrain.report.measurement import measure
from mtptrain.stages import precompute, prepare, train
from mtptrain.stages.context import Context, load_trained_head, open_context, open_store
from mtptrain.stages.engine_trial import NGRAM, NONE, certify, draft_of, run_trials, walks_of
from mtptrain.stages.train import spread
from mtptrain.stages.validate import head_cost

_OFF = ["embed", "hidden", "input", "output"]
HEADS: dict[str, list[str]] = {
    "mtp": ["head=mtp"],
    "no_norms": ["head=mtp", "head.label=no_norms", *(f"head.norms.{name}=false" for name in _OFF)],  # EAGLE's choice
    "eagle": ["head=eagle"],
    "eagle3": ["head=eagle3"],
    "eagle3.1": ["head=eagle3.1"],
    "lookup": ["head=lookup"],
}


def configs(names: list[str], overrides: list[str]) -> dict[str, Config]:
    return {name: compose([*HEADS[name], *overrides])[0] for name in names}


def made(cfg: Config, context: Context) -> tuple[DraftHead, Path, dict[str, Any]]:
    """The trained head with the weights of its vLLM folder, the folder, and what it takes."""
    train.run(cfg)
    trained = load_trained_head(cfg, context)
    head, drafter, folder = trained.head, context.bind(trained.head), cfg.head_dir / "bench"
    write_folder_atomic(folder, to_vllm(head, context.spec, VllmLayout.auto, rows_DH=drafter.lm_head.weight_VH).write)
    head.load_state_dict(from_vllm(folder, head))
    results = trained.results
    trained_by = {"training_seconds": results["seconds"], "supervised_rows": results["supervised_rows"]}
    facts = head_cost(cfg, context, head) | trained_by | {"walk": results["best_mean_accepted_length"]}
    return head, folder, facts


def compare(names: list[str], overrides: list[str]) -> dict[str, Any]:
    every = configs(names, overrides)
    widest = max(every.values(), key=lambda c: c.head.kind.name == "eagle3")
    prepare.run(widest, for_training=True)
    precompute.run(widest)  # every capture in one pass of the target
    context = open_context(widest)
    heads = {name: made(cfg, context) for name, cfg in every.items()}
    store = open_store(widest, [capture for head, _, _ in heads.values() for capture in head.captures])
    documents = spread(store.indices("held_out"), widest.validate.documents)
    drafts: dict[str, dict[str, Any] | None] = {NONE: None, "ngram": NGRAM}
    drafts |= {name: draft_of(folder, every[name].head.kind) for name, (_, folder, _) in heads.items()}
    runs = run_trials(widest, context, require_engine(widest, "this benchmark"), drafts, store, documents)
    found: dict[str, Any] = {"documents": len(documents), "k": widest.validate.k}
    found["ngram"] = {"engine": measure(walks_of(runs["ngram"], store, documents), widest.validate.k)}
    for name, (head, _, facts) in heads.items():
        proof = certify(every[name], context, head, store, documents, runs[NONE], runs[name])
        found[name] = facts | {
            "engine": measure(proof.engine, widest.validate.k),
            "drafted_tokens_compared": proof.drafts.compared,
            "drafted_token_agreement": proof.drafts.agreement,
            "output_agreement": proof.outputs.agreement,
        }
    for name, run in runs.items():
        found.setdefault(name, {})["speed"] = run.speed
    return found


def show(found: dict[str, Any], names: list[str]) -> None:
    rows = [*names, "ngram"]
    sources = sorted(found["ngram"]["engine"]["by_source"])
    print("\n| head | accepted length | 95 % interval | agreement | weights a drafted token | stored bytes a token | training s |")
    print("|---|---|---|---|---|---|---|")
    for name in rows:
        row, overall = found[name], found[name]["engine"]["overall"]
        low, high = overall["mean_accepted_length_ci95"]
        takes = ["", "", "", ""]
        if name in names:
            compared = row["drafted_tokens_compared"]
            takes = [f"{row['drafted_token_agreement']:.4f} of {compared:,}", f"{row['parameters_per_drafted_token'] / 1e6:.1f} M"]
            takes += [f"{row['store_bytes_per_token']:,}", f"{row['training_seconds']:.0f}"]
        print(f"| {name} | {overall['mean_accepted_length']:.3f} | {low:.3f} .. {high:.3f} | {' | '.join(takes)} |")
    print(f"\n| source | {' | '.join(rows)} |\n|{'---|' * (len(rows) + 1)}")
    for source in sources:
        cells = [f"{found[name]['engine']['by_source'][source]['mean_accepted_length']:.3f}" for name in rows]
        print(f"| {source} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    if bad := [o for o in overrides if "=" not in o]:
        sys.exit(f"error: {bad[0]} is neither an option nor key=value")
    found = compare(arguments.heads, overrides)
    show(found, arguments.heads)
    if arguments.json:
        write_json(arguments.json, found)


if __name__ == "__main__":
    main()
