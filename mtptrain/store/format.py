"""The store on disk: names, sidecars and the checks that name a damaged file. README.md beside this file describes it.

A *part* of a shard is `tokens` or a capture (`final`, `after_<i>`): one safetensors file each. The sidecar is written last, so a
shard without one was not finished.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtptrain.data.documents import TRAIN, Document
from mtptrain.errors import UserError, in_line
from mtptrain.files import hash_file, hash_json, with_hash, without_hash, write_json
from mtptrain.manifest import DERIVED
from mtptrain.store.codecs import codec_of

VERSION = 2
TOKENS = "tokens"
FINAL = "final"
METADATA_KEY = "mtptrain"
_TOKEN_LAYOUT = {"tokens": ("I32", 1), "mask": ("U8", 1)}


class StoreDamage(UserError):
    """A file of the store is missing, cut short, altered or of another store. `problem` names it."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; run precompute again to make it anew")
        self.problem = in_line(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A document's place in the store: rows start .. start+length of every part of `shard`."""

    id: str
    source: str
    split: str
    shard: int
    start: int
    length: int
    spans: list[tuple[int, int]]
    """Half-open ranges inside the document."""


@dataclass(slots=True, kw_only=True)
class PartFile:
    """What a sound file of a part is like."""

    bytes: int
    hash: str
    """XXH3-128 of the whole file."""
    fingerprint: str
    """Of everything that determined the part; the file's header repeats it."""
    codec: dict[str, Any] | None = None
    """None for `tokens`."""


@dataclass(slots=True, kw_only=True)
class Rejected:
    """A document whose state in `capture` is not finite. Its rows are zeros and it is no entry."""

    id: str
    start: int
    capture: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Sidecar:
    """The index of a shard."""

    shard: int
    fingerprint: str
    """Of the store's inputs."""
    tokens: int
    documents: list[Entry] = field(default_factory=list)
    """All of the shard, rejected ones too, in order."""
    rejected: list[Rejected] = field(default_factory=list)
    files: dict[str, PartFile] = field(default_factory=dict)

    @property
    def split(self) -> str:
        """Of all its documents."""
        return self.documents[0].split

    def entries(self) -> list[Entry]:
        gone = {r.start for r in self.rejected}
        return [entry for entry in self.documents if entry.start not in gone]


def sidecar_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.json"


def part_path(folder: Path, shard: int, part: str) -> Path:
    return folder / f"{shard:05d}.{part}.safetensors"


_CORRUPT = ".corrupt"


def corrupt_path(path: Path) -> Path:
    """Where a corrupt file is set aside until it is made anew."""
    return path.with_name(path.name + _CORRUPT)


def is_set_aside(path: Path) -> bool:
    return path.suffix == _CORRUPT


def part_fingerprint(store_fingerprint: str, part: str, codec: dict[str, Any] | None) -> str:
    return hash_json([store_fingerprint, part, codec])


def captures_made(fingerprint: str, tags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the manifest of the store with this fingerprint says of its captures; `tags`: the codec of each."""
    return {c: {"codec": tag, "fingerprint": part_fingerprint(fingerprint, c, tag)} for c, tag in tags.items()}


def header_identity(fingerprint: str, shard: int) -> str:
    """What a part's header says about itself, so that a file of another shard or store is told by its header alone."""
    return f"{fingerprint}/{shard}"


def shard_ranges(documents: Sequence[Document], shard_tokens: int) -> list[range]:
    """Documents of each shard, in order. A shard closes before the document that would take it past `shard_tokens`, and before one of
    another split; a longer document is a shard of its own.
    """
    ranges: list[range] = []
    first = held = 0
    for index, document in enumerate(documents):
        length = len(document.tokens)
        if index > first and (held + length > shard_tokens or document.split != documents[first].split):
            ranges.append(range(first, index))
            first, held = index, 0
        held += length
    return [*ranges, range(first, len(documents))] if documents else ranges


ONLINE = "train.online"
"""The key of inputs of a store that keeps the states of held-out documents alone; those of training come and go (ring.py)."""


def parts_kept(inputs: dict[str, Any], split: str, captures: Sequence[str]) -> list[str]:
    """Parts that every shard of a split has in a finished store."""
    return [TOKENS] if split == TRAIN and inputs.get(ONLINE) else [TOKENS, *captures]


def shards_of(inputs: dict[str, Any], documents: Sequence[Document], shard_tokens: int) -> list[range]:
    """`shard_ranges`, or of a store that was made from others (derive.py) the shards it has."""
    derived = inputs.get(DERIVED)
    if derived is None:
        return shard_ranges(documents, shard_tokens)
    ends = list(accumulate(derived["shards"]))
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def write_sidecar(folder: Path, sidecar: Sidecar) -> None:
    write_json(sidecar_path(folder, sidecar.shard), {"version": VERSION, **with_hash(asdict(sidecar))})


def read_sidecar(folder: Path, shard: int, fingerprint: str) -> Sidecar:
    """The shard's sidecar, whole and of this store. Raises StoreDamage."""
    path = sidecar_path(folder, shard)
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreDamage(f"{path} is missing: shard {shard} is unfinished") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise StoreDamage(f"{path} is damaged ({e})") from e
    body = without_hash(read) if isinstance(read, dict) and read.pop("version", None) == VERSION else None
    if body is None:
        raise StoreDamage(f"{path} is damaged or of another store version")
    if (body["shard"], body["fingerprint"]) != (shard, fingerprint):
        raise StoreDamage(f"{path} is shard {body['shard']} of another store or place")
    return Sidecar(
        shard=shard,
        fingerprint=fingerprint,
        tokens=body["tokens"],
        documents=[Entry(**{**d, "spans": [(s[0], s[1]) for s in d["spans"]]}) for d in body["documents"]],
        rejected=[Rejected(**r) for r in body["rejected"]],
        files={part: PartFile(**f) for part, f in body["files"].items()},
    )


def check_part(folder: Path, sidecar: Sidecar, part: str) -> None:
    """Presence, size and header of a part's file, without reading its data. Raises StoreDamage."""
    path = part_path(folder, sidecar.shard, part)
    record = sidecar.files.get(part)
    if record is None or not path.exists():
        raise StoreDamage(f"{path} is missing")
    codec = None if part == TOKENS else codec_of(record.codec or {}, path)
    expected, shared = (_TOKEN_LAYOUT, ()) if codec is None else (codec.layout, codec.shared)
    if (size := path.stat().st_size) != record.bytes:
        raise StoreDamage(f"{path} is cut short or altered ({size} bytes instead of {record.bytes})")
    try:
        with safe_open(path, "pt") as f:
            identity = (f.metadata() or {}).get(METADATA_KEY)
            found = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118
            layout = {name: (tensor.get_dtype(), len(tensor.get_shape())) for name, tensor in found.items()}
            rows = {tuple(tensor.get_shape()[:1]) for name, tensor in found.items() if name not in shared}
    except SafetensorError as e:
        raise StoreDamage(f"{path} has a damaged header ({e})") from e
    if identity != header_identity(record.fingerprint, sidecar.shard):
        raise StoreDamage(f"{path} belongs to another shard or store")
    if layout != expected:
        raise StoreDamage(f"{path} holds {layout} (dtype and dimensions of each tensor) instead of {dict(expected)}")
    if rows != {(sidecar.tokens,)}:
        raise StoreDamage(f"{path} holds {sorted(rows)} rows instead of {sidecar.tokens}")


def check_content(folder: Path, sidecar: Sidecar, part: str) -> None:
    """Hash a part's whole file. Raises StoreDamage if it differs, having set the file aside so that precompute finds it missing."""
    path = part_path(folder, sidecar.shard, part)
    aside = corrupt_path(path)
    try:
        if hash_file(path) == sidecar.files[part].hash:
            return
        path.replace(aside)
    except FileNotFoundError:
        if not aside.exists():  # else another process found it corrupt just now
            raise StoreDamage(f"{path} is missing") from None
    raise StoreDamage(f"{path} is corrupt (its content hash differs) and was renamed to {aside.name}")
