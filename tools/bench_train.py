#!/usr/bin/env python3
"""Training throughput: supervised tokens a second, against the rival's trainer on the same responses, and against the machine's floor.

    python tools/bench_train.py [--rival RIVAL/bin/python] [--vocabularies full,8192] [--rounds N] [--profile] [--json FILE] [key=value ...]

Sides take turns, each in a process of its own with the same threads. `eagle3` has the rival's architecture: fc over three streams, an
output projection of its own, trained; `lookup` is mtptrain's default head. The floor is the matrix products that the rows of an update must
do (closed form below) at the rate measured on the spot. Without --rival only ours are measured.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench import SMALL, apart, save
from rival import Rival, rate, shared_data, streams

from mtptrain.cli import compose
from mtptrain.config import Config
from mtptrain.heads.alignment import Alignment, align, pack_alignments
from mtptrain.heads.head import DraftHead
from mtptrain.stages.context import open_context, open_store
from mtptrain.stages.first_weights import initial_head
from mtptrain.stages.plan import measure_flops_per_second
from mtptrain.stages.train import loss_projection, make_trainer, training_documents
from mtptrain.store.reader import Store
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec
from mtptrain.trainer import Trainer

_WARM = 2
"""Updates that do not count."""
_PRODUCTS = ("aten::mm", "aten::addmm")
_PARTS = ("products with the vocabulary", "other products with weights", "attention", "passes over logits", "optimizer", "the rest")
"""Of an update's time."""


def floor_flops(head: DraftHead, rows: Alignment, vocabulary: int) -> float:
    """FLOPs of the matrix products that one update of these rows cannot do without: 2 a multiplication."""
    return weight_flops(head, rows, vocabulary) + attention_flops(head, rows)


