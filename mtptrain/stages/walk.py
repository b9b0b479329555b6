"""The offline walk and the expected acceptance of sampling over stored documents, as training and validation use them."""

from collections.abc import Iterator, Sequence
from typing import Any

from mtptrain.batches import Batch, load_batch
from mtptrain.data.packing import pack
from mtptrain.decoding.expected import ExpectedAcceptance, expected_by_step, expected_length
from mtptrain.decoding.walk import DocumentWalk, draft_all_rows, hop
from mtptrain.heads.head import DraftHead
from mtptrain.signals import check
from mtptrain.stages.context import Context
from mtptrain.store.reader import Store

_BATCH_TOKENS = 4096
_PROBABILITY_ROWS = 128
"""A chunk of the expectation, which holds several arrays of rows x vocabulary at once."""


def walk_documents(
    head: DraftHead, context: Context, store: Store, documents: Sequence[int], ks: Sequence[int], hits_only: bool = False
) -> tuple[dict[int, list[DocumentWalk]], dict[int, dict[int, list[int]]]]:
    """Walks of each draft length in `ks`, and for each document index the tokens drafted from each row p.

    The rows' drafts hold up to max(ks) tokens, to the first miss, cut at the span's end. Documents come back in the order given.
    `hits_only`: tokens that are not accepted come as -1, which takes less than half the time.
    """
    longest = max(ks)
    walks: dict[int, dict[int, DocumentWalk]] = {k: {} for k in ks}
    drafted: dict[int, dict[int, list[int]]] = {}
    drafter = context.bind(head)
    for members, batch in _batches(head, context, store, documents, longest):
        with context.autocast():
            rows = draft_all_rows(drafter, batch, longest, hits_only)
        entries = [store.entries[i] for i in members]
        for k in ks:
            found = hop(rows, batch, [e.spans for e in entries], [(e.id, e.source) for e in entries], k)
            walks[k].update(zip(members, found, strict=True))
        position_R = batch.rows.position_R[rows.row_R].tolist()
        document_R = batch.rows.document_R[rows.row_R].tolist()
        for i in members:
            drafted[i] = {}
        for position, number, tokens in zip(position_R, document_R, rows.tokens_R, strict=True):
            drafted[members[number]][position] = tokens
    return {k: [walks[k][i] for i in documents] for k in ks}, drafted


def expected_acceptance(head: DraftHead, context: Context, store: Store, documents: Sequence[int], k: int) -> dict[str, Any]:
    """Expected acceptance at temperature 1 of greedy and of sampled drafts of length `k` (decoding/expected.py).

    Rows are contexts from the stored (greedy) responses, every valid one of the documents, not contexts that sampling would reach; step k
    is fed the true continuation, and steps are assumed independent in the product of the expected length. Where a step has no valid row,
    its rate and the lengths are None.
    """
    total, drafter = ExpectedAcceptance.zeros(k), context.bind(head)
    for _, batch in _batches(head, context, store, documents, k):
        with context.autocast():
            total.add(expected_by_step(drafter, batch, context.lm_head, k, _PROBABILITY_ROWS))
    return {
        "greedy_draft": {"accept_rate_by_step": total.greedy_rates, "expected_accepted_length": expected_length(total.greedy_rates)},
        "sampled_draft": {"accept_rate_by_step": total.sampled_rates, "expected_accepted_length": expected_length(total.sampled_rates)},
        "rows": int(total.rows_K[0]),
        "note": "contexts from the stored responses, fed their true tokens; steps assumed independent in the expected length",
    }


def _batches(head: DraftHead, context: Context, store: Store, documents: Sequence[int], steps: int) -> Iterator[tuple[list[int], Batch]]:
    """Documents packed, with their global indices."""
    for group in pack([store.entries[i].length for i in documents], _BATCH_TOKENS):
        members = [documents[g] for g in group]
        check()  # a walk changes nothing, so it may end between batches
        yield members, load_batch(store, members, head.captures, steps, context.dtype, context.device)
