"""The records of a run: read, deduplicated, split by prompt. Nothing is generated here, and nothing is dropped uncounted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mtptrain.config import DataConfig, DataSource, ResponseMode
from mtptrain.data.readers import Record, Reject, read_records
from mtptrain.data.self_prompts import own_prompts
from mtptrain.data.split import deduplicated, sampled, split_off, without_overlap
from mtptrain.errors import UserError

OWN_FILE = "own_prompts.jsonl"


@dataclass(slots=True, kw_only=True)
class Gathered:
    """`rows` read in all; those neither here nor in `rejects` are counted in `dropped` by reason."""

    train: list[Record]
    held_out: list[Record]
    rejects: list[Reject]
    rows: int
    dropped: Counter[str] = field(default_factory=Counter)


def gather(cfg: DataConfig, seed: int) -> Gathered:
    """All training and held-out records, without those that the target is still to write. Raises UserError."""
    keep = cfg.responses.mode is ResponseMode.keep
    rows = list(_own_records()) if cfg.source is DataSource.self else sampled(_read(cfg.train), cfg.limit, seed)
    held_rows = _read(cfg.held_out)
    found = Gathered(
        train=[], held_out=[], rejects=[r for r in [*rows, *held_rows] if isinstance(r, Reject)], rows=len(rows) + len(held_rows)
    )
    train, dropped = deduplicated((r for r in rows if isinstance(r, Record)), with_answers=keep)
    found.dropped["duplicate"] += dropped
    if cfg.held_out:
        held_out, dropped = deduplicated((r for r in held_rows if isinstance(r, Record)), with_answers=False)
        found.dropped["held-out duplicate"] += dropped
        found.held_out = sampled(held_out, cfg.held_out_max, seed)
        found.dropped["held-out beyond data.held_out_max"] += len(held_out) - len(found.held_out)
    else:
        train, held_out = split_off(train, cfg.held_out_fraction, cfg.held_out_max, seed)
        found.held_out = held_out
    if cfg.source is DataSource.self:
        train = sampled(train, cfg.limit, seed)
    found.train, dropped = without_overlap(train, held_out)
    found.dropped["shares a prompt with held-out"] += dropped
    make_ids_unique([*found.train, *found.held_out])
    if not found.train and not found.rejects:
        why = ", ".join(f"{n} dropped: {reason}" for reason, n in (+found.dropped).items()) or "none was read"
        raise UserError(f"no training record is left ({why}); give more data in data.train")
    return found


def make_ids_unique(records: Sequence[Record]) -> None:
    """Give the second record of an id the suffix ~2, and so on, in order."""
    taken = {r.id for r in records}
    seen: set[str] = set()
    for record in records:
        if record.id in seen:
            n = 2
            while f"{record.id}~{n}" in taken:
                n += 1
            record.id = f"{record.id}~{n}"
            taken.add(record.id)
        seen.add(record.id)


def _read(paths: Sequence[str]) -> list[Record | Reject]:
    return [row for path in paths for row in read_records(path)]


def _own_records() -> list[Record]:
    return [
        Record(id=r["id"], source=r["source"], messages=r["messages"], file=OWN_FILE, line=line) for line, r in enumerate(own_prompts(), 1)
    ]
