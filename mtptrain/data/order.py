"""The order in which documents are trained: a pure function of (seed, epoch) over global document indices and their shards."""

from collections.abc import Sequence

import numpy as np


def epoch_batches(
    documents: Sequence[int],
    lengths: Sequence[int],
    *,
    budget: int,
    seed: int,
    epoch: int,
    shards: Sequence[int] = (),
    together: int | None = None,
) -> list[list[int]]:
    """Shuffle `documents` and cut the sequence into batches of at most `budget` tokens (a longer document is a batch of its own).

    `lengths[i]` is the number of tokens of `documents[i]`, `shards[i]` the store's shard it is in. With `together` shards are shuffled,
    and then the documents of so many shards at a time, so that few are in use at once. Returns lists of documents; each appears once.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(documents))
    if together is not None:
        numbers, shard_of = np.unique(np.asarray(shards), return_inverse=True)
        turn = rng.permutation(len(numbers)) // together
        order = order[np.argsort(turn[shard_of[order]], kind="stable")]
    batches: list[list[int]] = []
    filled = 0
    for i in order:
        if not batches or filled + lengths[i] > budget:
            batches.append([])
            filled = 0
        batches[-1].append(documents[i])
        filled += lengths[i]
    return batches
