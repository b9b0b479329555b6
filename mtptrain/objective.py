"""What a head is trained to lower: the distillation loss of the unrolled steps over packed documents, or over a long one in windows.

Legend: T tokens, S rows of all steps together, K steps, H hidden, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.config import TrainConfig
from mtptrain.heads.alignment import Alignment
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, key_value, rows_of, true_token_steps, unrolled_steps
from mtptrain.heap import give_back
from mtptrain.losses import RowStatistics, distillation_kl, hidden_match, step_weights
from mtptrain.ranks import ALONE, Ranks

_LARGE = 1 << 23
"""Bytes of all steps' draft states from which on it pays, on a CPU, to hand back freed memory in an update (a hundredth of its time)."""

Loss = tuple[Tensor, list[RowStatistics]]
"""A weighted loss summed over valid rows, and each step's statistics."""


class Objective:
    """`loss_head`: the target's output projection over the vocabulary of the loss."""

    def __init__(self, config: TrainConfig, drafter: Drafter, loss_head: LmHead, device: torch.device) -> None:
        self._config, self._drafter, self._head, self._loss_head, self._device = config, drafter, drafter.head, loss_head, device
        self.weights = step_weights(config.steps, config.loss.step_decay, config.loss.step_weights)
        self._drafted_V: Tensor | None = None
        """Whether each id of the target's vocabulary is in the draft's; None: all are."""
        if self._head.draft_ids is not None:
            self._drafted_V = torch.zeros(len(drafter.embed_VH), dtype=torch.bool, device=device)
            self._drafted_V[self._head.draft_ids] = True

    def of(self, batch: Batch, noise: Tensor | None = None) -> Loss:
        """Of packed documents. `noise` [T, H] is added to what the head reads.

        A row whose label the draft vocabulary lacks has no loss, and is no match.
        """
        unroll = Unroll(self._drafter, len(batch.documents), self._config.recompute)
        read = {name: batch.states[name] if noise is None else batch.states[name] + noise for name in self._head.captures}
        return self._of_steps(true_token_steps(unroll, batch.rows, batch.token_T, read, self._config.steps), batch.rows, batch)

    def of_long(self, batch: Batch, noise: Tensor | None, window: int, ranks: Ranks = ALONE) -> Loss:
        """Of one document, in windows of `window` rows, each at its true positions and with all keys before it: the same loss and
        gradient as `of` to rounding, in memory that grows with the document only by its states, keys and values.

        The ranks share the windows; each returns its own part of the loss, and gradients of which their sum is the whole one's.
        Keys and values are made once without a graph; each window's backward adds to their gradient; at last they are made again, a
        window at a time, to carry it on. The gradient is ready before autograd asks for it.
        """
        parameters = [p for p in self._head.parameters() if p.requires_grad]
        found: list[Any] = []
        loss = _Ready.apply(lambda: self._long(batch, noise, window, ranks, parameters, found), *parameters)
        return loss, found

    def _long(
        self, batch: Batch, noise: Tensor | None, window: int, ranks: Ranks, parameters: Sequence[Tensor], found: list[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss of this rank's windows and the gradients of `parameters`; the steps' statistics go into `found`."""
        count = len(batch.rows.row_R)
        parts = [slice(start, min(start + window, count)) for start in range(0, count, window)]

        def enter(part: slice) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            row = batch.rows.row_R[part]
            states = rows_of({name: batch.states[name] for name in self._head.captures}, row)
            if noise is not None:
                states = {name: state + noise[row] for name, state in states.items()}
            return batch.token_T[batch.rows.input_RK[part, 0]], states, batch.rows.position_R[part]

        with torch.no_grad():
            made = [key_value(self._drafter, *enter(part)) for part in parts]
        prefix = [torch.cat([pair[i] for pair in made]).requires_grad_() for i in (0, 1)]
        del made
        gradient = [torch.zeros_like(p, dtype=torch.float32) for p in (*prefix, *parameters)]
        statistics: list[list[RowStatistics]] = [[] for _ in range(self._config.steps)]
        total = torch.zeros((), device=self._device)
        for part in ranks.share(parts):
            rows = batch.rows.part(part)
            if not bool(rows.valid_RK.any()):
                continue
            with _fresh_graph():
                unroll = Unroll(self._drafter, recompute=self._config.recompute)
                unroll.look_back((prefix[0], prefix[1]), *enter(part))
                loss, steps = self._of_steps(unrolled_steps(unroll, rows, batch.token_T, self._config.steps), rows, batch)
            _add(gradient, torch.autograd.grad(loss, [*prefix, *parameters], allow_unused=True))
            total += loss.detach()
            for step, of_step in zip(statistics, steps, strict=True):
                step.append(of_step)
        of_prefix, of_parameters = gradient[:2], gradient[2:]
        ranks.sum_(of_prefix)
        for part in ranks.share(parts):
            with _fresh_graph():
                made_again = key_value(self._drafter, *enter(part))
            given = [g[part].to(made_again[0].dtype) for g in of_prefix]
            _add(of_parameters, torch.autograd.grad(made_again, parameters, given, allow_unused=True))
        found += [_joined(step, self._device) for step in statistics]
        return total, [g.to(p.dtype) for g, p in zip(of_parameters, parameters, strict=True)]

    def _of_steps(self, steps: Iterator[tuple[Tensor, Tensor]], rows: Alignment, batch: Batch) -> Loss:
        loss = self._config.loss
        states, teachers, labels = [], [], []
        for step, (row_A, state_AH) in enumerate(steps):
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
            state_SH, weight_S, teacher_S, batch.final_TH, self._loss_head, loss.chunk_rows, self._projection(), self._config.compile
        )
        statistics.match_S *= known_S
        total = loss.kl_weight * kl
        if loss.hidden_weight:
            total = total + loss.hidden_weight * hidden_match(state_SH, weight_S, teacher_S, batch.final_TH)
        parts = zip(statistics.kl_S.split(sizes), statistics.overlap_S.split(sizes), statistics.match_S.split(sizes), strict=True)
        return total, [RowStatistics(*part) for part in parts]

    def _projection(self) -> Tensor | None:
        """The head's own output projection over the vocabulary of the loss; None: the target's is the head's."""
        if self._head.lm_head is None:
            return None
        weight_DH, ids_V = self._head.lm_head.weight, self._loss_head.ids_V
        return weight_DH if ids_V is None or self._head.draft_ids is not None else weight_DH[ids_V]


class _Ready(torch.autograd.Function):
    """A loss whose gradients are made with it."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], tuple[Tensor, list[Tensor]]], *parameters: Tensor) -> Tensor:
        loss, gradients = make()
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient * grads[0] for gradient in ctx.saved_tensors)


@contextmanager
def _fresh_graph() -> Iterator[None]:
    """Autograd on, and no copy of a weight that autocast made for an earlier graph, or for none."""
    torch.clear_autocast_cache()
    with torch.enable_grad():
        yield


def _add(sums: list[Tensor], parts: tuple[Tensor | None, ...]) -> None:
    for whole, part in zip(sums, parts, strict=True):
        if part is not None:
            whole += part


def _joined(parts: list[RowStatistics], device: torch.device) -> RowStatistics:
    if not parts:
        return RowStatistics(*(torch.zeros(0, device=device) for _ in range(3)))
    return RowStatistics(*(torch.cat([getattr(part, name) for part in parts]) for name in ("kl_S", "overlap_S", "match_S")))
