"""The user's cache folder, shared by processes: converted targets and file hashes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def cache_dir() -> Path:
    """$MTPTRAIN_CACHE, else mtptrain under $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("MTPTRAIN_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtptrain"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time makes `path`; the others wait, then find it made. The lock dies with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield
