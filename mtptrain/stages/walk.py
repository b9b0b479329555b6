"""The offline walk over stored documents, as training and validation use it."""

from collections.abc import Sequence

from mtptrain.batches import load_batch
from mtptrain.data.packing import pack
from mtptrain.decoding.walk import DocumentWalk, draft_all_rows, hop
from mtptrain.heads.mtp import MtpHead
from mtptrain.stages.context import Context
from mtptrain.store.reader import Store

_BATCH_TOKENS = 4096
_CHUNK_ROWS = 512


def walk_documents(
    head: MtpHead, context: Context, store: Store, documents: Sequence[int], ks: Sequence[int]
) -> tuple[dict[int, list[DocumentWalk]], dict[int, dict[int, list[int]]]]:
    """Walks of each draft length in `ks`, and for each document index the tokens drafted from each row p.

    The rows' drafts hold up to max(ks) tokens, to the first miss, cut at the span's end. Documents come back in the order given.
    """
    longest = max(ks)
    walks: dict[int, dict[int, DocumentWalk]] = {k: {} for k in ks}
    drafted: dict[int, dict[int, list[int]]] = {}
    for group in pack([store.entries[i].length for i in documents], _BATCH_TOKENS):
        members = [documents[g] for g in group]
        batch = load_batch(store, members, longest, context.dtype, context.device)
        with context.autocast():
            rows = draft_all_rows(head, batch, context.ends.embed_VH, context.spec.embed_scale, context.lm_head, longest, _CHUNK_ROWS)
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
