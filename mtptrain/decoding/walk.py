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
from mtptrain.heads.drafter import Drafter
from mtptrain.heads.unroll import Unroll, rows_of


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
    """Draft up to `k` tokens from each row; a row stops at its first miss or at its span's end. With `hits_only` a miss is -1 (cheaper)."""
    rows = batch.rows
    unroll = Unroll(drafter, documents=len(batch.documents))
    unroll.extend(batch.token_T[rows.input_RK[:, 0]], rows_of(batch.states, rows.row_R), rows.position_R, rows.document_R)
    alive_R = rows.valid_RK[:, 0].nonzero().squeeze(-1)
    start_R = alive_R
    order = {int(r): i for i, r in enumerate(start_R.tolist())}
    tokens: list[list[int]] = [[] for _ in range(len(start_R))]
    accepted = [0] * len(start_R)
    state_RH = unroll.start(alive_R)
    for step in range(k):
        label_R = batch.token_T[rows.label_RK[alive_R, step]]
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
