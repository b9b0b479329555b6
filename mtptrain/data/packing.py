"""Packing documents into batches under a token budget: no padding, no document split."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of document indices, each of at most `budget` tokens; a longer document is a batch of its own.

    Longest first, each document into the fullest batch that still takes it (ties: the older batch). A pure function of its arguments:
    every index appears exactly once, ascending inside a batch, batches in the order they were opened.

    >>> pack([3, 5, 2, 9], budget=8)
    [[3], [0, 1], [2]]
    """
    batches: list[list[int]] = []
    open_batches: list[tuple[int, int]] = []  # (tokens of room, batch), ascending
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        at = bisect_left(open_batches, (length, -1))
        if at < len(open_batches):
            room, batch = open_batches.pop(at)
            batches[batch].append(document)
        else:
            room, batch = budget, len(batches)
            batches.append([document])
        if room > length:
            insort(open_batches, (room - length, batch))
    return [sorted(batch) for batch in batches]
