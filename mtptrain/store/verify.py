"""Is a store whole? Every file against its sidecar, every sidecar and the manifest against their hashes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtptrain import manifest
from mtptrain.errors import UserError
from mtptrain.files import hash_json
from mtptrain.store.format import (
    TOKENS,
    Sidecar,
    StoreDamage,
    check_content,
    check_part,
    is_set_aside,
    part_path,
    parts_kept,
    read_sidecar,
    sidecar_path,
)
from mtptrain.store.ring import FEED_CONFIG, FEED_LOG, RING


def find_damage(folder: Path, whole: bool = True) -> Iterator[str]:
    """A line for each damaged, missing or foreign file; UserError where the manifest itself is damaged or missing.

    `whole` hashes every file; a corrupt one is set aside, so that precompute makes it anew. Otherwise sizes and headers are looked at.
    """
    found = _manifest(folder)
    for seen in _look(folder, found, whole):
        if isinstance(seen, str):
            yield seen
    for path in _strays(folder, found):
        yield f"{path} is no file of this store; delete it"


def _manifest(folder: Path) -> dict[str, Any]:
    found = manifest.require(folder, "the hidden-state store", "python -m mtptrain.precompute (with the same arguments)")
    if not {"captures", "shards"} <= found["results"].keys():
        raise UserError(f"{folder} holds what another stage made; name a run, such as runs/smollm2, or its store")
    return found


def _look(folder: Path, found: dict[str, Any], whole: bool) -> Iterator[Sidecar | str]:
    """Every sidecar that can be read, and a line for everything that is not as it should be."""
    captures = list(found["results"]["captures"])
    for shard in tqdm(range(found["results"]["shards"]), desc="verify", unit="shard", mininterval=1, delay=2):
        try:
            sidecar = read_sidecar(folder, shard, hash_json(found["inputs"]))
        except StoreDamage as damage:
            yield damage.problem
            continue
        yield sidecar
        for part in parts_kept(found["inputs"], sidecar.split, captures):
            try:
                check_part(folder, sidecar, part)
                if whole:
                    check_content(folder, sidecar, part)
            except StoreDamage as damage:
                yield damage.problem


def _strays(folder: Path, found: dict[str, Any]) -> Iterator[Path]:
    known = {manifest.MANIFEST, manifest.STARTED, "config.yaml", "rejects.jsonl", RING, FEED_CONFIG, FEED_LOG}
    for shard in range(found["results"]["shards"]):
        known |= {sidecar_path(folder, shard).name}
        known |= {part_path(folder, shard, part).name for part in [TOKENS, *found["results"]["captures"]]}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in known and not path.name.startswith(".") and not is_set_aside(path):
            yield path


def describe(folder: Path) -> dict[str, Any]:
    """What the store holds, from manifest and sidecars."""
    found, sidecars = _manifest(folder), list[Sidecar]()
    for seen in _look(folder, found, whole=False):
        if isinstance(seen, str):
            raise UserError(f"{seen}; `verify` looks at all of it")
        sidecars.append(seen)
    results = found["results"]
    entries = [entry for sidecar in sidecars for entry in sidecar.entries()]
    tokens = sum(entry.length for entry in entries)
    if not tokens:
        raise UserError(f"{folder} holds no document")
    by_source: dict[str, dict[str, int]] = {}
    for entry in entries:
        counts = by_source.setdefault(f"{entry.source} ({entry.split})", {"documents": 0, "tokens": 0, "supervised_tokens": 0})
        counts["documents"] += 1
        counts["tokens"] += entry.length
        counts["supervised_tokens"] += sum(stop - start for start, stop in entry.spans)
    parts: dict[str, dict[str, Any]] = {
        part: {
            "bytes": sum(sidecar.files[part].bytes for sidecar in sidecars if part in sidecar.files),
            "codec": "-" if part == TOKENS else "{name} {version}".format(**results["captures"][part]["codec"]),
        }
        for part in [TOKENS, *results["captures"]]
    }
    for part in parts.values():
        part["bytes_per_token"] = round(part["bytes"] / tokens, 1)
    return {
        "made_from": found["inputs"],
        "mtptrain": found["mtptrain"],
        "shards": len(sidecars),
        "documents": len(entries),
        "rejected": sum(len({r.start for r in sidecar.rejected}) for sidecar in sidecars),
        "tokens": tokens,
        "supervised_tokens": sum(c["supervised_tokens"] for c in by_source.values()),
        "parts": parts,
        "bytes": sum(part["bytes"] for part in parts.values()),
        "sources": dict(sorted(by_source.items())),
    }
