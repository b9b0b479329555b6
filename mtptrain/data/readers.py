"""Dialogues from files: JSONL, JSON, Parquet, folders saved by `datasets`, hub names.

A bad row never ends the reading and is never replaced: it comes back as a `Reject` with its file, line and reason.
Four forms of row are known: OpenAI `messages`, ShareGPT `conversations`, `prompt` + `response`, `prompt` alone.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from mtptrain.errors import UserError
from mtptrain.files import hash_file, hash_json

_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user", "gpt": "assistant"}
_KEPT_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH_ROWS = 1000


@dataclass(slots=True, kw_only=True)
class Record:
    """One dialogue as it was read. `line` is 1-based in JSONL, the 0-based row index in JSON arrays, Parquet and `datasets`."""

    id: str
    source: str
    messages: list[dict[str, Any]]
    """`role` (system, user, assistant, tool), `content`, and where given tool_calls, tool_call_id, name, reasoning_content, thinking."""
    tools: list[dict[str, Any]] | None = field(default=None)
    file: str = ""
    line: int = 0


@dataclass(slots=True, kw_only=True)
class Reject:
    """A row that is not used, and why. `reason` is one of few, for counting; `detail` is about this row."""

    file: str
    line: int
    id: str | None
    reason: str
    detail: str = ""


class BadRow(Exception):
    """A row that can't be used; the first argument is its countable reason, the second the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def read_records(path: str) -> Iterator[Record | Reject]:
    """All rows of `path`, in order; of a folder of data files, file after file. Raises UserError if the path as a whole can't be read."""
    if Path(path).is_dir() and not _is_saved_dataset(Path(path)):
        for file in _files_of(Path(path)):
            yield from read_records(str(file))
        return
    stem = Path(path).stem if Path(path).exists() else path
    for line, row in _rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            yield to_record(row, file=path, line=line, stem=stem)
        except BadRow as bad:
            yield Reject(file=path, line=line, id=_id(row), reason=bad.reason, detail=bad.detail)


def data_hash(path: str) -> Any:
    """Content hash of what `read_records(path)` reads: of the file, of each file of a folder, or of a hub set's rows."""
    file = Path(path)
    if file.is_file():
        return hash_file(file)
    if file.is_dir():
        return {str(f.relative_to(file)): hash_file(f) for f in sorted(file.rglob("*")) if f.is_file() and not f.name.startswith(".")}
    return hash_json([hash_json(row) for _, row in _rows(path)])


