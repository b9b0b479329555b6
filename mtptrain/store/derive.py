"""Runs made of other runs' data and store: merged, or with some of the documents left out. No state is computed or coded anew.

A shard of the new store is one of an old store, under a new number and fingerprint, without the rows of the documents that were dropped.
Its manifest's inputs hold what all old ones agree in, and under `derived` where they came from; a stage that is asked for this folder
compares only what they agree in.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from mtptrain import manifest
from mtptrain.data.documents import FILE, HELD_OUT, TRAIN, Document, check_documents, read_documents, write_documents
from mtptrain.data.summary import summarise
from mtptrain.errors import UserError
from mtptrain.files import hash_file, hash_json
from mtptrain.store.codecs import codec_of
from mtptrain.store.format import ONLINE, TOKENS, captures_made, check_content, part_path, write_sidecar
from mtptrain.store.reader import Store
from mtptrain.store.writer import new_sidecar, write_part

_AGREED_DATA = ("target", "tokenizer and template", "stop_ids")
_AGREED_STORE = ("target", "tokenizer", "dtype", "store.codec", "store.aux_codec", "store_format")
"""What runs must have in common; whatever else they have in common is kept."""


@dataclass(slots=True)
class Run:
    """A finished run's data and store."""

    folder: Path
    data: dict[str, Any]
    """The manifest of its data."""
    store: Store
    documents: list[Document]

    @classmethod
    def open(cls, folder: Path) -> "Run":
        data = manifest.require(folder / "data", "the prepared data", "python -m mtptrain.prepare (with the same arguments)")
        check_documents(folder / "data", data["results"])
        found = manifest.require(folder / "store", "the hidden-state store", "python -m mtptrain.precompute (with the same arguments)")
        store = Store.open(folder / "store", list(found["results"]["captures"]))
        if found["inputs"].get(ONLINE):
            raise UserError(f"{folder / 'store'} keeps no states of training documents (it was made with train.online=true)")
        documents = {d.id: d for d in read_documents(folder / "data")}
        if absent := [e.id for e in store.entries if e.id not in documents]:
            raise UserError(f"{folder / 'store'} holds document {absent[0]}, which {folder / 'data' / FILE} does not; run precompute again")
        return cls(folder, data, store, [documents[e.id] for e in store.entries])


def content(document: Document) -> str:
    """What makes two documents the same."""
    return hash_json([document.tokens, document.spans])


def prompt(document: Document) -> tuple[int, ...]:
    """The tokens before what the target generates first."""
    return tuple(document.tokens[: document.spans[0][0]])


def merge(target: Path, folders: Sequence[Path]) -> Counter[str]:
    """`target`: a run with all documents of the others, each once. Returns how many were dropped, by reason.

    A training document that is, or has the prompt of, a held-out one of any run is dropped: heads are measured on those. So is a
    held-out one whose prompt another run has held out: two answers to one prompt are no two measurements.
    """
    for i, folder in enumerate(folders):
        if folder.resolve() in {other.resolve() for other in folders[:i]}:
            raise UserError(f"{folder} is named twice")
    runs = [Run.open(folder) for folder in folders]
    held_out = [d for run in runs for d in run.documents if d.split == HELD_OUT]
    measured, prompts = {content(d) for d in held_out}, {prompt(d) for d in held_out}
    first_with = {prompt(d): run.folder for run in reversed(runs) for d in run.documents if d.split == HELD_OUT}
    folder_of = {id(d): run.folder for run in runs for d in run.documents}
    seen: set[str] = set()

    def why_not(document: Document) -> str | None:
        key = content(document)
        if document.split == TRAIN and (key in measured or prompt(document) in prompts):
            return "shares a prompt with held-out"
        if key in seen:
            return "duplicate"
        if document.split == HELD_OUT and first_with[prompt(document)] != folder_of[id(document)]:
            return "held-out with the prompt of another run's"
        seen.add(key)
        return None

    return _write(target, runs, why_not, {"how": "merge"})


