"""Writes shards: each part's file first, the sidecar that makes them count last."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.errors import UserError
from mtptrain.files import hash_bytes, write_atomic
from mtptrain.store.codecs import BF16, StateCodec
from mtptrain.store.format import (
    FINAL,
    METADATA_KEY,
    TOKENS,
    Entry,
    PartFile,
    Rejected,
    Sidecar,
    StoreDamage,
    captures_made,
    check_part,
    corrupt_path,
    header_identity,
    part_fingerprint,
    part_path,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)


class StoreWriter:
    """`fingerprint` stands for everything that determined the store (its inputs); it is in every file.

    `codec` is of `final`, which the teacher is made of; `aux_codec` of every other capture. A shard of held-out documents has its states
    as they are, in bf16: what heads are chosen and measured by is what the target gives.
    """

    def __init__(self, folder: Path, fingerprint: str, codec: StateCodec, aux_codec: StateCodec | None = None) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._codec = codec
        self._aux_codec = aux_codec or codec

    def codec(self, capture: str, split: str = TRAIN) -> StateCodec:
        if split == HELD_OUT:
            return BF16
        return self._codec if capture == FINAL else self._aux_codec

    def made(self, captures: Iterable[str]) -> dict[str, Any]:
        """What the manifest says of these captures."""
        return captures_made(self.fingerprint, {c: self.codec(c).tag for c in captures})

    def missing(self, shard: int, captures: Sequence[str]) -> tuple[list[str], str | None]:
        """Parts of `shard` that must be made, and what is damaged (None if they simply are not there yet)."""
        parts, damage = [TOKENS, *captures], None
        if not sidecar_path(self.folder, shard).exists():
            return parts, None
        try:
            sidecar = read_sidecar(self.folder, shard, self.fingerprint)
        except StoreDamage as e:
            return parts, e.problem
        missing = []
        for part in parts:
            try:
                check_part(self.folder, sidecar, part)
            except StoreDamage as e:
                missing.append(part)
                damage = e.problem if part in sidecar.files else damage
        return missing, damage

    def write(self, shard: int, documents: Sequence[Document], states: dict[str, Tensor], rejected: Sequence[Rejected] = ()) -> None:
        """Add the captures of `states` (bf16 [N, H], N = all tokens of `documents`, of one split, in order) to a shard; its tokens too
        where they are not there. Files of other captures stay untouched. Raises UserError when the disk refuses, ValueError on a state
        that is not finite.
        """
        try:
            sidecar = read_sidecar(self.folder, shard, self.fingerprint)
        except StoreDamage:
            sidecar = new_sidecar(shard, self.fingerprint, documents)
        try:
            check_part(self.folder, sidecar, TOKENS)
        except StoreDamage:
            sidecar.files[TOKENS] = write_part(self.folder, self.fingerprint, shard, TOKENS, None, _token_tensors(documents))
        for capture, state_NH in states.items():
            if state_NH.shape[0] != sidecar.tokens:
                raise ValueError(f"capture {capture} of shard {shard} has {state_NH.shape[0]} rows for {sidecar.tokens} tokens")
            if not torch.isfinite(state_NH).all():
                raise ValueError(f"capture {capture} of shard {shard} holds NaN or Inf")
            codec = self.codec(capture, documents[0].split)
            sidecar.files[capture] = write_part(self.folder, self.fingerprint, shard, capture, codec.tag, codec.encode(state_NH))
        sidecar.rejected = [r for r in sidecar.rejected if r.capture not in states] + list(rejected)
        write_sidecar(self.folder, sidecar)


def drop_states(folder: Path, sidecar: Sidecar) -> None:
    """Delete a shard's states; its tokens stay. Its sidecar says so first."""
    gone = [part for part in sidecar.files if part != TOKENS]
    for part in gone:
        del sidecar.files[part]
    sidecar.rejected = []
    write_sidecar(folder, sidecar)
    for part in gone:
        part_path(folder, sidecar.shard, part).unlink(missing_ok=True)


def write_part(
    folder: Path, fingerprint: str, shard: int, part: str, codec: dict[str, str | int] | None, tensors: dict[str, Tensor]
) -> PartFile:
    """A part's file, in the store whose inputs' fingerprint is given, and what its sidecar says of it. UserError when the disk refuses."""
    fingerprint = part_fingerprint(fingerprint, part, codec)
    payload = save(tensors, metadata={METADATA_KEY: header_identity(fingerprint, shard)})
    path = part_path(folder, shard, part)
    try:
        write_atomic(path, lambda tmp: _write_bytes(tmp, payload))
        corrupt_path(path).unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; mend that and run the same command again, finished shards are kept") from e
    return PartFile(bytes=len(payload), hash=hash_bytes(payload), fingerprint=fingerprint, codec=codec)


def _write_bytes(path: Path, payload: bytes) -> None:
    path.write_bytes(payload)


def new_sidecar(shard: int, fingerprint: str, documents: Sequence[Document]) -> Sidecar:
    """Of a shard that holds these documents in order; no file is in it yet."""
    entries, start = [], 0
    for d in documents:
        length = len(d.tokens)
        entries.append(Entry(id=d.id, source=d.source, split=d.split, shard=shard, start=start, length=length, spans=d.spans))
        start += length
    return Sidecar(shard=shard, fingerprint=fingerprint, tokens=start, documents=entries)


def _token_tensors(documents: Sequence[Document]) -> dict[str, Tensor]:
    """`tokens` int32 [N] and `mask` uint8 [N], 1 on the tokens of a span."""
    tokens_N = torch.tensor([t for d in documents for t in d.tokens], dtype=torch.int32)
    mask_N = torch.zeros(len(tokens_N), dtype=torch.uint8)
    start = 0
    for d in documents:
        for first, stop in d.spans:
            mask_N[start + first : start + stop] = 1
        start += len(d.tokens)
    return {"tokens": tokens_N, "mask": mask_N}