def to_record(row: Any, *, file: str, line: int, stem: str) -> Record:
    """Check one parsed row and bring it to OpenAI `messages`. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow("not an object", f"found {type(row).__name__}")
    messages = _messages(row)
    tools = _tools(row.get("tools"))
    source = row.get("source")
    record = Record(
        id=_id(row) or f"{Path(file).name}:{line}",
        source=source if isinstance(source, str) and source else stem,
        messages=messages,
        tools=tools,
        file=file,
        line=line,
    )
    try:
        json.dumps([record.id, record.source, messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise BadRow("not valid UTF-8", "a lone surrogate, which no UTF-8 text has") from e
    return record


def _id(row: Any) -> str | None:
    given = row.get("id") if isinstance(row, dict) else None
    return str(given) if isinstance(given, str | int) and not isinstance(given, bool) and given != "" else None


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    if row.get("messages") is not None or row.get("conversations") is not None:
        given = row["messages"] if row.get("messages") is not None else row["conversations"]
        if not isinstance(given, list):
            raise BadRow("malformed message", f"messages are {type(given).__name__}, not a list")
        messages = [_message(m) for m in given]
    elif row.get("prompt") is not None:
        messages = [_message({"role": "user", "content": row["prompt"]})]
        if row.get("response") is not None:
            messages.append(_message({"role": "assistant", "content": row["response"]}))
    elif row:
        raise BadRow("no messages", f"none of messages, conversations, prompt among {sorted(row)[:6]}")
    else:
        raise BadRow("empty", "the row is empty")
    if not messages:
        raise BadRow("empty", "no messages")
    for n, message in enumerate(messages):
        if message["role"] == "user" and not message["content"].strip():
            raise BadRow("empty", f"message {n} is an empty user turn")
    return messages


def _message(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise BadRow("malformed message", f"found {type(given).__name__}")
    name = given.get("role", given.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow("unknown role", f"{name!r}"[:60])
    kept = {key: given[key] for key in _KEPT_KEYS if given.get(key) is not None}
    content = given.get("content", given.get("value"))
    if isinstance(content, list):
        content = _joined_text(content)
    if content is None and role == "assistant" and kept.get("tool_calls"):
        return {"role": role, "content": "", **kept}
    if not isinstance(content, str):
        raise BadRow("content is not text", f"{role} content is {type(content).__name__}")
    return {"role": role, "content": content, **kept}


def _joined_text(parts: list[Any]) -> str:
    """OpenAI content parts of type text, joined."""
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise BadRow("content is not text", "a content part that is not text")
    return "".join(part["text"] for part in parts)


def _tools(given: Any) -> list[dict[str, Any]] | None:
    """A list of function schemas, also as a JSON string (how flat tables carry it)."""
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except json.JSONDecodeError as e:
            raise BadRow("malformed tools", str(e)) from e
    if not given:
        return None
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise BadRow("malformed tools", "not a list of objects")
    return given


def is_missing(path: str) -> bool:
    """Whether it names a file or folder that is not there, and no data set of a hub."""
    return not Path(path).exists() and (Path(path).suffix in SUFFIXES or path.startswith(("/", ".", "~")))


def _rows(path: str) -> Iterator[tuple[int, Any]]:
    """(line, parsed row or BadRow) of every row."""
    file = Path(path)
    if file.is_dir():
        yield from _saved_rows(file)
    elif file.is_file():
        if file.suffix not in SUFFIXES:
            raise UserError(f"{path} is none of {', '.join(SUFFIXES)}; convert it or name another file in data.train or data.held_out")
        yield from _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    elif is_missing(path):
        raise UserError(f"{path} (in data.train or data.held_out) does not exist")
    else:
        yield from _hub_rows(path)


def row_count(file: Path) -> int:
    """Rows of a data file; only an array is parsed for it. Raises UserError where reading it would."""
    if file.suffix == ".parquet":
        with _readable_parquet(file):
            return int(pq.ParquetFile(file).metadata.num_rows)
    if _is_array(file):
        return sum(1 for _ in _array_rows(file))
    with open(file, "rb") as f:
        return sum(1 for line in f if line.strip())


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    yield from _array_rows(file) if _is_array(file) else _line_rows(file)


def _is_array(file: Path) -> bool:
    """A .json file may hold an array or, as many do, one object a line."""
    if file.suffix != ".json":
        return False
    with open(file, "rb") as f:
        return f.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _array_rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        rows = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not one JSON array ({e}); mend it, or write one object a line") from e
    yield from enumerate(rows)


def _line_rows(file: Path) -> Iterator[tuple[int, Any]]:
    blank: list[int] = []
    with open(file, "rb") as f:
        for line, raw in enumerate(f, 1):
            if not raw.strip():
                blank.append(line)
                continue
            yield from ((n, BadRow("empty", "a blank line")) for n in blank)
            blank.clear()
            yield line, _parse_line(raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw)


def _parse_line(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as e:
        return BadRow("not valid UTF-8", f"byte {e.start} of the line: {e.reason}")
    except (ValueError, RecursionError) as e:
        return BadRow("not valid JSON", str(e))


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with _readable_parquet(file):
        first = 0
        for batch in pq.ParquetFile(file).iter_batches(_BATCH_ROWS):
            yield from _arrow_rows(pa.Table.from_batches([batch]), first)
            first += batch.num_rows


@contextmanager
def _readable_parquet(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError) as e:
        raise UserError(f"{file} is not a readable Parquet file ({str(e).splitlines()[0]}); copy or write it again") from e


def _arrow_rows(table: pa.Table, first: int) -> Iterator[tuple[int, Any]]:
    for n in range(table.num_rows):
        try:
            yield first + n, _without_none(table.slice(n, 1).to_pylist()[0])
        except UnicodeDecodeError as e:
            yield first + n, BadRow("not valid UTF-8", f"byte {e.start} of a text: {e.reason}")


def _without_none(value: Any) -> Any:
    """Drop keys that are None: columns give every struct all keys that any row has."""
    if isinstance(value, dict):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _files_of(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES)
    if not files:
        raise UserError(f"{folder} (in data.train or data.held_out) is no `datasets` folder and holds no {', '.join(SUFFIXES)} file")
    return files


def _saved_rows(folder: Path) -> Iterator[tuple[int, Any]]:
    """A folder written by `save_to_disk`."""
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError, pa.ArrowInvalid) as e:
        raise UserError(f"{folder} is not a readable `datasets` folder ({str(e).splitlines()[0]}); save it again") from e
    yield from _dataset_rows(loaded, str(folder))


def _hub_rows(path: str) -> Iterator[tuple[int, Any]]:
    """`NAME` (its train split) or `NAME:SPLIT` of a data set on the hub or in its cache."""
    name, _, split = path.partition(":")
    try:
        loaded = datasets.load_dataset(name, split=split or None)
    except (FileNotFoundError, ConnectionError, ValueError) as e:
        raise UserError(f"{path} is neither a file here nor a data set that can be loaded ({str(e).splitlines()[0]})") from e
    yield from _dataset_rows(loaded, path)


def _dataset_rows(loaded: Any, path: str) -> Iterator[tuple[int, Any]]:
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise UserError(f"{path} has splits {sorted(loaded)} and none is called train; save or name one of them")
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    first = 0
    for table in loaded.with_format("arrow").iter(_BATCH_ROWS):
        yield from _arrow_rows(table, first)
        first += table.num_rows
