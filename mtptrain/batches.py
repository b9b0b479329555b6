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
    states: dict[str, Tensor]
    """The target's states [T, H] at each capture, `final` among them, in the compute dtype."""
    rows: Alignment

    @property
    def final_TH(self) -> Tensor:
        """After the target's final norm: what a teacher's logits are made of."""
        return self.states["final"]


def load_batch(
    store: Store, documents: Sequence[int], captures: Sequence[str], steps: int, dtype: torch.dtype, device: torch.device
) -> Batch:
    """Read documents from the store, `final` and what else `captures` names, and align them for `steps` draft steps."""
    entries = [store.entries[i] for i in documents]
    rows = pack_alignments([align(e.length, e.spans, steps) for e in entries], [e.length for e in entries]).to(device)
    batch = Batch(
        documents=list(documents),
        token_T=torch.cat([store.tokens(i) for i in documents]).to(device),
        states={
            name: torch.cat([store.state(i, name) for i in documents]).to(device=device, dtype=dtype)
            for name in dict.fromkeys(("final", *captures))
        },
        rows=rows,
    )
    store.release()
    return batch
