"""The prepared document and its file: what prepare writes and precompute reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mtptrain.errors import UserError
from mtptrain.files import hash_file, write_atomic
from mtptrain.manifest import MANIFEST, is_derived

FILE = "documents.parquet"
TRAIN, HELD_OUT = "train", "held_out"


@dataclass(slots=True, kw_only=True)
class Document:
    """A tokenised dialogue. `tokens` are the generated ids themselves, never re-tokenised text."""

    id: str
    source: str
    split: str
    """`train` or `held_out`."""
    tokens: list[int]
    spans: list[tuple[int, int]]
    """Half-open token ranges [start, end) that the target generates: assistant text and its end marker."""


_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.list_(pa.int32(), 2))),
    ]
)


def write_documents(folder: Path, documents: list[Document]) -> None:
    table = pa.Table.from_pylist(
        [{"id": d.id, "source": d.source, "split": d.split, "tokens": d.tokens, "spans": [list(s) for s in d.spans]} for d in documents],
        schema=_SCHEMA,
    )
    write_atomic(folder / FILE, lambda tmp: pq.write_table(table, tmp))


def check_documents(folder: Path, results: dict[str, Any]) -> None:
    """UserError if the documents are not the ones that `results`, of the folder's manifest, were written with."""
    path = folder / FILE
    if not path.exists() or hash_file(path) != results[FILE]:
        state = "damaged" if path.exists() else "missing"
        if is_derived(folder):
            raise UserError(f"{path} is {state}; delete {folder.parent} and merge or filter again")
        raise UserError(f"{path} is {state}; delete {folder / MANIFEST} and prepare again, which keeps the responses and writes it anew")


def read_documents(folder: Path) -> list[Document]:
    rows = pq.read_table(folder / FILE).to_pylist()
    return [
        Document(id=r["id"], source=r["source"], split=r["split"], tokens=r["tokens"], spans=[(s[0], s[1]) for s in r["spans"]])
        for r in rows
    ]
