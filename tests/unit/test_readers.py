"""Every input form, and every kind of bad row: reported with file and line, never fatal, never replaced."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mtptrain.data.readers import Record, Reject, data_hash, read_records
from mtptrain.errors import UserError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
ROWS: list[dict[str, Any]] = [
    {"id": "one", "source": "web", "messages": CHAT},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}, {"from": "tool", "value": "3"}]},
    {"prompt": "Hi", "response": "Yes"},
    {"id": 7, "prompt": "Hi"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
]
WANT = [
    ("one", "web", [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes")]),
    (None, None, [("user", "Hi"), ("assistant", "Yes"), ("tool", "3")]),
    (None, None, [("user", "Hi"), ("assistant", "Yes")]),
    ("7", None, [("user", "Hi")]),
    (None, None, [("user", "Hi")]),
]


def shape(record: Record | Reject) -> list[tuple[str, str]]:
    assert isinstance(record, Record), record
    return [(m["role"], m["content"]) for m in record.messages]


def jsonl(path: Path, *lines: bytes | dict[str, Any]) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n")
    return path


def _write(form: str, folder: Path) -> Path:
    path = folder / f"data.{form}"
    if form == "jsonl":
        return jsonl(path, *ROWS)
    if form == "json":
        path.write_text("\n " + json.dumps(ROWS))
    elif form == "lines.json":
        return jsonl(path, *ROWS)
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(_flat()), path)
    elif form == "saved":
        datasets.Dataset.from_list(_flat()).save_to_disk(path)
    else:
        rows = datasets.Dataset.from_list(_flat())
        datasets.DatasetDict({"test": rows.select([0]), "train": rows}).save_to_disk(path)
    return path


def _flat() -> list[dict[str, Any]]:
    """Columns have one type each: ids are text, content parts are joined."""
    rows = [dict(r) for r in ROWS]
    rows[3]["id"] = "7"
    rows[4] = {"messages": [{"role": "user", "content": "Hi"}]}
    keys = ("id", "source", "messages", "conversations", "prompt", "response")
    return [{key: row.get(key) for key in keys} for row in rows]


@pytest.mark.parametrize("form", ["jsonl", "json", "lines.json", "parquet", "saved", "saved_dict"])
def test_every_form_reads_the_same(form: str, tmp_path: Path) -> None:
    path = _write(form, tmp_path)
    records = list(read_records(str(path)))
    first = 1 if form.endswith("jsonl") or form == "lines.json" else 0
    assert [shape(r) for r in records] == [want for _, _, want in WANT]
    for n, (record, (name, source, _)) in enumerate(zip(records, WANT, strict=True)):
        assert isinstance(record, Record)
        assert (record.file, record.line) == (str(path), n + first)
        assert record.id == (name or f"{path.name}:{n + first}")
        assert record.source == (source or path.stem)


def test_a_folder_of_files_keeps_file_and_line(tmp_path: Path) -> None:
    jsonl(tmp_path / "b.jsonl", {"prompt": "two"})
    jsonl(tmp_path / "a.jsonl", b"{", {"prompt": "one"})
    found = list(read_records(str(tmp_path)))
    assert [(Path(r.file).name, r.line, isinstance(r, Record)) for r in found] == [
        ("a.jsonl", 1, False),
        ("a.jsonl", 2, True),
        ("b.jsonl", 1, True),
    ]


BAD: list[tuple[bytes, str]] = [
    (b'{"prompt": "caf\xe9"}', "not valid UTF-8"),
    (b'{"prompt": "\\ud800"}', "not valid UTF-8"),
    (b'{"id": "\\udfff", "prompt": "x"}', "not valid UTF-8"),
    (b'{"prompt": "Hi"', "not valid JSON"),
    (b"[" * 200_000, "not valid JSON"),
    (b"1" * 5000, "not valid JSON"),
    (b'["prompt", "Hi"]', "not an object"),
    (b"{}", "empty"),
    (b"  ", "empty"),
    (b'{"messages": []}', "empty"),
    (b'{"prompt": " \\n"}', "empty"),
    (b'{"prompt": 3}', "content is not text"),
    (b'{"text": "Hi"}', "no messages"),
    (b'{"messages": "Hi"}', "malformed message"),
    (b'{"messages": ["Hi"]}', "malformed message"),
    (b'{"messages": [{"role": "moderator", "content": "Hi"}]}', "unknown role"),
    (b'{"messages": [{"role": ["user"], "content": "Hi"}]}', "unknown role"),
    (b'{"messages": [{"content": "Hi"}]}', "unknown role"),
    (b'{"messages": [{"role": "user"}]}', "content is not text"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "content is not text"),
    (b'{"prompt": "Hi", "tools": "{"}', "malformed tools"),
    (b'{"prompt": "Hi", "tools": ["f"]}', "malformed tools"),
]


def test_fault_13_one_bad_record_neither_kills_the_run_nor_is_replaced(tmp_path: Path) -> None:
    lines = [{"prompt": "first"}, *(bad for bad, _ in BAD), {"prompt": "last"}]
    found = list(read_records(str(jsonl(tmp_path / "data.jsonl", *lines))))
    assert len(found) == len(lines)
    assert shape(found[0]) == [("user", "first")]
    assert shape(found[-1]) == [("user", "last")]
    assert [(r.line, r.reason) for r in found[1:-1] if isinstance(r, Reject)] == [(n, reason) for n, (_, reason) in enumerate(BAD, 2)]


def test_blank_lines_at_the_end_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", b'\xef\xbb\xbf{"prompt": "Hi"}', b"", b" ")
    assert [shape(r) for r in read_records(str(path))] == [[("user", "Hi")]]


def test_fault_13_bad_utf8_in_parquet_rejects_its_row_only(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"caf\xe9", b"fine"], pa.binary()).view(pa.string())
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": raw}), path)
    found = list(read_records(str(path)))
    assert [type(r) for r in found] == [Record, Reject, Record]
    assert isinstance(found[1], Reject)
    assert (found[1].line, found[1].reason) == (1, "not valid UTF-8")


def test_columns_that_other_rows_need_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    pq.write_table(pa.Table.from_pylist([{"messages": [{"role": "user", "content": "Hi", "tool_calls": None}, call]}]), path)
    (record,) = read_records(str(path))
    assert isinstance(record, Record)
    assert record.messages == [{"role": "user", "content": "Hi"}, {**call, "content": ""}]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("data.txt", b"Hi", "is none of .jsonl"),
        ("data.json", b'[{"prompt": "Hi"}', "not one JSON array"),
        ("data.parquet", b"PAR0", "not a readable Parquet file"),
    ],
)
def test_a_path_that_cannot_be_read_is_one_line(name: str, content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        list(read_records(str(tmp_path / name)))
    assert "\n" not in str(error.value)
    assert name in str(error.value)


def test_empty_folder_and_splits_without_train_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no"):
        list(read_records(str(tmp_path / "empty")))
    rows = datasets.Dataset.from_list([{"prompt": "Hi"}])
    datasets.DatasetDict({"a": rows, "b": rows}).save_to_disk(tmp_path / "ab")
    with pytest.raises(UserError, match=r"\['a', 'b'\]"):
        list(read_records(str(tmp_path / "ab")))


def test_hub_name_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, split: str | None) -> Any:
        asked.append((name, split))
        if name == "org/good":
            return datasets.Dataset.from_list([{"prompt": "Hi"}])
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist\non the hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    (record,) = read_records("org/good:train_sft")
    assert shape(record) == [("user", "Hi")]
    assert isinstance(record, Record)
    assert record.source == "org/good:train_sft"
    with pytest.raises(UserError, match="neither a file here nor a data set") as error:
        list(read_records("org/bad"))
    assert "\n" not in str(error.value)
    assert asked == [("org/good", "train_sft"), ("org/bad", None)]


def test_data_hash_follows_the_content(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "data.jsonl", {"prompt": "Hi"})
    before, folder = data_hash(str(path)), data_hash(str(tmp_path))
    jsonl(path, {"prompt": "Ho"})
    assert data_hash(str(path)) != before
    assert data_hash(str(tmp_path)) != folder
    jsonl(path, {"prompt": "Hi"})
    assert (data_hash(str(path)), data_hash(str(tmp_path))) == (before, folder)
