"""The training loop: packed documents from the store, unrolled draft steps, one optimizer update after another.

Deterministic given the seed: batches are a pure function of (seed, epoch), so a run killed anywhere and resumed ends with
the same bits (one process, same threads and device).
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mtptrain.batches import Batch, load_batch
from mtptrain.checkpoint import checkpoints, load_checkpoint, prune, save_checkpoint
from mtptrain.config import BadUpdate, TrainConfig
from mtptrain.data.order import epoch_batches
from mtptrain.errors import UserError
from mtptrain.files import append_jsonl, read_jsonl_durable, write_text
from mtptrain.heads.alignment import supervised_rows
from mtptrain.heads.build import head_record
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.head import DraftHead
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, true_token_steps
from mtptrain.heap import give_back
from mtptrain.losses import RowStatistics, distillation_kl, hidden_match, step_weights
from mtptrain.optim import build_adamw, load_moments, lr_factor, moments, set_lr
from mtptrain.signals import Interrupted, check, deferred
from mtptrain.store.reader import Store

LOG = "log.jsonl"
_SPIKE_AFTER = 20
"""Updates that must be known before a loss can be a spike."""
_LARGE = 1 << 23
"""Bytes of all steps' draft states from which on it pays, on a CPU, to hand back freed memory in an update (a hundredth of its time)."""
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
    ) -> None:
        self.config, self.head, self.store, self.folder = config, drafter.head, store, folder
        self._seed, self._drafter, self._loss_head = seed, drafter, loss_head
        self._dtype, self._device, self._evaluate, self._on_log = dtype, device, evaluate, on_log
        lengths = [store.entries[i].length for i in documents]
        batches = [
            b for e in range(config.epochs) for b in epoch_batches(documents, lengths, budget=config.batch_tokens, seed=seed, epoch=e)
        ]
        groups = [batches[i : i + config.accumulate] for i in range(0, len(batches), config.accumulate)]
        self.updates = groups[: config.max_updates]
        self.weights = step_weights(config.steps, config.loss.step_decay, config.loss.step_weights)
        self.optimizer = build_adamw(config.optim, self.head)
        self.ema = {n: p.detach().clone() for n, p in self.head.named_parameters()} if config.ema else {}
        self.progress = Progress()
        self._drafted_V: Tensor | None = None
        """Whether each id of the target's vocabulary is in the draft's; None: all are."""
        if self.head.draft_ids is not None:
            self._drafted_V = torch.zeros(len(drafter.embed_VH), dtype=torch.bool, device=device)
            self._drafted_V[self.head.draft_ids] = True

    # -- one update ---------------------------------------------------------------------------------------------------

    def batch_loss(self, batch: Batch, noise: Tensor | None = None) -> tuple[Tensor, list[RowStatistics]]:
        """Weighted loss summed over the batch's valid rows, and each step's statistics. `noise` [T, H] is added to what the head reads.

        A row whose label the draft vocabulary lacks has no loss, and is no match.
        """
        rows, steps, loss = batch.rows, self.config.steps, self.config.loss
        unroll = Unroll(self._drafter, documents=len(batch.documents))
        read = {name: batch.states[name] if noise is None else batch.states[name] + noise for name in self.head.captures}
        states, teachers, labels = [], [], []
        for step, (row_A, state_AH) in enumerate(true_token_steps(unroll, rows, batch.token_T, read, steps)):
            states.append(state_AH)
            teachers.append(rows.teacher_RK[row_A, step])
            labels.append(batch.token_T[rows.label_RK[row_A, step]])
        sizes = [len(t) for t in teachers]
        weight_S = torch.cat([torch.full((n,), w, device=self._device) for n, w in zip(sizes, self.weights, strict=True)])
        known_S = 1.0 if self._drafted_V is None else self._drafted_V[torch.cat(labels)].float()
        weight_S = weight_S * known_S
        state_SH, teacher_S = torch.cat(states), torch.cat(teachers)
        if state_SH.nbytes >= _LARGE and self._device.type == "cpu":
            give_back()  # what the steps freed lies between what backward needs: a fifth of the peak
        kl, statistics = distillation_kl(
            state_SH, weight_S, teacher_S, batch.final_TH, self._loss_head, loss.chunk_rows, self._projection()
        )
        statistics.match_S *= known_S
        total = loss.kl_weight * kl
        if loss.hidden_weight:
            total = total + loss.hidden_weight * hidden_match(state_SH, weight_S, teacher_S, batch.final_TH)
        parts = zip(statistics.kl_S.split(sizes), statistics.overlap_S.split(sizes), statistics.match_S.split(sizes), strict=True)
        return total, [RowStatistics(*part) for part in parts]

    def _projection(self) -> Tensor | None:
        """The head's own output projection over the vocabulary of the loss; None: the target's is the head's."""
        if self.head.lm_head is None:
            return None
        weight_DH, ids_V = self.head.lm_head.weight, self._loss_head.ids_V
        return weight_DH if ids_V is None or self.head.draft_ids is not None else weight_DH[ids_V]

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
        """One optimizer update over `batches`; returns its log row."""
        entries = self.store.entries
        rows = sum(supervised_rows(entries[i].spans) for documents in batches for i in documents)
        factor = lr_factor(self.config.optim, self.progress.update, len(self.updates))
        set_lr(self.optimizer, self.config.optim.lr * factor)
        self.optimizer.zero_grad(set_to_none=True)
        total, statistics = 0.0, []
        for number, documents in enumerate(batches):
            batch = load_batch(self.store, documents, self.head.captures, self.config.steps, self._dtype, self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                loss, steps = self.batch_loss(batch, self._noise(documents, number))
            value = float(loss.detach()) / rows
            if not math.isfinite(value):
                return self._bad(f"loss is {value}", documents)
            (loss / rows).backward()
            total += value
            statistics.append(steps)
        every = [i for documents in batches for i in documents]
        if self._is_spike(total):
            return self._bad(f"loss is {total:.4g}, {total / self.progress.mean_loss:.1f} times the mean of those before", every)
        norm = self._clip()
        if not math.isfinite(norm):
            return self._bad(f"the gradient's norm is {norm}", every)
        self.optimizer.step()
        self._average()
        self._count(total)
        self.progress.update += 1
        self.progress.tokens += sum(entries[i].length for i in every)
        self.progress.supervised += rows
        return {"loss": total, "lr": self.config.optim.lr * factor, "grad_norm": norm, **_summary(statistics)}

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
        told = f"{problem} at update {at}; weights are unchanged; its documents: {names}"
        if self.config.bad_update is BadUpdate.stop:
            raise UserError(f"{told}; train.bad_update=skip passes over such updates")
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.update += 1
        self.progress.skipped += 1
        if self.progress.skipped > self.config.max_skipped:
            raise UserError(f"{told}; it is one more than train.max_skipped={self.config.max_skipped}")
        return {"skipped": problem, "documents": [self.store.entries[i].id for i in documents]}

    def _clip(self) -> float:
        limit = self.config.optim.clip or float("inf")
        return float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), limit))

    def _average(self) -> None:
        for name, parameter in self.head.named_parameters() if self.ema else ():
            self.ema[name].lerp_(parameter.detach(), 1 - self.config.ema)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Progress:
        """Train to the end, from the newest checkpoint if there is one. Interrupted, it saves one and then ends."""
        self._resume()
        with deferred():
            try:
                self._loop()
            except Interrupted:
                self._save()
                raise
        return self.progress

    def _loop(self) -> None:
        last_log = (time.monotonic(), self.progress.tokens, self.progress.supervised)
        total = len(self.updates)
        with tqdm(total=total, initial=self.progress.update, desc="train", unit="update", mininterval=1.0) as bar:
            self._evaluate_if_due()
            while self.progress.update < total:
                began = time.monotonic()
                row = self.update(self.updates[self.progress.update])
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
                check()

    def _evaluate_if_due(self) -> None:
        done, total = self.progress.update, len(self.updates)
        if done > self.progress.evaluated and (done % self.config.eval_every == 0 or done == total):
            self._evaluate_and_keep_best()

    def _log(self, row: dict[str, Any]) -> None:
        append_jsonl(self.folder / LOG, [row])
        self._on_log(row)

    def evaluated_weights(self) -> dict[str, Tensor]:
        """The tensors that are evaluated and exported: the weights' average where there is one."""
        return {n: t.detach() for n, t in self.head.state_dict().items()} | self.ema

    def _evaluate_and_keep_best(self) -> None:
        trained = {n: t.detach().clone() for n, t in self.head.state_dict().items()}
        self.head.load_state_dict(self.evaluated_weights())
        began = time.monotonic()
        try:
            result = self._evaluate(self.head)
        finally:
            self.head.load_state_dict(trained)
        self.progress.walk_seconds += time.monotonic() - began
        score = result["mean_accepted_length"]
        if score > self.progress.best_score:
            self.progress.best_score, self.progress.best_update = score, self.progress.update
            state = {"update": self.progress.update, "walk": result, "head": head_record(self.head)}
            save_checkpoint(self.folder / "best", {"head": self.evaluated_weights()}, state)
        self.progress.evaluated = self.progress.update
        self._log({"update": self.progress.update, "walk": result})

    def _save(self) -> None:
        groups = {"head": self.head.state_dict(), "optimizer": moments(self.optimizer, self.head)}
        if self.ema:
            groups["ema"] = self.ema
        folder = self.folder / "checkpoints"
        save_checkpoint(folder / f"{self.progress.update:08d}", groups, {"progress": asdict(self.progress)})
        prune(folder, self.config.keep)

    def _resume(self) -> None:
        """Continue from the newest checkpoint; log rows written after it are cut off, they will be written again."""
        found = checkpoints(self.folder / "checkpoints")
        if found:
            groups, state = load_checkpoint(found[-1])
            self.head.load_state_dict(groups["head"])
            load_moments(self.optimizer, self.head, groups["optimizer"])
            for name, tensor in groups.get("ema", {}).items():
                self.ema[name].copy_(tensor)
            self.progress = Progress(**state["progress"])
            prune(self.folder / "checkpoints", self.config.keep)  # killed between the newest one's rename and this
        rows = list(read_jsonl_durable(self.folder / LOG))
        kept = [r for r in rows if r["update"] <= self.progress.update]
        if len(kept) < len(rows):
            write_text(self.folder / LOG, "".join(json.dumps(r) + "\n" for r in kept))


def _summary(statistics: list[list[RowStatistics]]) -> dict[str, list[float]]:
    """Means over the update's rows, one value a step."""
    out: dict[str, list[float]] = {"kl": [], "overlap": [], "match": []}
    for steps in zip(*statistics, strict=True):
        for key in out:
            rows = torch.cat([getattr(s, f"{key}_S") for s in steps])
            out[key].append(float(rows.mean()) if len(rows) else 0.0)
    return out