def filter_run(
    target: Path,
    folder: Path,
    sources: Collection[str] = (),
    splits: Collection[str] = (),
    ids: Collection[str] | None = None,
    without_ids: Collection[str] | None = None,
    tokens: tuple[int, int | None] = (0, None),
) -> Counter[str]:
    """`target`: a run with the documents that fit every condition given. Returns how many were dropped, by reason."""
    run = Run.open(folder)
    dropped_ids = set(without_ids or ())
    for given, known, what, most in (
        (sources, {d.source for d in run.documents}, "source", 100),
        ({*(ids or ()), *dropped_ids}, {d.id for d in run.documents}, "document", 8),
    ):
        if unknown := sorted(set(given) - known):
            shown = ", ".join(sorted(known)[:most]) + (", ..." if len(known) > most else "")
            raise UserError(f"{folder} has no {what} {unknown[0]!r}; it has {shown}")

    def why_not(document: Document) -> str | None:
        size = len(document.tokens)
        return next(
            (
                reason
                for reason, fits in (
                    ("source", not sources or document.source in sources),
                    ("split", not splits or document.split in splits),
                    ("id", (ids is None or document.id in ids) and document.id not in dropped_ids),
                    ("length", tokens[0] <= size and (tokens[1] is None or size <= tokens[1])),
                )
                if not fits
            ),
            None,
        )

    return _write(target, [run], why_not, {"how": "filter"})


def _agreed(runs: Sequence[Run], inputs: list[dict[str, Any]], required: Sequence[str]) -> dict[str, Any]:
    """What all inputs say alike. UserError naming the first required key that they do not, with both values."""
    first = inputs[0]
    for run, other in zip(runs[1:], inputs[1:], strict=True):
        for key in required:
            if first.get(key) != other.get(key):
                raise UserError(f"{run.folder} and {runs[0].folder} differ in {key}: {other.get(key)!r} and {first.get(key)!r}")
    return {k: v for k, v in first.items() if k != manifest.DERIVED and all(k in o and o[k] == v for o in inputs)}


def _write(target: Path, runs: list[Run], why_not: Callable[[Document], str | None], how: dict[str, Any]) -> Counter[str]:
    data_inputs = _agreed(runs, [run.data["inputs"] for run in runs], _AGREED_DATA)
    store_inputs = _agreed(runs, [run.store.manifest["inputs"] for run in runs], _AGREED_STORE)
    captures = [c for c in runs[0].store.manifest["results"]["captures"] if all(c in r.store.manifest["results"]["captures"] for r in runs)]
    if not captures:
        raise UserError(f"{runs[0].folder} and {runs[1].folder} have no capture in common")
    _refuse_existing(target)
    if left := sorted({c for r in runs for c in r.store.manifest["results"]["captures"]} - set(captures)):
        print(f"captures that not all of them have are left out: {', '.join(left)}", flush=True)
    dropped: Counter[str] = Counter()
    kept: list[tuple[Run, int, list[int]]] = []
    documents: list[Document] = []
    names: Counter[str] = Counter()
    for run in runs:
        chosen: dict[int, list[int]] = {}
        for i, (entry, document) in enumerate(zip(run.store.entries, run.documents, strict=True)):
            if (reason := why_not(document)) is not None:
                dropped[reason] += 1
                continue
            names[document.id] += 1
            if names[document.id] > 1:
                document = replace(document, id=f"{document.id}~{names[document.id]}")
            documents.append(document)
            chosen.setdefault(entry.shard, []).append(i)
        kept += [(run, shard, members) for shard, members in chosen.items()]
    if not documents:
        raise UserError(f"no document is left ({', '.join(f'{n} dropped by {reason}' for reason, n in dropped.items())})")
    how |= {"from": [hash_json(run.store.manifest["inputs"]) for run in runs]}
    _write_data(target / "data", runs, documents, data_inputs | {manifest.DERIVED: how}, dropped)
    store_inputs |= {
        "documents": hash_file(target / "data" / FILE),
        manifest.DERIVED: how | {"shards": [len(members) for _, _, members in kept]},
    }
    _write_store(target / "store", kept, documents, captures, store_inputs)
    return dropped


