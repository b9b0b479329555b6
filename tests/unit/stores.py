"""Small stores of random states for tests: no target, no forward."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mtptrain import manifest
from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.files import hash_json
from mtptrain.store.codecs import BF16, StateCodec
from mtptrain.store.format import shard_ranges
from mtptrain.store.writer import StoreWriter


def random_documents(lengths: Sequence[int], seed: int = 0, vocab_size: int = 320) -> list[Document]:
    """One span in each document's second half; the last quarter of the documents is held out."""
    rng = random.Random(seed)
    return [
        Document(
            id=f"doc-{i}",
            source="abc"[i % 3],
            split=HELD_OUT if 4 * i >= 3 * len(lengths) and i else TRAIN,
            tokens=[rng.randrange(vocab_size) for _ in range(length)],
            spans=[(length // 2, length)],
        )
        for i, length in enumerate(lengths)
    ]


def random_state(documents: Sequence[Document], capture: str, hidden_size: int, seed: int = 0) -> list[Tensor]:
    """bf16 [T, H] a document."""
    rng = torch.Generator().manual_seed(seed + sum(map(ord, capture)))
    return [torch.randn(len(d.tokens), hidden_size, generator=rng).bfloat16() for d in documents]


def make_store(
    folder: Path,
    documents: Sequence[Document],
    states: dict[str, list[Tensor]],
    shard_tokens: int = 64,
    inputs: dict[str, object] | None = None,
    codecs: tuple[StateCodec, StateCodec] = (BF16, BF16),
) -> None:
    """A finished store of `states` (capture -> one tensor a document); captures it has already are kept."""
    inputs = inputs or {"made": "for a test"}
    captures = manifest.require(folder, "", "")["results"]["captures"] if (folder / manifest.MANIFEST).exists() else {}
    writer = StoreWriter(folder, hash_json(inputs), *codecs)
    shards = shard_ranges(documents, shard_tokens)
    for shard, members in enumerate(shards):
        writer.write(
            shard, [documents[i] for i in members], {capture: torch.cat([state[i] for i in members]) for capture, state in states.items()}
        )
    manifest.finish(folder, inputs, {"captures": captures | writer.made(states), "shards": len(shards)})
