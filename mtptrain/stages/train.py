"""The train stage: a head on the store, its best checkpoint chosen by the offline walk on held-out documents."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mtptrain import manifest
from mtptrain.checkpoint import checkpoints
from mtptrain.config import Config
from mtptrain.config_io import config_yaml, load_config
from mtptrain.errors import UserError
from mtptrain.files import write_text
from mtptrain.heads.alignment import supervised_rows
from mtptrain.heads.head import DraftHead
from mtptrain.heads.layers import compile_layer
from mtptrain.heads.lm_head import LmHead, lm_head_of
from mtptrain.ranks import ALONE, Ranks, announced, join, launch, run_as_rank
from mtptrain.report.measurement import measure
from mtptrain.report.tracking import Tracker
from mtptrain.stages.context import (
    Context,
    as_plain,
    checkpoint_hash,
    open_context,
    open_store,
    store_fingerprint,
    trained_head_hash,
    wanted_captures,
)
from mtptrain.stages.feed import Feed, feeder_gpus
from mtptrain.stages.first_weights import empty_head, first_documents, initial_head, train_config
from mtptrain.stages.vocabulary import loss_vocabulary
from mtptrain.stages.walk import walk_documents
from mtptrain.store.reader import Store
from mtptrain.target.ends import weights_hash
from mtptrain.target.model import pick_device, pick_dtype
from mtptrain.target.resolve import resolve_target
from mtptrain.trainer import CHECKPOINTS, Progress, Trainer

_WITHOUT_EFFECT = (
    "log_every",
    "checkpoint_every",
    "keep",
    "max_skipped",
    "bad_update",
    "spike",
    "ranks",
    "deepspeed",
    "recompute",
    "online",
    "prefetch",
    "compile",
)
"""Of `train.*`: what the weights do not depend on, but for rounding."""


def run(cfg: Config) -> None:
    """Train `cfg.head` into `cfg.train_dir`, resuming where it stopped, in as many processes as asked for. Raises UserError."""
    if announced():
        _train(cfg, meet(cfg))
    elif (count := ranks_to_start(cfg)) > 1:
        _launch(cfg, count)
    else:
        _train(cfg, ALONE)


def meet(cfg: Config) -> Ranks:
    """The processes of this job, if a launcher started several."""
    return join(pick_device(cfg.device).type == "cpu", cfg.threads)


def ranks_to_start(cfg: Config) -> int:
    """How many processes train on this machine where no launcher started any."""
    if cfg.train.ranks:
        return cfg.train.ranks
    if pick_device(cfg.device).type != "cuda":
        return 1
    return max(1, min(torch.cuda.device_count() - feeder_gpus(cfg), cfg.train.accumulate))


def _launch(cfg: Config, count: int) -> None:
    if _is_complete(cfg, train_inputs(cfg)):
        return
    with TemporaryDirectory(prefix=f"mtptrain-ranks-{cfg.head_dir.name}-") as folder:
        config = Path(folder) / "config.yaml"
        write_text(config, config_yaml(cfg))
        launch(count, "mtptrain.stages.train", config)


def _is_complete(cfg: Config, inputs: dict[str, Any]) -> bool:
    if not manifest.is_complete(cfg.train_dir, inputs, cfg.on_stale):
        return False
    trained_head_hash(cfg)  # damage is found before anyone is told that all is well
    print(f"train: {cfg.train_dir} is complete", flush=True)
    return True


def _check_ranks(cfg: Config, ranks: Ranks) -> None:
    if ranks.world > cfg.train.accumulate:
        raise UserError(
            f"train.accumulate={cfg.train.accumulate}: {ranks.world} ranks need at least as many batches an update; "
            f"set train.accumulate={ranks.world} (with a smaller train.batch_tokens or train.optim.lr to match)"
        )
    if cfg.train.deepspeed.stage and ranks.world == 1:
        raise UserError(f"train.deepspeed.stage={cfg.train.deepspeed.stage} needs two ranks or more; set train.ranks, or leave it at 0")


def _train(cfg: Config, ranks: Ranks) -> None:
    ranks.first(lambda: _check_ranks(cfg, ranks))
    inputs = ranks.first(lambda: train_inputs(cfg))
    if ranks.first(lambda: _is_complete(cfg, inputs)):
        return
    context = open_context(cfg)
    store = open_store(cfg, wanted_captures(cfg, context.spec))
    documents, held_out = training_documents(store), store.indices("held_out")
    if not held_out:
        raise UserError(
            f"{cfg.store_dir} has no held-out documents; set data.held_out or data.held_out_fraction and prepare again, "
            "or merge it with a run that has some (python -m mtptrain.store merge)"
        )
    ranks.first(lambda: _begin(cfg, inputs))
    held_out = spread(held_out, cfg.train.eval_documents)

    def evaluate(trained: DraftHead) -> dict[str, Any]:
        walks, _ = walk_documents(trained, context, store, ranks.share(held_out), [cfg.validate.k], hits_only=True)
        return measure(ranks.unshare(walks[cfg.validate.k]), cfg.validate.k)["overall"]

    with Tracker(cfg) if ranks.is_first else nullcontext() as tracker, ExitStack() as open_feed:
        begun = ranks.first(lambda: next(reversed(checkpoints(cfg.train_dir / CHECKPOINTS)), None))
        feed = None
        if cfg.train.online:
            feed = open_feed.enter_context(Feed(cfg, store, documents, wanted_captures(cfg, context.spec), ranks))
            feed.start(0 if begun is None else int(begun.name))
        if begun is None:
            usable = first_documents(cfg, store, documents)
            if feed is not None:
                lost = feed.first_group()
                usable = [i for i in usable if i not in lost]
            head = initial_head(cfg, context, store, documents, ranks, usable)
        else:
            head = empty_head(cfg, context, store, documents)
        trainer = make_trainer(cfg, context, store, documents, head, evaluate, tracker.log if tracker else _silent, ranks, feed)
        if ranks.is_first:
            _print_start(cfg, head, store, documents, len(trainer.updates), ranks.world)
        began = time.monotonic()
        progress = trainer.run()
        if feed is not None:
            feed.finish()
    if not ranks.is_first:
        return
    manifest.finish(cfg.train_dir, inputs, _results(progress, head))
    print(
        f"train: {progress.update} updates, {progress.supervised:,} supervised rows in {time.monotonic() - began:.0f} s "
        f"({progress.walk_seconds:.0f} s of them walks); best walk {progress.best_score:.3f} at update {progress.best_update} "
        f"(K={cfg.validate.k}, {len(held_out)} held-out documents)",
        flush=True,
    )


def _begin(cfg: Config, inputs: dict[str, Any]) -> None:
    manifest.begin(cfg.train_dir, inputs)
    write_text(cfg.train_dir / "config.yaml", config_yaml(cfg))


def _silent(row: dict[str, Any]) -> None:
    """The first rank tells it."""


def _results(progress: Progress, head: DraftHead) -> dict[str, Any]:
    """What the manifest tells later stages."""
    return {
        "updates": progress.update,
        "tokens": progress.tokens,
        "supervised_rows": progress.supervised,
        "seconds": progress.seconds,
        "walk_seconds": progress.walk_seconds,
        "best_update": progress.best_update,
        "skipped_updates": progress.skipped,
        "best_mean_accepted_length": progress.best_score,
        "parameters": sum(p.numel() for p in head.parameters()),
        "captures": list(head.captures),
        "draft_vocabulary": None if head.draft_ids is None else len(head.draft_ids),
    }


def train_inputs(cfg: Config) -> dict[str, Any]:
    """Everything that determines the trained weights."""
    fingerprint, target = store_fingerprint(cfg), resolve_target(cfg.target)
    dtype = pick_dtype(cfg.train.dtype, pick_device(cfg.device))
    train = as_plain(cfg.train)
    for key in _WITHOUT_EFFECT:
        del train[key]
    return {
        "store": fingerprint,
        "target": weights_hash(target),
        "head": {k: v for k, v in as_plain(cfg.head).items() if k not in ("label", "checkpoint")},
        "head.checkpoint": cfg.head.checkpoint and checkpoint_hash(cfg),
        "train": train,
        "seed": cfg.seed,
        "validate.k": cfg.validate.k,
        "dtype": str(dtype).removeprefix("torch."),
    }


def training_documents(store: Store) -> list[int]:
    """Training documents with at least one row to train on."""
    documents = [i for i in store.indices("train") if supervised_rows(store.entries[i].spans)]
    if not documents:
        raise UserError(f"{store.folder} has no training document with a supervised row; prepare more data")
    return documents


def spread(items: list[int], count: int) -> list[int]:
    """At most `count` of the items, evenly spaced, so that every source is among them."""
    if len(items) <= count:
        return items
    return [items[i * len(items) // count] for i in range(count)]


def make_trainer(
    cfg: Config,
    context: Context,
    store: Store,
    documents: list[int],
    head: DraftHead,
    evaluate: Callable[[DraftHead], dict[str, Any]],
    on_log: Callable[[dict[str, Any]], None],
    ranks: Ranks = ALONE,
    feed: Feed | None = None,
) -> Trainer:
    """The trainer of `head` on `documents` of the store, in `cfg.train_dir`."""
    torch.use_deterministic_algorithms(True)
    # else deterministic algorithms fill whatever is allocated, 5 % of an update; nothing of it is read unwritten
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if cfg.train.compile and context.device.type != "cpu":  # a CPU's passes over rows that fit its cache are as fast
        compile_layer(head.layer)
    return Trainer(
        train_config(cfg),
        cfg.seed,
        context.bind(head),
        loss_projection(cfg, context, store, documents, head),
        store,
        documents,
        cfg.train_dir,
        context.dtype,
        context.device,
        evaluate,
        on_log,
        ranks,
        feed,
    )


def loss_projection(cfg: Config, context: Context, store: Store, documents: list[int], head: DraftHead) -> LmHead:
    """The target's output projection over the vocabulary of the loss: the draft's where it is reduced, or `train.loss.vocabulary`."""
    ids = head.draft_ids
    if ids is None:
        ids = loss_vocabulary(cfg, context, store, documents)
    return context.lm_head if ids is None else lm_head_of(context.spec, context.ends.lm_head_VH, ids.to(context.device))


def _print_start(cfg: Config, head: DraftHead, store: Store, documents: list[int], updates: int, ranks: int) -> None:
    parameters = sum(p.numel() for p in head.parameters())
    rows = sum(supervised_rows(store.entries[i].spans) for i in documents)
    print(
        f"train: {cfg.head_dir.name} head, {parameters:,} parameters, {len(documents):,} documents, {rows:,} supervised rows, "
        f"{cfg.train.epochs} epochs, {updates:,} updates" + (f", {ranks} ranks" if ranks > 1 else ""),
        flush=True,
    )


if __name__ == "__main__":  # one of the ranks that `_launch` starts
    sys.exit(run_as_rank(lambda: run(load_config(Path(sys.argv[1])))))