def _refuse_existing(target: Path) -> None:
    """UserError where a run is, unless it is one whose making was interrupted: derived, and without a finished store. That is deleted."""
    for above in target.resolve().parents:
        if any((above / "data" / name).exists() for name in (manifest.STARTED, manifest.MANIFEST)):
            raise UserError(f"{target} would lie inside of the run {above}; name a folder beside it")
    data, store = target / "data", target / "store"
    unfinished = not (store / manifest.MANIFEST).exists() and not (target / "heads").exists()
    if not unfinished or not all(manifest.is_derived(part) for part in (data, store)):
        raise UserError(f"{target} is there already; name another run, or delete it")
    for part in (data, store):
        shutil.rmtree(part, ignore_errors=True)


def _write_data(folder: Path, runs: list[Run], documents: list[Document], inputs: dict[str, Any], dropped: Counter[str]) -> None:
    manifest.begin(folder, inputs)
    write_documents(folder, documents)
    rows = sum(run.data["results"]["rows"] for run in runs)
    results = summarise(documents, inputs["stop_ids"], [], dropped, 0, {}, rows) | {"audit": None, "rendering": None}
    manifest.finish(folder, inputs, results | {FILE: hash_file(folder / FILE)})


def _write_store(
    folder: Path, kept: list[tuple[Run, int, list[int]]], documents: list[Document], captures: list[str], inputs: dict[str, Any]
) -> None:
    manifest.begin(folder, inputs)
    fingerprint = hash_json(inputs)
    tags = {c: kept[0][0].store.manifest["results"]["captures"][c]["codec"] for c in captures}
    size = tokens = done = 0
    for shard, (run, old, members) in enumerate(tqdm(kept, desc="store", unit="shard", mininterval=1, delay=2)):
        row_N = torch.cat([torch.arange(e.start, e.start + e.length) for e in (run.store.entries[i] for i in members)])
        sidecar = new_sidecar(shard, fingerprint, documents[done : done + len(members)])
        for part in [TOKENS, *captures]:
            codec = run.store.sidecars[old].files[part].codec
            sidecar.files[part] = write_part(folder, fingerprint, shard, part, codec, _rows(run, old, part, row_N))
            size += sidecar.files[part].bytes
        write_sidecar(folder, sidecar)
        done, tokens = done + len(members), tokens + sidecar.tokens
    results = {
        "captures": captures_made(fingerprint, tags),
        "hidden_size": kept[0][0].store.manifest["results"]["hidden_size"],
        "shards": len(kept),
        "documents": len(documents),
        "rejected": 0,
        "tokens": tokens,
        "bytes": size,
    }
    manifest.finish(folder, inputs, results)


def _rows(run: Run, shard: int, part: str, row_N: Tensor) -> dict[str, Tensor]:
    """A part's tensors with these rows of it, from a file whose hash was checked."""
    sidecar = run.store.sidecars[shard]
    check_content(run.store.folder, sidecar, part)
    path = part_path(run.store.folder, shard, part)
    shared = () if part == TOKENS else codec_of(sidecar.files[part].codec or {}, path).shared
    whole = len(row_N) == sidecar.tokens
    return {name: t if whole or name in shared else _take(t, row_N) for name, t in load_file(path).items()}


def _take(tensor: Tensor, row_N: Tensor) -> Tensor:
    """Rows of it; a float8 by its bytes."""
    return tensor.view(torch.uint8)[row_N].view(tensor.dtype) if tensor.dtype == torch.float8_e4m3fn else tensor[row_N]
