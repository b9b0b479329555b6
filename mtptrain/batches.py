"""What a head is trained and walked on: packed documents read from the store."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

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
    return to_device(read_batch(store, documents, captures, steps, dtype, device), device)


def read_batch(
    store: Store, documents: Sequence[int], captures: Sequence[str], steps: int, dtype: torch.dtype, device: torch.device
) -> Batch:
    """The same in this machine's memory; for a GPU in pages that it can copy from while it computes."""
    entries = [store.entries[i] for i in documents]
    keep: Callable[[Tensor], Tensor] = Tensor.pin_memory if device.type == "cuda" else lambda tensor: tensor
    batch = Batch(
        documents=list(documents),
        token_T=keep(torch.cat([store.tokens(i) for i in documents])),
        states={name: keep(torch.cat([store.state(i, name) for i in documents]).to(dtype)) for name in dict.fromkeys(("final", *captures))},
        rows=pack_alignments([align(e.length, e.spans, steps) for e in entries], [e.length for e in entries]).each(keep),
    )
    store.release()
    return batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(batch.documents, move(batch.token_T), {name: move(state) for name, state in batch.states.items()}, batch.rows.each(move))


class Loader:
    """Loads one batch after another; the one that is said to follow is read by a thread while the device computes."""

    def __init__(
        self, store: Store, captures: Sequence[str], steps: int, dtype: torch.dtype, device: torch.device, ahead: bool = False
    ) -> None:
        self._read = partial(read_batch, store, captures=captures, steps=steps, dtype=dtype, device=device)
        self._device = device
        self._thread = ThreadPoolExecutor(1) if ahead else None
        self._following: tuple[list[int], Future[Batch]] | None = None

    def load(self, documents: Sequence[int], following: Sequence[int] | None = None) -> Batch:
        """A batch of `documents`; `following`: those that are asked for next."""
        expected, self._following = self._following, None
        is_here = expected is not None and expected[0] == list(documents)
        batch = expected[1].result() if expected is not None and is_here else self._read(documents)
        if self._thread is not None and following is not None:
            self._following = list(following), self._thread.submit(self._read, following)
        return to_device(batch, self._device)
