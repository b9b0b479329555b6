"""The order in which documents are trained: a pure function of (seed, epoch) over global document indices."""

from collections.abc import Sequence

import numpy as np


def epoch_batches(documents: Sequence[int], lengths: Sequence[int], *, budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle `documents` and cut the sequence into batches of at most `budget` tokens (a longer document is a batch of its own).

    `lengths[i]` is the number of tokens of `documents[i]`. Returns lists of documents; each appears once.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(documents))
    batches: list[list[int]] = []
    filled = 0
    for i in order:
        if not batches or filled + lengths[i] > budget:
            batches.append([])
            filled = 0
        batches[-1].append(documents[i])
        filled += lengths[i]
    return batches