def weight_flops(head: DraftHead, rows: Alignment, vocabulary: int) -> float:
    """With weights: a forward and two backward products a row, one backward where the input needs no gradient.

    Step-0 rows go through the fusing projection, k and v; rows that draft also through q, o and the MLP; later steps through all of them
    (eagle3 fuses at step 0 alone). What the fusing projection reads is frozen unless a norm before it is trained; at later steps half of
    it is the embeddings. Vocabulary: the draft's logits and their gradient a drafted row (two gradients for a projection that is
    trained), the teacher's logits once a state.
    """
    layer = head.layer
    fuse = sum(p.numel() for n, p in head.named_parameters() if p.dim() == 2 and not n.startswith(("layer.", "lm_head.")))
    keys = sum(m.weight.numel() for m in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    drafts = sum(p.numel() for n, p in layer.named_parameters() if p.dim() == 2) - keys
    alive = rows.valid_RK.sum(0).tolist()
    normed = any(name.startswith(("enorm", "hnorm", "fc_norms", "input_norm")) for name, _ in head.named_parameters())
    total = ((6.0 if normed else 4.0) * fuse + 6.0 * keys) * len(rows.row_R) + 6.0 * drafts * sum(alive)
    total += 6.0 * keys * sum(alive[1:])
    if head.fusion is not None:
        total += (6.0 if normed else 5.0) * fuse * sum(alive[1:])
    backward = 2.0 if head.lm_head is not None else 1.0
    states = len(rows.teacher_RK[rows.valid_RK].unique())
    return total + 2.0 * vocabulary * layer.config.hidden_size * ((1 + backward) * sum(alive) + states)


def attention_flops(head: DraftHead, rows: Alignment) -> float:
    """A drafting row's products with the keys before it and with their values, forward and twice back."""
    shape = head.layer.config
    seen = sum(int((rows.position_R[rows.valid_RK[:, k]] + 1 + k).sum()) for k in range(rows.valid_RK.shape[1]))
    return 12.0 * shape.num_heads * shape.head_dim * seen


def _rows(store: Store, documents: list[int], steps: int) -> Alignment:
    entries = [store.entries[i] for i in documents]
    return pack_alignments([align(e.length, e.spans, steps) for e in entries], [e.length for e in entries])


def _begin(overrides: list[str]) -> tuple[Config, Store, Trainer, int]:
    """A trainer before its first update, and the rows of its loss's vocabulary."""
    cfg = compose(overrides)[0]
    context = open_context(cfg)
    store = open_store(cfg, streams(context.spec.num_layers)[:3])
    documents = training_documents(store)
    head = initial_head(cfg, context, store, documents)
    vocabulary = len(loss_projection(cfg, context, store, documents, head).weight_VH)
    trainer = make_trainer(cfg, context, store, documents, head, lambda _: {"mean_accepted_length": 0.0}, lambda _: None)
    return cfg, store, trainer, vocabulary


def ours(overrides: list[str], updates: int) -> dict[str, Any]:
    """Some updates of our trainer: supervised rows a second, and seconds over the floor's."""
    cfg, store, trainer, vocabulary = _begin(overrides)
    head = trainer.head
    seconds, rows, flops = [], [], []
    rates = [_matrix_rate(cfg, cfg.train.loss.chunk_rows)]
    for number in range(_WARM + updates):
        batches = trainer.updates[number % len(trainer.updates)]
        before, began = trainer.progress.supervised, time.perf_counter()
        trainer.update(batches)
        if number >= _WARM:
            seconds.append(time.perf_counter() - began)
            rows.append(trainer.progress.supervised - before)
            flops.append(sum(floor_flops(head, _rows(store, batch, cfg.train.steps), vocabulary) for batch in batches))
    rates.append(_matrix_rate(cfg, cfg.train.loss.chunk_rows))
    floor_s = sum(flops) / max(rates)
    return {
        "supervised_per_second": sum(rows) / sum(seconds),
        "update_seconds": statistics.mean(seconds),
        "gflop_per_row": sum(flops) / sum(rows) / 1e9,
        "matrix_gflop_per_second": max(rates) / 1e9,
        "share_of_floor": floor_s / sum(seconds),
        "vocabulary": vocabulary,
    }


def profile(overrides: list[str], updates: int) -> dict[str, Any]:
    """Where an update's time goes: shares of all operators' own time."""
    _, _, trainer, _ = _begin(overrides)
    for number in range(_WARM):
        trainer.update(trainer.updates[number % len(trainer.updates)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for number in range(_WARM, _WARM + updates):
            trainer.update(trainer.updates[number % len(trainer.updates)])
    shares: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
    for event in found.events() or []:
        shares[_part(event)] += event.self_cpu_time_total
    return {"shares": {part: time / sum(shares.values()) for part, time in shares.items()}}


def _part(event: Any) -> str:
    """What an operator works for: told by the loss or the optimizer around it, else by its own name."""
    around = event
    while around is not None:
        if "_ChunkedKl" in around.name:
            return "products with the vocabulary" if event.name in _PRODUCTS else "passes over logits"
        if around.name.startswith("Optimizer.step"):
            return "optimizer"
        around = around.cpu_parent
    if event.name in _PRODUCTS:
        return "other products with weights"
    return "attention" if event.name in ("aten::bmm", "aten::_softmax", "aten::_softmax_backward_data") else "the rest"


def _matrix_rate(cfg: Config, rows: int) -> float:
    return measure_flops_per_second(cfg, read_spec(resolve_target(cfg.target)), rows)


def sides(vocabulary: int | None) -> dict[str, list[str]]:
    size = "null" if vocabulary is None else str(vocabulary)
    return {
        "lookup": ["head=lookup", f"train.loss.vocabulary={size}"],
        "eagle3": ["head=eagle3", f"head.draft_vocabulary={size}", "train.loss.hidden_weight=0", "train.loss.vocabulary=null"],
        "mtp": ["head=mtp", f"train.loss.vocabulary={size}"],
    }


def compare(arguments: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    wanted, store = shared_data(overrides)
    sizes = arguments.vocabularies.split(",")
    if arguments.profile:
        return {size: {n: apart(profile, [*wanted, *c], 4) for n, c in sides(_size(size)).items()} for size in sizes}
    rival = None
    if arguments.rival:
        cfg = compose(wanted)[0]
        rival = Rival(arguments.rival, cfg, store, cfg.threads or torch.get_num_threads())
    found: dict[str, Any] = {}
    for size in sizes:
        vocabulary = _size(size)
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(arguments.rounds):
            for name, changes in sides(vocabulary).items():
                runs.setdefault(name, []).append(apart(ours, [*wanted, *changes], arguments.updates))
            if rival is not None:
                report = rival.train(f"train-{size}", vocabulary, arguments.rival_steps)
                report["supervised_per_second"] = rate(report, _WARM)
                runs.setdefault("rival", []).append({k: report[k] for k in ("supervised_per_second", "peak_bytes")})
        found[size] = {name: _middle(several) for name, several in runs.items()}
        for row in found[size].values():
            if "rival" in found[size]:
                row["ratio"] = row["supervised_per_second"] / found[size]["rival"]["supervised_per_second"]
    return found


def _size(name: str) -> int | None:
    return None if name == "full" else int(name)


def _middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure, and the largest memory."""
    row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return row | {"peak_bytes": max(run["peak_bytes"] for run in runs)}


def show_profile(found: dict[str, Any]) -> None:
    for size, rows in found.items():
        for name, row in rows.items():
            print(f"\n{name}, vocabulary {size}\n\n| share of the time | in |\n|---|---|")
            for part, share in row["shares"].items():
                print(f"| {100 * share:.0f} % | {part} |")


def show(found: dict[str, Any]) -> None:
    print("\n| vocabulary | side | supervised tokens/s | times the rival's | GFLOP a row (floor) | share of the floor | peak memory |")
    print("|---|---|---|---|---|---|---|")
    for size, rows in found.items():
        for name, row in rows.items():
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
            floor = f"{row['gflop_per_row']:.3f} | {100 * row['share_of_floor']:.0f} %" if "share_of_floor" in row else "- | -"
            print(f"| {size} | {name} | {row['supervised_per_second']:.0f} | {ratio} | {floor} | {row['peak_bytes'] / 1e9:.2f} GB |")
    rates = [row["matrix_gflop_per_second"] for rows in found.values() for row in rows.values() if "matrix_gflop_per_second" in row]
    print(f"\nmatrix rate measured beside it: {min(rates):.0f} to {max(rates):.0f} GFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", type=Path, help="the Python of an environment with speculators")
    parser.add_argument("--vocabularies", default="full,8192", help="of the loss, with commas between")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--rival-steps", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of how much it is")
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    found = compare(arguments, [*SMALL, *overrides])
    show_profile(found) if arguments.profile else show(found)
    save(found, arguments.json)


if __name__ == "__main__":
    main()
