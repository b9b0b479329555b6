"""Held-out prompts: chosen before anything is generated, and kept apart from training.

Text is compared lower-cased with runs of whitespace made one space. A training prompt overlaps the held-out ones if it
opens with the same user turn as one of them, or shares any 13 consecutive words of its user turns.
"""

import random
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mtptrain.data.readers import Record

NGRAM = 13
Row = TypeVar("Row")


def normalised(text: str) -> str:
    return " ".join(text.lower().split())


def deduplicated(records: Iterable[Record], with_answers: bool) -> tuple[list[Record], int]:
    """The first of each set of equal dialogues, and how many were dropped. Assistant turns count only where they are kept."""
    seen: set[tuple[tuple[str, str], ...]] = set()
    kept: list[Record] = []
    dropped = 0
    for record in records:
        key = tuple((m["role"], _content(m)) for m in record.messages if with_answers or m["role"] != "assistant")
        if key in seen:
            dropped += 1
        else:
            seen.add(key)
            kept.append(record)
    return kept, dropped


def without_overlap(train: Iterable[Record], held_out: Sequence[Record]) -> tuple[list[Record], int]:
    """Training records that share no prompt with the held-out ones, and how many were dropped."""
    openings = {_opening(r) for r in held_out}
    known = {gram for r in held_out for gram in ngrams(r)}
    kept: list[Record] = []
    dropped = 0
    for record in train:
        if _opening(record) in openings or not known.isdisjoint(ngrams(record)):
            dropped += 1
        else:
            kept.append(record)
    return kept, dropped


def split_off(records: Sequence[Record], fraction: float, most: int, seed: int) -> tuple[list[Record], list[Record]]:
    """(train, held out): a seeded draw of `fraction` of the records, at most `most`, at least one of two or more unless 0 is asked.

    Order is kept. Records that share a prompt with a drawn one are for `without_overlap` to drop.
    """
    count = min(most, round(fraction * len(records)), len(records) - 1)
    if fraction > 0 and len(records) > 1:
        count = max(count, 1)
    drawn = set(random.Random(seed).sample(range(len(records)), max(count, 0)))
    return [r for i, r in enumerate(records) if i not in drawn], [r for i, r in enumerate(records) if i in drawn]


def sampled(rows: list[Row], most: int | None, seed: int) -> list[Row]:
    """At most `most` of the rows, drawn with `seed`, in their order."""
    if most is None or len(rows) <= most:
        return rows
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), most))]


def ngrams(record: Record) -> set[tuple[str, ...]]:
    """Every `NGRAM` consecutive words of the user turns taken together; none if there are fewer words."""
    words = [word for m in record.messages if m["role"] == "user" for word in m["content"].lower().split()]
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def _opening(record: Record) -> str:
    return next((normalised(m["content"]) for m in record.messages if m["role"] == "user"), "")


def _content(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return normalised(message["content"]) + (repr(calls) if calls else "")
