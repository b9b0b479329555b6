"""The store's bytes: what comes back is what went in, and every kind of damage is named."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtptrain.data.documents import Document
from mtptrain.errors import UserError
from mtptrain.store import reader
from mtptrain.store.codecs import BF16
from mtptrain.store.format import Rejected, shard_ranges
from mtptrain.store.reader import Store
from mtptrain.store.writer import StoreWriter
from tests.unit.stores import make_store, random_documents, random_state

LENGTHS = [30, 20, 50, 10, 5, 64, 7]
"""With 64 tokens a shard: [30, 20], [50, 10], [5], [64], [7]."""
H = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    documents = random_documents(LENGTHS)
    make_store(tmp_path / "store", documents, {c: random_state(documents, c, H) for c in ("final", "after_1")})
    return tmp_path / "store"


def read_all(store: Store, capture: str = "final") -> None:
    for i in range(len(store.entries)):
        store.tokens(i)
        store.state(i, capture)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@st.composite
def documents_with_spans(draw: st.DrawFn) -> list[Document]:
    documents = []
    for i in range(draw(st.integers(1, 8))):
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30))
        cuts = sorted(draw(st.sets(st.integers(0, len(tokens)), max_size=6)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        split = draw(st.sampled_from(["train", "held_out"]))
        documents.append(Document(id=f"id {i} é\n", source=draw(st.text(max_size=5)), split=split, tokens=tokens, spans=spans))
    return documents


@settings(max_examples=20, deadline=None)
@given(documents_with_spans(), st.integers(1, 70), st.integers(0, 99))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[Document], shard_tokens: int, seed: int) -> None:
    folder = tmp_path_factory.mktemp("round") / "store"
    states = {c: random_state(documents, c, 3, seed) for c in ("final", "after_0")}
    make_store(folder, documents, states, shard_tokens)
    store = Store.open(folder, ["final", "after_0"])
    assert [(e.id, e.source, e.split, e.length, e.spans) for e in store.entries] == [
        (d.id, d.source, d.split, len(d.tokens), d.spans) for d in documents
    ]
    assert store.indices("train") == [i for i, d in enumerate(documents) if d.split == "train"]
    for i, document in enumerate(documents):
        assert store.tokens(i).dtype == torch.int64
        assert store.tokens(i).tolist() == document.tokens
        assert store.mask(i).tolist() == [any(a <= t < b for a, b in document.spans) for t in range(len(document.tokens))]
        for capture, state in states.items():
            assert store.state(i, capture).dtype == torch.bfloat16
            assert torch.equal(store.state(i, capture), state[i])


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 80))
def test_shards_are_filled_in_order_and_closed_at_the_token_count(lengths: list[int], shard_tokens: int) -> None:
    documents = random_documents(lengths)
    splits = [d.split for d in documents]
    ranges = shard_ranges(documents, shard_tokens)
    assert [i for r in ranges for i in r] == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in r) for r in ranges]
    assert all(total <= shard_tokens or len(r) == 1 for total, r in zip(sums, ranges, strict=True))
    assert all(len({splits[i] for i in r}) == 1 for r in ranges)
    for total, r, after in zip(sums, ranges, ranges[1:], strict=False):
        assert total + lengths[after[0]] > shard_tokens or splits[after[0]] != splits[r[0]]


def test_layout_on_disk(folder: Path) -> None:
    """Read back by hand: 8 bytes of header length, JSON, then the tensors."""
    raw = (folder / "00001.final.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    assert header["data"] == {"dtype": "BF16", "shape": [60, H], "data_offsets": [0, 60 * H * 2]}
    tokens = (folder / "00001.tokens.safetensors").read_bytes()
    header = json.loads(tokens[8 : 8 + struct.unpack("<Q", tokens[:8])[0]])
    assert (header["tokens"]["dtype"], header["tokens"]["shape"]) == ("I32", [60])
    assert (header["mask"]["dtype"], header["mask"]["shape"]) == ("U8", [60])
    assert [p.name for p in sorted(folder.glob("00001.*"))] == [
        "00001.after_1.safetensors",
        "00001.final.safetensors",
        "00001.json",
        "00001.tokens.safetensors",
    ]


def test_states_are_views_of_the_mapped_file(folder: Path) -> None:
    store = Store.open(folder, ["final"])
    first, second = store.state(0, "final"), store.state(1, "final")
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert str(folder / "00000.final.safetensors") in Path("/proc/self/maps").read_text()


def test_the_same_documents_make_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    documents = random_documents(LENGTHS)
    make_store(tmp_path / "again", documents, {c: random_state(documents, c, H) for c in ("final", "after_1")})
    assert bytes_of(folder) == bytes_of(tmp_path / "again")


def test_a_capture_added_later_leaves_existing_bytes_untouched(folder: Path) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("*.safetensors")}
    documents = random_documents(LENGTHS)
    late = random_state(documents, "after_0", H)
    make_store(folder, documents, {"after_0": late})
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before
    assert len(list(folder.glob("*.safetensors"))) == len(before) + 5
    store = Store.open(folder, ["final", "after_0"])
    assert torch.equal(store.state(4, "after_0"), late[4])
    assert torch.equal(store.state(4, "final"), random_state(documents, "final", H)[4])


def test_a_capture_the_store_lacks_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no capture after_7 \(only final, after_1\)"):
        Store.open(folder, ["after_7"])


def test_a_capture_that_is_not_opened_may_be_damaged(folder: Path) -> None:
    (folder / "00000.after_1.safetensors").unlink()
    read_all(Store.open(folder, ["final"]))


def test_an_unfinished_store_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m mtptrain\.precompute"):
        Store.open(tmp_path, ["final"])


@pytest.mark.parametrize("part", ["final", "tokens"])
def test_truncation_is_named_on_open(folder: Path, part: str) -> None:
    path = folder / f"00002.{part}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{path} is cut short"):
        Store.open(folder, ["final"])


@pytest.mark.parametrize("part", ["final", "tokens"])
def test_a_missing_file_is_named_on_open(folder: Path, part: str) -> None:
    path = folder / f"00003.{part}.safetensors"
    path.unlink()
    with pytest.raises(UserError, match=rf"{path} is missing"):
        Store.open(folder, ["final"])


@settings(max_examples=20, deadline=None)
@given(
    place=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
    name=st.sampled_from(["final.safetensors", "tokens.safetensors", "json"]),
)
def test_any_flipped_bit_is_named_before_the_shard_is_used(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, name: str
) -> None:
    folder = tmp_path_factory.mktemp("flip") / "store"
    documents = random_documents([9, 9], seed=1)
    make_store(folder, documents, {"final": random_state(documents, "final", H)}, shard_tokens=9)
    path = folder / f"00001.{name}"
    raw = bytearray(path.read_bytes())
    raw[int(place * len(raw))] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(UserError, match=str(path)):
        read_all(Store.open(folder, ["final"]))


def test_a_corrupt_file_is_set_aside_and_remade_alone(folder: Path) -> None:
    before = bytes_of(folder)
    path = folder / "00001.final.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    store = Store.open(folder, ["final"])
    store.state(0, "final")
    with pytest.raises(UserError, match=f"{path} is corrupt"):
        store.state(2, "final")
    writer = StoreWriter(folder, store.sidecars[0].fingerprint, BF16)
    assert [writer.missing(shard, ["final", "after_1"])[0] for shard in range(5)] == [[], ["final"], [], [], []]
    documents = random_documents(LENGTHS)
    final = random_state(documents, "final", H)
    writer.write(1, documents[2:4], {"final": torch.cat(final[2:4])})
    assert bytes_of(folder) == before


def test_a_shard_of_another_store_is_named(folder: Path, tmp_path: Path) -> None:
    documents = random_documents(LENGTHS)
    make_store(tmp_path / "other", documents, {"final": random_state(documents, "final", H)}, inputs={"made": "elsewhere"})
    for file in (tmp_path / "other").glob("00001.*"):
        shutil.copy(file, folder / file.name)
    with pytest.raises(UserError, match=r"00001\.json is shard 1 of another store"):
        Store.open(folder, ["final"])


def test_a_file_of_another_store_is_named_by_its_header(folder: Path, tmp_path: Path) -> None:
    documents = random_documents(LENGTHS)
    make_store(tmp_path / "other", documents, {"final": random_state(documents, "final", H)}, inputs={"made": "elsewhere"})
    shutil.copy(tmp_path / "other" / "00001.final.safetensors", folder)
    with pytest.raises(UserError, match=r"00001\.final\.safetensors belongs to another shard or store"):
        Store.open(folder, ["final"])


def test_a_shard_in_another_place_is_named(tmp_path: Path) -> None:
    documents = random_documents([8, 8])
    make_store(tmp_path, documents, {"final": random_state(documents, "final", H)}, shard_tokens=8)
    shutil.copy(tmp_path / "00000.final.safetensors", tmp_path / "00001.final.safetensors")
    with pytest.raises(UserError, match=r"00001\.final\.safetensors belongs to another shard"):
        Store.open(tmp_path, ["final"])
    for name in ("json", "tokens.safetensors"):
        shutil.copy(tmp_path / f"00000.{name}", tmp_path / f"00001.{name}")
    with pytest.raises(UserError, match=r"00001\.json is shard 0"):
        Store.open(tmp_path, ["final"])


def test_the_hash_of_a_file_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    check = reader.check_content
    monkeypatch.setattr("mtptrain.store.reader.check_content", lambda f, s, part: (hashed.append(f"{s.shard}.{part}"), check(f, s, part)))
    store = Store.open(folder, ["final"])
    assert hashed == []
    for _ in range(2):
        read_all(store)
    assert sorted(hashed) == sorted(f"{shard}.{part}" for shard in range(5) for part in ("final", "tokens"))


def test_reading_goes_on_when_few_files_may_be_mapped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtptrain.store.reader._MAPPED_FILES", 2)
    store = Store.open(folder, ["final"])
    final = random_state(random_documents(LENGTHS), "final", H)
    for i in [0, 6, 2, 0, 5, 6]:
        assert torch.equal(store.state(i, "final"), final[i])
    assert len(store._mapped) == 2


def test_fault_14_nan_stored(tmp_path: Path) -> None:
    """The writer refuses a state that is not finite, and leaves no shard behind that would count."""
    documents = random_documents([6, 6])
    state_NH = torch.cat(random_state(documents, "final", H))
    for value in (float("nan"), float("inf")):
        state_NH[7, 3] = value
        with pytest.raises(ValueError, match="shard 0 holds NaN or Inf"):
            StoreWriter(tmp_path, "f", BF16).write(0, documents, {"final": state_NH})
    assert not (tmp_path / "00000.json").exists()
    assert not (tmp_path / "00000.final.safetensors").exists()


def test_a_rejected_document_is_no_entry_and_shifts_nothing(tmp_path: Path) -> None:
    documents = random_documents([6, 5, 4])
    final = random_state(documents, "final", H)
    make_store(tmp_path, documents, {"final": final})
    store = Store.open(tmp_path, ["final"])
    late_NH = torch.zeros(15, H)
    writer = StoreWriter(tmp_path, store.sidecars[0].fingerprint, BF16)
    writer.write(0, documents, {"after_0": late_NH}, [Rejected(id="doc-1", start=6, capture="after_0", reason="NaN")])
    store = Store.open(tmp_path, ["final"])
    assert [e.id for e in store.entries] == ["doc-0", "doc-2"]
    assert torch.equal(store.state(1, "final"), final[2])
    assert store.tokens(1).tolist() == documents[2].tokens
    writer.write(0, documents, {"after_0": late_NH})
    assert [e.id for e in Store.open(tmp_path, ["final"]).entries] == ["doc-0", "doc-1", "doc-2"]


def test_fault_16_half_written_files_read_as_good(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies between a shard's files and its sidecar, or inside a file, leaves nothing that is read as good."""
    documents = random_documents(LENGTHS)
    final = random_state(documents, "final", H)
    fresh = folder.parent / "fresh"
    writer = StoreWriter(fresh, "f", BF16)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mtptrain.store.writer.write_sidecar", dies)
        with pytest.raises(KeyboardInterrupt):
            writer.write(0, documents[:2], {"final": torch.cat(final[:2])})
    assert (fresh / "00000.final.safetensors").exists()
    assert writer.missing(0, ["final"]) == (["tokens", "final"], None)

    def half(path: Path, payload: bytes) -> None:
        path.write_bytes(payload[: len(payload) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mtptrain.store.writer._write_bytes", half)
        with pytest.raises(UserError, match=r"cannot write .*00000\.tokens\.safetensors: No space left on device"):
            StoreWriter(folder.parent / "full", "f", BF16).write(0, documents[:2], {"final": torch.cat(final[:2])})
    assert not list((folder.parent / "full").iterdir())  # on a full disk the half is not left


def resident_bytes(folder: Path) -> int:
    """Of this process, in maps of files in `folder`."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux what is in memory")
def test_released_pages_leave_the_process_and_come_back_the_same(tmp_path: Path) -> None:
    documents = random_documents([4000, 4000])
    states = random_state(documents, "final", 64)
    make_store(tmp_path / "store", documents, {"final": states}, 8000)
    store = Store.open(tmp_path / "store", ["final"])
    first = [store.state(i, "final").clone() for i in range(2)]
    assert resident_bytes(tmp_path / "store") > 8000 * 64 * 2
    store.release()
    assert resident_bytes(tmp_path / "store") == 0
    for i, state in enumerate(states):
        assert torch.equal(first[i], state)
        assert torch.equal(store.state(i, "final"), state)
