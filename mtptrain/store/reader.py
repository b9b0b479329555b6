"""Reads the store: an index of documents in memory, states memory-mapped from disk.

T tokens of a document, H hidden size.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor

from mtptrain import manifest
from mtptrain.data.documents import TRAIN
from mtptrain.errors import UserError
from mtptrain.files import hash_json
from mtptrain.store.codecs import BF16, codec_of
from mtptrain.store.format import (
    ONLINE,
    TOKENS,
    Entry,
    Sidecar,
    StoreDamage,
    check_content,
    check_part,
    part_path,
    parts_kept,
    read_sidecar,
)
from mtptrain.store.mapped import MappedFile

_MAPPED_FILES = 4096
"""Files mapped at once; the kernel's default limit is 65,530 maps a process."""


class Store:
    """`entries` are the documents in global order. Opening checks sizes and headers; a file's hash is checked when it is first read."""

    def __init__(self, folder: Path, manifest: dict[str, Any], sidecars: list[Sidecar]) -> None:
        self.folder = folder
        self.manifest = manifest
        self._online = bool(manifest["inputs"].get(ONLINE))
        self.entries: list[Entry] = [entry for sidecar in sidecars for entry in self._entries(sidecar)]
        self._codecs = {(s.shard, c): codec_of(f.codec, folder) for s in sidecars for c, f in s.files.items() if f.codec is not None}
        self.sidecars = sidecars
        self._sound: set[tuple[int, str]] = set()
        self._mapped: OrderedDict[tuple[int, str], MappedFile] = OrderedDict()
        self._read: set[tuple[int, str]] = set()
        self._lock = threading.Lock()  # a thread may read ahead

    @classmethod
    def open(cls, folder: Path, captures: list[str]) -> "Store":
        """The finished store in `folder`, with what `captures` needs checked. Raises UserError that names what is missing or damaged."""
        found = manifest.require(folder, "the hidden-state store", "python -m mtptrain.precompute (with the same arguments)")
        stored = found["results"]["captures"]
        if absent := [c for c in captures if c not in stored]:
            raise UserError(
                f"{folder} has no capture {absent[0]} (only {', '.join(stored)}); name it in precompute.captures and run precompute"
            )
        sidecars = [read_sidecar(folder, shard, hash_json(found["inputs"])) for shard in range(found["results"]["shards"])]
        for sidecar in sidecars:
            for part in parts_kept(found["inputs"], sidecar.split, captures):
                check_part(folder, sidecar, part)
                if part != TOKENS and (tag := sidecar.files[part].codec) != (said := stored[part]["codec"]) and tag != BF16.tag:
                    raise StoreDamage(f"{part_path(folder, sidecar.shard, part)} is stored as {tag}, the manifest says {said}")
        return cls(folder, found, sidecars)

    def _entries(self, sidecar: Sidecar) -> list[Entry]:
        """Of training documents whose states come and go all: which are rejected is not known."""
        return sidecar.documents if self._online and sidecar.split == TRAIN else sidecar.entries()

    def admit(self, shard: int) -> set[int]:
        """A shard's states have come: global indices of its documents whose states are rejected. StoreDamage where they are not here."""
        sidecar = read_sidecar(self.folder, shard, self.sidecars[shard].fingerprint)
        for part, file in sidecar.files.items():
            check_part(self.folder, sidecar, part)
            if file.codec is not None:
                self._codecs[shard, part] = codec_of(file.codec, self.folder)
        self.sidecars[shard] = sidecar
        gone = {r.start for r in sidecar.rejected}
        return {i for i, entry in enumerate(self.entries) if entry.shard == shard and entry.start in gone} if gone else set()

    def forget(self, shard: int) -> None:
        """A shard's states are no longer needed: let go of their files, which may be deleted and come anew."""
        with self._lock:
            for key in [key for key in self._mapped if key[0] == shard and key[1] != TOKENS]:
                del self._mapped[key]
                self._read.discard(key)
            self._sound = {key for key in self._sound if key[0] != shard or key[1] == TOKENS}

    def indices(self, split: str) -> list[int]:
        """Global indices of a split's documents."""
        return [i for i, entry in enumerate(self.entries) if entry.split == split]

    def tokens(self, i: int) -> Tensor:
        """Token ids of document `i`, int64 [T]."""
        entry = self.entries[i]
        return self._part(entry.shard, TOKENS)["tokens"][entry.start : entry.start + entry.length].long()

    def mask(self, i: int) -> Tensor:
        """Supervision of document `i`, bool [T]: true on tokens of its spans."""
        entry = self.entries[i]
        return self._part(entry.shard, TOKENS)["mask"][entry.start : entry.start + entry.length].bool()

    def state(self, i: int, capture: str) -> Tensor:
        """Hidden states of document `i` at `capture`, bf16 [T, H]; where they are stored so, a view of the file, not to be written to."""
        entry = self.entries[i]
        tensors = self._part(entry.shard, capture)
        return self._codecs[entry.shard, capture].decode(tensors, entry.start, entry.start + entry.length)

    def release(self) -> None:
        """Hand back the pages read since the last call, so that a pass over the store does not end with all of it in the process."""
        with self._lock:
            for key in self._read & self._mapped.keys():
                self._mapped[key].release()
            self._read.clear()

    def _part(self, shard: int, part: str) -> dict[str, Tensor]:
        with self._lock:
            return self._mapped_part((shard, part))

    def _mapped_part(self, key: tuple[int, str]) -> dict[str, Tensor]:
        shard, part = key
        self._read.add(key)
        if key in self._mapped:
            self._mapped.move_to_end(key)
            return self._mapped[key].tensors
        if key not in self._sound:
            check_content(self.folder, self.sidecars[shard], part)
            self._sound.add(key)
        self._mapped[key] = mapped = MappedFile(part_path(self.folder, shard, part))
        if part != TOKENS:
            self._codecs[key].check(mapped.tensors, part_path(self.folder, shard, part))
        if len(self._mapped) > _MAPPED_FILES:
            self._mapped.popitem(last=False)
        return self._mapped[key].tensors
