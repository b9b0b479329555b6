"""The offline walk: an engine's exact greedy walk, replayed on stored states without the target.

For each span s..e (inclusive): p = s-1; while p+2 <= e: draft K tokens from row p, count matches n with the stored continuation until
the first miss, p += n+1. Drafts of a row depend on true states alone, so all rows are drafted at once and the walk then hops over them.

Legend: R rows that can draft, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.batches import Batch
from mtptrain.heads.alignment import Alignment
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.unroll import Unroll, key_value, rows_of

_WINDOW = 4096
"""Rows of a document that are drafted at once."""


@dataclass(slots=True)
class Draft:
    """One draft of a walk: where it starts, its tokens up to the first miss, cut at the span's end."""

    row: int
    """Position p of the row in its document; the drafted tokens stand at p+2, p+3, ..."""
    tokens: list[int]
    accepted: int


@dataclass(slots=True)
class DocumentWalk:
    """All drafts of one document, span after span."""

    id: str
    source: str
    spans: int
    generated: int
    """Tokens in the spans. The first of each comes from prefill, the others from target decode steps (one a draft)."""
    drafts: list[Draft]


@dataclass(slots=True)
class RowDrafts:
    """Drafted tokens of every row of a batch that can draft."""

    row_R: Tensor
    """Indices into the batch's rows, ascending."""
    tokens_R: list[list[int]]
    """Up to and including the first miss, cut at the span's end."""
    accepted_R: list[int]


@torch.no_grad()
def draft_all_rows(drafter: Drafter, batch: Batch, k: int, hits_only: bool = False) -> RowDrafts:
    """Draft up to `k` tokens from each row; a row stops at its first miss or at its span's end. With `hits_only` a miss is -1 (cheaper).

    A long document alone goes in windows, so that memory grows with it by its states, keys and values.
    """
    rows, count = batch.rows, len(batch.rows.row_R)

    def enter(part: slice) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return batch.token_T[rows.input_RK[part, 0]], rows_of(batch.states, rows.row_R[part]), rows.position_R[part]

    if len(batch.documents) > 1 or count <= _WINDOW:
        unroll = Unroll(drafter, documents=len(batch.documents))
        unroll.extend(*enter(slice(0, count)), rows.document_R)
        return _draft(unroll, drafter, rows, batch.token_T, k, hits_only)
    parts = [slice(start, min(start + _WINDOW, count)) for start in range(0, count, _WINDOW)]
    prefix = _joined([key_value(drafter, *enter(part)) for part in parts])
    found = RowDrafts(rows.row_R[:0], [], [])
    for part in parts:
        unroll = Unroll(drafter)
        unroll.look_back(prefix, *enter(part))
        drafts = _draft(unroll, drafter, rows.part(part), batch.token_T, k, hits_only)
        found.row_R = torch.cat((found.row_R, drafts.row_R + part.start))
        found.tokens_R += drafts.tokens_R
        found.accepted_R += drafts.accepted_R
    return found


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys), torch.cat(values)


def _draft(unroll: Unroll, drafter: Drafter, rows: Alignment, token_T: Tensor, k: int, hits_only: bool) -> RowDrafts:
    """Of the rows that `unroll` has as its step 0."""
    alive_R = rows.valid_RK[:, 0].nonzero().squeeze(-1)
    start_R = alive_R
    order = {int(r): i for i, r in enumerate(start_R.tolist())}
    tokens: list[list[int]] = [[] for _ in range(len(start_R))]
    accepted = [0] * len(start_R)
    state_RH = unroll.start(alive_R)
    for step in range(k if len(start_R) else 0):
        label_R = token_T[rows.label_RK[alive_R, step]]
        drafted_R = drafter.choices(state_RH, label_R if hits_only else None)
        match_R = drafted_R == label_R
        for row, token, match in zip(alive_R.tolist(), drafted_R.tolist(), match_R.tolist(), strict=True):
            tokens[order[row]].append(token)
            accepted[order[row]] += match
        if step + 1 == k:
            break
        keep_A = (match_R & rows.valid_RK[alive_R, step + 1]).nonzero().squeeze(-1)
        if not len(keep_A):
            break
        alive_R = alive_R[keep_A]
        state_RH = unroll.advance(keep_A, drafted_R[keep_A])
    return RowDrafts(start_R, tokens, accepted)


def hop(
    drafts: RowDrafts, batch: Batch, spans: Sequence[Sequence[tuple[int, int]]], names: Sequence[tuple[str, str]], k: int
) -> list[DocumentWalk]:
    """The walk with draft length `k` over rows drafted with at least `k` steps.

    `spans` and `names` (id, source): of each document of the batch.
    """
    position = batch.rows.position_R[drafts.row_R].tolist()
    document = batch.rows.document_R[drafts.row_R].tolist()
    found = {(d, p): i for i, (d, p) in enumerate(zip(document, position, strict=True))}
    walks = []
    for number, (name, source) in enumerate(names):
        walk = DocumentWalk(name, source, len(spans[number]), sum(e - s for s, e in spans[number]), [])
        for start, end in spans[number]:
            p = start - 1
            while p + 2 <= end - 1:
                i = found[number, p]
                accepted = min(drafts.accepted_R[i], k)
                walk.drafts.append(Draft(p, drafts.tokens_R[i][:k], accepted))
                p += accepted + 1
        walks.append(walk)
    return walks
