"""The part of a store's states that is on disk while training goes on: a window over its shards, in the order of training.

    STORE/ring.json   {"shards": [every visit's shard], "done": visits that training is past, "room": visits whose states may lie here}

A visit is one epoch's use of one shard. Training's first rank writes the file; the feeder (stages/feed.py) alone writes and deletes
states: those of the visits done .. done + room.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mtptrain.files import read_json, write_json

RING, FEED_CONFIG, FEED_LOG = "ring.json", "feed.yaml", "feed.log"


@dataclass(slots=True)
class Ring:
    """What the file holds."""

    shards: list[int]
    done: int
    room: int

    @classmethod
    def read(cls, folder: Path) -> "Ring":
        return cls(**read_json(folder / RING))

    def write(self, folder: Path) -> None:
        write_json(folder / RING, asdict(self))

    @property
    def window(self) -> list[int]:
        """Shards that should be there, each once, in the order in which they are wanted."""
        return list(dict.fromkeys(self.shards[self.done : self.done + self.room]))


@dataclass(slots=True)
class Visits:
    """Which updates use which visits."""

    shards: list[int]
    first: list[int]
    """The update that uses a visit first; it does not fall from one visit to the next."""
    last: list[int]

    @classmethod
    def of(cls, epochs: Sequence[Sequence[Collection[int]]], accumulate: int, updates: int) -> "Visits":
        """`epochs`: of each epoch the shards of each batch, in order; `accumulate` batches make an update, of which there are `updates`."""
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        batch = 0
        for epoch, batches in enumerate(epochs):
            for shards in batches:
                update = batch // accumulate
                batch += 1
                for shard in shards if update < updates else ():
                    first.setdefault((epoch, shard), update)
                    last[epoch, shard] = update
        return cls([shard for _, shard in first], list(first.values()), [last[visit] for visit in first])

    def done(self, update: int) -> int:
        """Visits at the start that no update from `update` on uses."""
        return next((i for i, last in enumerate(self.last) if last >= update), len(self.last))

    def wanted(self, update: int) -> list[int]:
        """Shards that `update` uses."""
        return [s for s, first, last in zip(self.shards, self.first, self.last, strict=True) if first <= update <= last]

    def room(self) -> int:
        """The fewest visits that must be there at once."""
        most = begun = done = 0
        for update in range(max(self.last, default=-1) + 1):
            while begun < len(self.first) and self.first[begun] <= update:
                begun += 1
            while self.last[done] < update:
                done += 1
            most = max(most, begun - done)
        return most
