"""The training loop: packed documents from the store, unrolled draft steps, one optimizer update after another.

Deterministic given the seed: batches are a pure function of (seed, epoch), so a run killed anywhere and resumed ends with
the same bits (one process, same threads and device).
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from mtptrain.batches import Loader
from mtptrain.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from mtptrain.config import BadUpdate, TrainConfig
from mtptrain.data.order import epoch_batches
from mtptrain.errors import UserError
from mtptrain.files import append_jsonl, read_jsonl_durable, write_text
from mtptrain.heads.alignment import supervised_rows
from mtptrain.heads.build import head_from_record, head_record
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead
from mtptrain.losses import RowStatistics
from mtptrain.objective import Objective
from mtptrain.optim import build_adamw, lr_factor, set_lr
from mtptrain.ranks import ALONE, Ranks
from mtptrain.signals import Interrupted, deferred, noted
from mtptrain.stepper import Stepper
from mtptrain.store.reader import Store

LOG, CHECKPOINTS = "log.jsonl", "checkpoints"
_SPIKE_AFTER = 20
"""Updates that must be known before a loss can be a spike."""
_NOISE_TOKENS = 512
"""Length of a document at which `train.feature_noise` is the noise's bound (EAGLE's 512 / T)."""


@dataclass(slots=True)
class Progress:
    """Where training stands; saved with each checkpoint."""

    update: int = 0
    tokens: int = 0
    supervised: int = 0
    """Valid step-0 rows trained on so far."""
    seconds: float = 0.0
    """Of updates."""
    walk_seconds: float = 0.0
    """Of evaluations, the walks on held-out documents."""
    best_score: float = -1.0
    best_update: int = -1
    evaluated: int = 0
    """The last update after which the head was evaluated."""
    skipped: int = 0
    """Updates that were bad and left the weights as they were."""
    mean_loss: float = 0.0
    """Of the updates that were not."""


class Feed(Protocol):
    """Who computes the states of training documents while a head is trained on them."""

    def wait(self, update: int, meanwhile: Callable[[], None]) -> set[int]:
        """Until the states that an update uses are in the store; documents that have none. `meanwhile` is called once in a while."""

    def passed(self, update: int) -> None:
        """An update is done with."""


def epochs_of(config: TrainConfig, seed: int, store: Store, documents: Sequence[int]) -> list[list[list[int]]]:
    """The batches of every epoch."""
    lengths, shards = [store.entries[i].length for i in documents], [store.entries[i].shard for i in documents]
    return [
        epoch_batches(
            documents, lengths, budget=config.batch_tokens, seed=seed, epoch=epoch, shards=shards, together=config.shards_together
        )
        for epoch in range(config.epochs)
    ]


class Trainer:
    """Owns the head, its optimizer and the position in the data.

    `loss_head`: the target's output projection over the vocabulary of the loss. `evaluate(head)` returns a dict with at least
    `mean_accepted_length`; the best checkpoint is chosen by it.
    """

    def __init__(
        self,
        config: TrainConfig,
        seed: int,
        drafter: Drafter,
        loss_head: LmHead,
        store: Store,
        documents: list[int],
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        evaluate: Callable[[DraftHead], dict[str, Any]],
        on_log: Callable[[dict[str, Any]], None],
        ranks: Ranks = ALONE,
        feed: Feed | None = None,
    ) -> None:
        self._feed = feed
        self.config, self.head, self.store, self.folder = config, drafter.head, store, folder
        self._seed, self._drafter = seed, drafter
        self._dtype, self._device, self._evaluate, self._on_log, self._ranks = dtype, device, evaluate, on_log, ranks
        batches = [batch for epoch in epochs_of(config, seed, store, documents) for batch in epoch]
        groups = [batches[i : i + config.accumulate] for i in range(0, len(batches), config.accumulate)]
        self.updates = groups[: config.max_updates]
        self.objective = Objective(config, drafter, loss_head, device)
        self.optimizer = build_adamw(config.optim, self.head)
        self._stepper = Stepper(self.head, self.optimizer, ranks, config.optim.clip)
        ahead = device.type == "cuda" if config.prefetch is None else config.prefetch
        self._loader = Loader(store, drafter.head.captures, config.steps, dtype, device, ahead)
        self.ema = {n: p.detach().clone() for n, p in self.head.named_parameters()} if config.ema else {}
        self.progress = Progress()

    # -- one update ---------------------------------------------------------------------------------------------------

    def _next(self) -> dict[str, Any]:
        """The next update, once its states are there; documents that turn out to have none are left out."""
        number = self.progress.update
        batches = self.updates[number]
        if self._feed is None:
            return self.update(batches)
        lost = self._feed.wait(number, self._end_if_asked)
        left = [[i for i in batch if i not in lost] for batch in batches]
        batches = [batch for batch in left if batch]
        row = (
            self.update(batches)
            if batches
            else self._bad("no document has finite states", [i for batch in self.updates[number] for i in batch])
        )
        self._feed.passed(number)
        return row

    def _noise(self, documents: list[int], number: int) -> Tensor | None:
        """U(-a, a) * 512 / T of each document, [T, H]; a function of seed, update and the batch's number in it."""
        if not self.config.feature_noise:
            return None
        rng = torch.Generator().manual_seed(random.Random(f"{self._seed}/{self.progress.update}/{number}").getrandbits(62))
        lengths = torch.tensor([self.store.entries[i].length for i in documents])
        scale_T1 = (self.config.feature_noise * _NOISE_TOKENS / lengths).repeat_interleave(lengths)[:, None]
        uniform_TH = torch.rand(len(scale_T1), self._drafter.embed_VH.shape[1], generator=rng) * 2 - 1
        return (uniform_TH * scale_T1).to(self._device, self._dtype)

    def update(self, batches: list[list[int]]) -> dict[str, Any]:
        """One optimizer update over `batches`, of which each rank computes its share; returns its log row.

        Gradients are sums over the valid rows of all batches, so they do not depend on how batches are shared but for rounding.
        """
        entries = self.store.entries
        rows = sum(supervised_rows(entries[i].spans) for documents in batches for i in documents)
        factor = lr_factor(self.config.optim, self.progress.update, len(self.updates))
        set_lr(self.optimizer, self.config.optim.lr * factor)
        self._stepper.begin()
        done, loss = [], None
        turns = self._turns(batches)
        for turn, number in enumerate(turns):
            if loss is not None:
                self._stepper.backward(loss, is_last=False)
            following = self._documents(batches, turns[turn + 1]) if turn + 1 < len(turns) else self._after()
            loss, result = self._forward(batches, number, rows, following)
            if result is not None:
                done.append(result)
        found = sorted((batch for part in self._ranks.gather(done) for batch in part), key=lambda batch: batch.number)
        total = sum(batch.loss for batch in found)
        every = [i for documents in batches for i in documents]
        problem = next(((f"loss is {batch.loss}", batches[batch.number]) for batch in found if not math.isfinite(batch.loss)), None)
        if problem is None and self._is_spike(total):
            problem = (f"loss is {total:.4g}, {total / self.progress.mean_loss:.1f} times the mean of those before", every)
        if problem is not None:
            self._stepper.discard(loss)
            return self._bad(*problem)
        if loss is not None:
            self._stepper.backward(loss, is_last=True)
        norm = self._stepper.step()
        if not math.isfinite(norm):
            return self._bad(f"the gradient's norm is {norm}", every)
        self._average()
        self._count(total)
        self.progress.update += 1
        self.progress.tokens += sum(entries[i].length for i in every)
        self.progress.supervised += rows
        return {"loss": total, "lr": self.config.optim.lr * factor, "grad_norm": norm, **_means(found)}

    def _documents(self, batches: list[list[int]], number: int | None) -> list[int]:
        """Of one of an update's batches; None: of the smallest."""
        return batches[number] if number is not None else min(batches, key=lambda b: sum(self.store.entries[i].length for i in b))

    def _after(self) -> list[int] | None:
        """What this rank loads first in the next update, if anything, where its states are there."""
        if self._feed is not None or self.progress.update + 1 >= len(self.updates):
            return None
        batches = self.updates[self.progress.update + 1]
        return next((self._documents(batches, number) for number in self._turns(batches)), None)

    def _forward(
        self, batches: list[list[int]], number: int | None, rows: int, following: list[int] | None
    ) -> tuple[Tensor, "BatchResult | None"]:
        """The loss of one of an update's batches, of `rows` valid rows in all. `number` None: a loss of 0 that only has a gradient of 0.

        Of a long document's every rank computes a part. `following`: documents that are loaded next.
        """
        documents = self._documents(batches, number)
        batch = self._loader.load(documents, following)

        def compute() -> tuple[Tensor, list[RowStatistics]]:
            noise = self._noise(documents, number or 0)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                if number is not None and self._is_long(documents):
                    loss, steps = self.objective.of_long(batch, noise, self.config.batch_tokens, self._ranks)
                else:
                    loss, steps = self.objective.of(batch, noise)
            return loss / rows if number is not None else loss * 0.0, steps

        loss, steps = self._stepper.forward(compute)
        return loss, None if number is None else BatchResult(number, float(loss.detach()), [_sums(step) for step in steps])

    def _is_long(self, documents: list[int]) -> bool:
        """Whether a batch is one document with more tokens than a batch has room for."""
        return len(documents) == 1 and self.store.entries[documents[0]].length > self.config.batch_tokens

    def _turns(self, batches: list[list[int]]) -> list[int | None]:
        """The batches that this rank computes, or has a part in, one after the other; None where it only keeps step with the others."""
        long = [number for number, documents in enumerate(batches) if self._is_long(documents)]
        packed = [number for number in range(len(batches)) if number not in long]
        return [*long, *(None if turn is None else packed[turn] for turn in self._stepper.turns(len(packed)))]

    def _is_spike(self, loss: float) -> bool:
        known = self.progress.update - self.progress.skipped
        return self.config.spike is not None and known >= _SPIKE_AFTER and loss > self.config.spike * self.progress.mean_loss

    def _count(self, loss: float) -> None:
        """Into the mean that tells a spike: of all at first, then of the last 20 or so."""
        known = self.progress.update - self.progress.skipped
        self.progress.mean_loss += (loss - self.progress.mean_loss) / min(known + 1, _SPIKE_AFTER)

    def _bad(self, problem: str, documents: list[int]) -> dict[str, Any]:
        """Stop, or pass over the update as `train.bad_update` says; either way the optimizer does not see it."""
        at, names = self.progress.update, ", ".join(self.store.entries[i].id for i in documents)
        told = f"{problem} at update {at + 1}; weights are unchanged; its documents: {names}"
        if self.config.bad_update is BadUpdate.stop:
            raise UserError(f"{told}; train.bad_update=skip passes over such updates")
        self.progress.update += 1
        self.progress.skipped += 1
        if self.progress.skipped > self.config.max_skipped:
            raise UserError(f"{told}; it is one more than train.max_skipped={self.config.max_skipped}")
        return {"skipped": problem, "documents": [self.store.entries[i].id for i in documents]}

    def _average(self) -> None:
        for name, parameter in self.head.named_parameters() if self.ema else ():
            self.ema[name].lerp_(parameter.detach(), 1 - self.config.ema)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Progress:
        """Train to the end, from the newest checkpoint if there is one. Interrupted, it saves one and then ends."""
        self._resume()
        with deferred(together=self._ranks.world > 1):
            try:
                self._loop()
            except Interrupted:
                self._save()
                raise
        return self.progress

    def _end_if_asked(self) -> None:
        """Raise Interrupted if a signal came, to any rank: all end after the same update."""
        signals = [number for number in self._ranks.gather(noted()) if number is not None]
        if signals:
            raise Interrupted(signals[0])

    def _loop(self) -> None:
        last_log = (time.monotonic(), self.progress.tokens, self.progress.supervised)
        total = len(self.updates)
        hidden = not self._ranks.is_first
        with tqdm(total=total, initial=self.progress.update, desc="train", unit="update", mininterval=1.0, disable=hidden) as bar:
            self._evaluate_if_due()
            while self.progress.update < total:
                began = time.monotonic()
                row = self._next()
                self.progress.seconds += time.monotonic() - began
                bar.update()
                done = self.progress.update
                if "skipped" in row:
                    self._log({"update": done, **row})
                elif done % self.config.log_every == 0 or done == total:
                    now = (time.monotonic(), self.progress.tokens, self.progress.supervised)
                    elapsed = now[0] - last_log[0]
                    row["tokens_per_second"] = (now[1] - last_log[1]) / elapsed
                    row["supervised_per_second"] = (now[2] - last_log[2]) / elapsed
                    last_log = now
                    self._log({"update": done, **row})
                self._evaluate_if_due()
                if done % self.config.checkpoint_every == 0 or done == total:
                    self._save()
                self._end_if_asked()

    def _evaluate_if_due(self) -> None:
        done, total = self.progress.update, len(self.updates)
        if done > self.progress.evaluated and (done % self.config.eval_every == 0 or done == total):
            self._evaluate_and_keep_best()

    def _log(self, row: dict[str, Any]) -> None:
        if not self._ranks.is_first:
            return
        append_jsonl(self.folder / LOG, [row])
        self._on_log(row)

    def evaluated_weights(self) -> dict[str, Tensor]:
        """The tensors that are evaluated and exported: the weights' average where there is one. Called by every rank."""
        return self._stepper.weights() | self.ema

    def _evaluate_and_keep_best(self) -> None:
        weights, head = self.evaluated_weights(), self.head
        if self.ema or self._stepper.is_partitioned:
            head = head_from_record(head_record(self.head)).to(self._device)
            head.load_state_dict(weights)
        began = time.monotonic()
        result = self._evaluate(head)
        self.progress.walk_seconds += time.monotonic() - began
        score = result["mean_accepted_length"]
        if score > self.progress.best_score:
            self.progress.best_score, self.progress.best_update = score, self.progress.update
            state = {"update": self.progress.update, "walk": result, "head": head_record(self.head)}
            if self._ranks.is_first:
                save_checkpoint(self.folder / "best", {"head": weights}, state)
        self.progress.evaluated = self.progress.update
        self._log({"update": self.progress.update, "walk": result})

    def _save(self) -> None:
        groups = {"head": self._stepper.weights(), "optimizer": self._stepper.moments()}
        if not self._ranks.is_first:
            return
        if self.ema:
            groups["ema"] = self.ema
        folder = self.folder / CHECKPOINTS
        save_checkpoint(folder / f"{self.progress.update:08d}", groups, {"progress": asdict(self.progress)})
        prune(folder, self.config.keep)

    def _resume(self) -> None:
        """Continue from the newest checkpoint; log rows written after it are cut off, they will be written again."""
        groups: dict[str, dict[str, Tensor]] = {}
        newest = self._ranks.first(lambda: next(reversed(checkpoints(self.folder / CHECKPOINTS)), None))
        if newest is not None:
            groups, state = load_checkpoint(newest)
            self.head.load_state_dict(groups["head"])
            for name, tensor in groups.get("ema", {}).items():
                self.ema[name].copy_(tensor)
            self.progress = Progress(**state["progress"])
        if self.config.deepspeed.stage:
            from mtptrain.zero import ZeroStepper

            self._stepper = ZeroStepper(self.config.deepspeed.stage, self.head, self.optimizer, self._ranks, self.config.optim.clip)
        self._stepper.load_moments(groups.get("optimizer", {}))
        self._ranks.first(self._cut)

    def _cut(self) -> None:
        """What lies before and after the point that training goes on from."""
        prune(self.folder / CHECKPOINTS, self.config.keep)  # killed between the newest one's rename and this
        rows = list(read_jsonl_durable(self.folder / LOG))
        kept = [r for r in rows if r["update"] <= self.progress.update]
        if len(kept) < len(rows):
            write_text(self.folder / LOG, "".join(json.dumps(r) + "\n" for r in kept))


@dataclass(slots=True, frozen=True)
class BatchResult:
    """What a batch, the `number`-th of its update, came to."""

    number: int
    loss: float
    """Its part of the update's."""
    sums: list[list[float]]
    """Of each step: valid rows, and over them the sums of `_KINDS`."""


_KINDS = ("kl", "overlap", "match")


def _sums(step: RowStatistics) -> list[float]:
    found = torch.stack([getattr(step, f"{kind}_S").double().sum() for kind in _KINDS]).tolist()
    return [float(len(step.kl_S)), *found]


def _means(batches: Sequence[BatchResult]) -> dict[str, list[float]]:
    """Over the update's rows, one value a step."""
    steps = [[sum(parts) for parts in zip(*of_step, strict=True)] for of_step in zip(*(b.sums for b in batches), strict=True)]
    return {kind: [step[1 + i] / max(step[0], 1.0) for step in steps] for i, kind in enumerate(_KINDS)}
