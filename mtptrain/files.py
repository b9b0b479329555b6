"""Files that are either whole or absent: atomic writes, durable appends, content hashes.

The content hash is XXH3-128 everywhere (fast, not cryptographic: it finds damage, not malice).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from mtptrain.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 1 << 22
_JOBS = {"data": "prepare", "store": "precompute", "train": "train", "report": "validate", "export": "export"}
"""Which job fills a run's folder."""


def fsync_dir(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write(temporary)` and rename the result to `path`; a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        write(tmp)
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
    except BaseException:
        tmp.unlink(missing_ok=True)  # on a full disk its space is wanted
        raise
    os.replace(tmp, path)
    fsync_dir(path.parent)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda tmp: tmp.write_text(text, encoding="utf-8"))


def write_json(path: Path, obj: Any) -> None:
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file of ours; a damaged one is named."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path} is missing; {made_by(path)}") from e
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise UserError(f"{path} is damaged ({e}); delete it, then {made_by(path)}") from e


def made_by(path: Path) -> str:
    """Which job makes a file of a run again."""
    job = _JOBS.get(path.parent.name)
    return "run the stage that writes it again" if job is None else f"python -m mtptrain.{job} (with the same arguments) makes it again"


def write_folder_atomic(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a temporary folder and rename it to `folder`, replacing an older one. Its files get the mode that the umask asks for:
    safetensors writes its own for the owner alone, and an engine may be another user.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = folder.with_name(f".{folder.name}.tmp")
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir()
    write(tmp)
    for file in tmp.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~_umask())
            with open(file, "rb") as f:
                os.fsync(f.fileno())
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    if folder.exists():
        os.replace(folder, old)
    os.replace(tmp, folder)
    fsync_dir(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def save_tensors(path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """safetensors' `save_file`; what a full disk answers comes as the OSError it is."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as e:
        told = re.search(r"os error (\d+)", str(e))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from e


def append_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append whole lines and make them durable; a line torn by a crash is dropped by `read_jsonl_durable`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as f:
        f.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
        f.flush()
        os.fsync(f.fileno())


def read_jsonl_durable(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file written by `append_jsonl`. A torn last line is cut off the file, so that appending may go on.

    UserError for a damaged line anywhere else.
    """
    if not path.exists():
        return
    good = 0
    with open(path, "rb") as f:
        for line, raw in enumerate(f, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                row = json.loads(raw)
            except ValueError as e:
                raise UserError(f"{path}:{line} is damaged ({e}); delete that line, what it held is made anew") from e
            if not isinstance(row, dict):
                raise UserError(f"{path}:{line} is damaged (no object); delete that line, what it held is made anew")
            yield row
            good += len(raw)
    if good != path.stat().st_size:
        os.truncate(path, good)


def with_hash(content: dict[str, Any]) -> dict[str, Any]:
    """`content` as a JSON file will give it back (tuples as lists, keys as strings), led by a hash of itself."""
    content = json.loads(json.dumps(content))
    return {"hash": hash_json(content), **content}


def without_hash(read: Any) -> dict[str, Any] | None:
    """What `with_hash` was given; None where it is not as it was."""
    if not isinstance(read, dict):
        return None
    content = {key: value for key, value in read.items() if key != "hash"}
    return content if read.get("hash") == hash_json(content) else None


def read_hashed(path: Path) -> dict[str, Any] | None:
    """What a file that `with_hash` went into holds; None where it is damaged in any way."""
    try:
        return without_hash(read_json(path))
    except UserError:
        return None


def hash_bytes(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def hash_json(obj: Any) -> str:
    """Hash of the canonical JSON form (sorted keys)."""
    return hash_bytes(json.dumps(obj, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())


def hash_file(path: Path) -> str:
    h = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK_BYTES):
            h.update(chunk)
    return h.hexdigest()
