"""When a stage may be reused: each stage's folder holds a manifest with everything that determined it.

`inputs` is a flat dict of JSON scalars, lists or dicts. A stage writes it to `started.json` before it begins and
to `manifest.json` when it is complete, so that both a finished and an interrupted stage can be checked against
what is asked for now. Either file holds a hash of itself, so that a changed one is told.
"""

import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mtptrain import __version__
from mtptrain.config import OnStale
from mtptrain.errors import StaleError, UserError
from mtptrain.files import made_by, read_json, with_hash, without_hash, write_json

MANIFEST = "manifest.json"
STARTED = "started.json"
_LOCK = ".lock"
DERIVED = "derived"
"""The key of inputs that says how a folder was made from others (mtptrain/store/derive.py)."""
_held: dict[Path, FileLock] = {}
"""Of the stages this process is at; the system frees them when it ends, however it does."""


def changed_inputs(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Human-readable differences, one a key: `key: old -> new`; keys inside dicts are dotted."""
    old, new = _flat(old), _flat(new)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key, "(absent)"), new.get(key, "(absent)")
        if was != now:
            lines.append(f"{key}: {was!r} -> {now!r}")
    return lines


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def is_complete(folder: Path, inputs: dict[str, Any], on_stale: OnStale) -> bool:
    """True if `folder` holds this stage, finished, from exactly these inputs.

    A folder made (or begun) from other inputs raises StaleError naming what changed; with `on_stale=redo` it is
    deleted instead.
    """
    manifest, started = folder / MANIFEST, folder / STARTED
    found = manifest if manifest.exists() else started
    if not found.exists():
        return False
    try:
        made_from = _read(found)["inputs"]
        if found == started and DERIVED in made_from and on_stale is OnStale.error:
            raise UserError(f"{folder} is of a merge or filter that was interrupted; give that command again, or delete {folder.parent}")
        differences = changed_inputs(*_comparable(made_from, inputs))
    except UserError:
        if on_stale is not OnStale.redo:
            raise
        differences = ["a damaged manifest"]
    if not differences:
        return found == manifest
    if on_stale is OnStale.redo:
        if found.name == MANIFEST and _was_derived(found):
            raise UserError(f"{folder} was merged or filtered from other runs and can't be redone; delete {folder.parent} if you mean to")
        hold(folder)
        shutil.rmtree(folder)
        _held.pop(folder).release()
        return False
    shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
    raise StaleError(
        f"{folder} was made from other inputs ({shown}); use on_stale=redo to redo it, or another name= (of a head: head.label=)"
    )


def _was_derived(found: Path) -> bool:
    """Of a finished stage; where its manifest can't be read, what it was begun from says so."""
    for path in (found, found.with_name(STARTED)):
        try:
            return DERIVED in _read(path)["inputs"]
        except UserError:
            continue
    return False


def is_derived(folder: Path) -> bool:
    """Whether what lies in `folder`, finished or not, was made from other runs; also where nothing does."""
    found = next((folder / name for name in (MANIFEST, STARTED) if (folder / name).exists()), None)
    return DERIVED in _read(found)["inputs"] if found is not None else not any(folder.glob("[!.]*"))


def _comparable(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both must agree in: of a folder made from others, what all of those agreed in."""
    if DERIVED not in old:
        return old, new
    return {k: v for k, v in old.items() if k != DERIVED}, {k: v for k, v in new.items() if k in old}


def _read(found: Path) -> dict[str, Any]:
    """A manifest that is as it was written: with its inputs, and results where the stage is complete. UserError where it is not."""
    read = without_hash(read_json(found))
    mend = f"delete it, then {made_by(found)}" if found.name == MANIFEST else f"use on_stale=redo to redo {found.parent}"
    if read is None:
        raise UserError(f"{found} is damaged or was changed (its hash differs); {mend}")
    for key in ("inputs", "results") if found.name == MANIFEST else ("inputs",):
        if not isinstance(read.get(key), dict):
            raise UserError(f"{found} is damaged (no `{key}` in it); {mend}")
    return read


def begin(folder: Path, inputs: dict[str, Any]) -> None:
    """Note what this stage is being made from. Call after `is_complete` returned False.

    Until `finish` no other process may begin it: UserError there.
    """
    hold(folder)
    write_json(folder / STARTED, with_hash({"inputs": inputs, "mtptrain": __version__}))


def finish(folder: Path, inputs: dict[str, Any], results: dict[str, Any]) -> None:
    """Mark the stage complete. `results` is what later stages and people want to know about it."""
    write_json(folder / MANIFEST, with_hash({"inputs": inputs, "mtptrain": __version__, "results": results}))
    if lock := _held.pop(folder, None):
        lock.release()


def hold(folder: Path, patience: float = 0.0) -> None:
    """Keep other processes from working in `folder` until this one ends. UserError where one does, after `patience` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder in _held:
        return
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=patience)
    except Timeout as e:
        raise UserError(f"another process is at work in {folder}; wait for it, or use another name= or head.label=") from e
    _held[folder] = lock


def require(folder: Path, what: str, command: str) -> dict[str, Any]:
    """The manifest of a finished stage, or one line that says which command makes it."""
    if not (folder / MANIFEST).exists():
        raise UserError(f"{what} is missing or unfinished in {folder}; make it with: {command}")
    return _read(folder / MANIFEST)
