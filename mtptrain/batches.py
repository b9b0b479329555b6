"""What a head is trained and walked on: packed documents read from the store."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtptrain.heads.alignment import Alignment, align, pack_alignments
from mtptrain.store.reader import Store


@dataclass(slots=True)
class Batch:
    """Packed documents. Legend: T tokens, H hidden."""

    documents: list[int]
    """Global indices in the store."""
    token_T: Tensor
    """int64."""
    final_TH: Tensor
    """The target's states after its final norm, in the compute dtype."""
    rows: Alignment


def load_batch(store: Store, documents: Sequence[int], steps: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """Read documents from the store and align them for `steps` draft steps."""
    entries = [store.entries[i] for i in documents]
    rows = pack_alignments([align(e.length, e.spans, steps) for e in entries], [e.length for e in entries]).to(device)
    return Batch(
        documents=list(documents),
        token_T=torch.cat([store.tokens(i) for i in documents]).to(device),
        final_TH=torch.cat([store.state(i, "final") for i in documents]).to(device=device, dtype=dtype),
        rows=rows,
    )
