"""Thousands of damaged inputs: each ends in one line for the user or in a sound result, soon, in little memory, and runs nothing.

A mutation is structural (a value of a parsed document becomes another, which gets past the outer parser) or of bytes. `attempt` gives the
layer at which an input was told, or `accepted`; how many reached which layer is printed and checked at the end of each test.
"""

import copy
import json
import resource
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtptrain.checkpoint import load_checkpoint, save_checkpoint
from mtptrain.cli import compose
from mtptrain.config import Config
from mtptrain.data.readers import Record, Reject, read_records
from mtptrain.errors import UserError
from mtptrain.files import append_jsonl, hash_file, read_jsonl_durable
from mtptrain.store import format
from mtptrain.store.codecs import INT8
from mtptrain.store.reader import Store
from mtptrain.target import gguf as gguf_target
from mtptrain.target.gguf_header import check_header
from mtptrain.target.spec import TargetSpec, read_spec
from mtptrain.usage import config_dir
from tests.unit.stores import make_store, random_documents, random_state
from tests.unit.tiny import FAMILY_KEYS, tiny_family

SECONDS, MEGABYTES = 20, 600
"""What one damaged input may take, and what all of a test may add to the process."""

Mutation = tuple[str, float, Any]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")]),
    st.sampled_from(
        ["", "x", "../../etc/passwd", "/etc/passwd", "\x00", "a" * 5000, "<script>alert(1)</script>", "${oc.env:HOME}", "=cmd"]
    ),
    st.sampled_from([[], {}, [None], [[[]]], {"": None}, ["x", 1, {}]]),
    st.integers(),
    st.text(max_size=6),
)
STRUCTURAL = st.tuples(st.sampled_from(["value", "delete", "wrap", "double", "nest", "key"]), st.floats(0, 1, exclude_max=True), VALUES)
BYTES = st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat"]), st.floats(0, 1, exclude_max=True), st.integers(0, 255))


def mutated(document: Any, mutation: Mutation) -> Any:
    """A deep copy with one place of it changed."""
    what, where, value = mutation
    document = copy.deepcopy(document)
    places = list(_places(document))
    if not places:
        return value
    holder, key = places[int(where * len(places))]
    old = holder[key]
    if what == "delete":
        del holder[key]
    elif what == "key" and isinstance(holder, dict):
        holder[str(value)[:20]] = holder.pop(key)
    else:
        deep: Any = old
        for _ in range(60):
            deep = [deep]
        double = old * 2 if isinstance(old, str | list) else value
        holder[key] = {"value": value, "wrap": [old], "double": double, "nest": deep}.get(what, value)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(document.items()) if isinstance(document, dict) else list(enumerate(document)):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)


def bytes_mutated(content: bytes, mutation: Mutation) -> bytes:
    what, where, value = mutation
    at = int(where * len(content))
    if what == "cut":
        return content[:at]
    if what == "insert":
        return content[:at] + bytes([value]) * (1 + value % 9) + content[at:]
    if what == "repeat":
        return content[:at] + content[max(0, at - value) :]
    return content[:at] + bytes([content[at] ^ (value or 1)]) + content[at + 1 :] if content else b"\x00"


class Fuzz:
    """Counts the layers that told of a damaged input."""

    def __init__(self, name: str) -> None:
        self.name, self.layers = name, Counter[str]()
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def attempt(self, reading: Callable[[], str]) -> str:
        """`reading` returns a layer; a UserError is one line. Whatever else it raises fails the test."""
        with _deadline():
            try:
                layer = reading()
            except UserError as told:
                text = str(told)
                assert text.strip(), "an empty message"
                assert "\n" not in text, text
                layer = _layer(text)
        self.layers[layer] += 1
        return layer

    def finish(self, least: int, past_parser: float = 0.3) -> None:
        total = sum(self.layers.values())
        past = 1 - self.layers["parser"] / total
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before) / 1024
        print(f"{self.name}: {total} damaged inputs, {past:.0%} past the outer parser; {dict(self.layers.most_common())}")
        assert total >= least
        assert past >= past_parser
        assert grown < MEGABYTES


def _layer(text: str) -> str:
    parser = (
        "not valid JSON",
        "damaged (",
        "Expecting",
        "damaged header",
        "cut short",
        "not a readable",
        "not one JSON",
        "not valid YAML",
        "not a GGUF",
    )
    return "parser" if any(word in text for word in parser) else "hash" if "hash differs" in text or "corrupt" in text else "content"


@contextmanager
def _deadline() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def many(examples: int) -> Callable[[Any], Any]:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def on_values(examples: int, values: Sequence[Any], attempt: Callable[[Any], object], most: int = 1) -> None:
    """`attempt` with one of the values after up to `most` mutations of its structure."""

    @many(examples)
    @given(value=st.sampled_from(values), mutations=st.lists(STRUCTURAL, min_size=1, max_size=most))
    def one(value: Any, mutations: list[Mutation]) -> None:
        for mutation in mutations:
            value = mutated(value, mutation) if isinstance(value, dict | list) else value
        attempt(value)

    one()


def on_bytes(examples: int, content: bytes, attempt: Callable[[bytes], object], most: int = 1) -> None:
    """`attempt` with the content after up to `most` mutations of its bytes."""

    @many(examples)
    @given(mutations=st.lists(BYTES, min_size=1, max_size=most))
    def one(mutations: list[Mutation]) -> None:
        changed = content
        for mutation in mutations:
            changed = bytes_mutated(changed, mutation)
        attempt(changed)

    one()


ROWS: list[dict[str, Any]] = [
    {"id": "a", "source": "s", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "tools": [{"type": "function"}]},
    {"prompt": "hi", "response": "ho", "id": 3},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "tools": '[{"type": "function"}]'},
]


def test_rows_of_data_files(tmp_path: Path) -> None:
    """Every line gives a record or a reject; what a record holds are texts in known roles."""
    fuzz, file = Fuzz("data rows"), tmp_path / "rows.jsonl"

    def read() -> str:
        layer = "accepted"
        found = list(read_records(str(file)))
        for row in found:
            if isinstance(row, Reject):
                layer = "parser" if row.reason in ("not valid JSON", "not valid UTF-8") else "content"
                assert "\n" not in row.reason
                continue
            assert isinstance(row, Record)
            assert row.messages
            for message in row.messages:
                assert message["role"] in ("system", "user", "assistant", "tool")
                assert isinstance(message["content"], str)
            json.dumps([row.id, row.source, row.messages, row.tools])
        return layer

    def attempt(content: bytes) -> None:
        file.write_bytes(content)
        fuzz.attempt(read)

    on_values(1500, ROWS, lambda row: attempt(json.dumps(row).encode() + b"\n"), most=3)
    on_bytes(500, "".join(json.dumps(row) + "\n" for row in ROWS).encode(), attempt, most=4)
    fuzz.finish(2000)


def test_recipes(tmp_path: Path) -> None:
    """A recipe of one's own gives a config or one line; interpolations reach no environment."""
    fuzz, file = Fuzz("recipes"), tmp_path / "recipe" / "mine.yaml"
    file.parent.mkdir()
    text = (config_dir("recipes") / "tiny.yaml").read_text()
    recipe = yaml.safe_load(text)

    def read() -> str:
        configs = compose(["+recipe=mine"], user_dir=str(tmp_path))
        assert [type(c) for c in configs] == [Config]
        return "accepted"

    def attempt(content: bytes) -> None:
        file.write_bytes(content)
        fuzz.attempt(read)

    on_values(90, [recipe], lambda changed: attempt(f"# @package _global_\n{yaml.safe_dump(changed)}".encode()), most=2)
    on_bytes(30, text.encode(), attempt)
    fuzz.finish(120)


def _whole(folder: Path) -> list[Any]:
    store = Store.open(folder, ["final"])
    return [(store.tokens(i).tolist(), e.spans, e.split, store.state(i, "final").tolist()) for i, e in enumerate(store.entries)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    documents = random_documents([5, 9, 12])
    make_store(tmp_path / "store", documents, {"final": random_state(documents, "final", 32)}, shard_tokens=20, codecs=(INT8, INT8))
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["manifest.json", "00000.json"])
def test_indexes_of_a_store(store: Path, name: str) -> None:
    """Manifest and sidecar: what reads at all reads as it was."""
    fuzz, file, sound = Fuzz(f"store {name}"), store / name, _whole(store)
    text = file.read_text()

    def read() -> str:
        assert _whole(store) == sound
        return "accepted"

    def attempt(content: bytes) -> str:
        file.write_bytes(content)
        return fuzz.attempt(read)

    def of_value(changed: Any) -> None:
        layer = attempt(json.dumps(changed).encode())
        assert (layer == "accepted") == (json.dumps(changed, sort_keys=True) == json.dumps(json.loads(text), sort_keys=True))

    on_values(400, [json.loads(text)], of_value)
    on_bytes(150, text.encode(), attempt)
    fuzz.finish(550)


_DTYPES = ["same", "F16", "x", "none", "0" * 300]
_SIZES = {"I8": 1, "U8": 1, "BF16": 2, "F32": 4, "I32": 4}


@pytest.mark.parametrize("part", ["final", "tokens"])
@pytest.mark.parametrize("forged", [False, True])
def test_headers_of_a_stores_files(store: Path, part: str, forged: bool) -> None:
    """A file that is not what its sidecar says; with `forged` the sidecar says what it is, so that only its header can tell."""
    fuzz, file, sound = Fuzz(f"store {part}, forged={forged}"), format.part_path(store, 0, part), _whole(store)
    content, sidecar_text = file.read_bytes(), format.sidecar_path(store, 0).read_text()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    sidecar = Store.open(store, ["final"]).sidecars[0]

    def read() -> str:
        found = _whole(store)
        if not forged:
            assert found == sound
        assert [len(f[0]) for f in found] == [len(s[0]) for s in sound]
        return "accepted"

    def attempt(changed: bytes) -> None:
        file.write_bytes(changed)
        format.sidecar_path(store, 0).write_text(sidecar_text)
        if forged:
            own = copy.deepcopy(sidecar)
            own.files[part].bytes, own.files[part].hash = len(changed), hash_file(file)
            format.write_sidecar(store, own)
        fuzz.attempt(read)
        format.corrupt_path(file).unlink(missing_ok=True)

    def with_header(changed: Any) -> None:
        text = json.dumps(changed).encode()
        text += b" " * (-len(text) % 8)
        attempt(struct.pack("<Q", len(text)) + text + data)

    @many(300)
    @given(name=st.sampled_from(sorted(n for n in header if n != "__metadata__")), change=st.integers(0, 5), other=st.sampled_from(_DTYPES))
    def sound_headers(name: str, change: int, other: str) -> None:
        """Such as safetensors itself reads: another name, type, shape, order, or identity."""
        new = copy.deepcopy(header)
        entry = new[name]
        if change == 0:
            new[f"{name}{other}"] = new.pop(name)
        elif change == 1:
            entry["dtype"] = {1: "I8", 2: "F16", 4: "F32", 8: "F64"}[_SIZES[entry["dtype"]]] if other == "same" else entry["dtype"]
            entry["shape"] = entry["shape"] if other == "same" else [*entry["shape"], 1]
        elif change == 2:
            entry["shape"] = entry["shape"][::-1] if len(entry["shape"]) > 1 else [1, *entry["shape"]]
        elif change == 3:
            new["__metadata__"] = {"mtptrain": other} if other != "none" else {}
        elif change == 4:
            new.pop("__metadata__")
        else:
            names = [n for n in new if n != "__metadata__"]
            swapped = names[(names.index(name) + 1) % len(names)]
            new[name], new[swapped] = new[swapped], new[name]
        with_header(new)

    on_values(250, [header], with_header)
    if forged:
        on_bytes(150, data, lambda changed: attempt(content[: 8 + size] + changed[: len(data)].ljust(len(data), b"x")))
    else:
        on_bytes(150, content, attempt)
    sound_headers()
    fuzz.finish(420, past_parser=0.3 if forged else 0.0)


def test_checkpoints(tmp_path: Path) -> None:
    """State and tensors of a training's checkpoint: what loads at all is what was saved."""
    fuzz, folder = Fuzz("checkpoints"), tmp_path / "00000010"
    tensors = {"head": {"a": torch.arange(6.0).reshape(2, 3)}}
    state = {"progress": {"update": 10, "tokens": 5, "best_score": 1.5}, "head": {"kind": "mtp", "config": {"x": [1, 2]}}}
    save_checkpoint(folder, tensors, state)
    text, content = (folder / "state.json").read_text(), (folder / "head.safetensors").read_bytes()

    def read() -> str:
        groups, found = load_checkpoint(folder)
        assert torch.equal(groups["head"]["a"], tensors["head"]["a"])
        assert {key: found[key] for key in state} == state
        return "accepted"

    def attempt(weights: bytes, state: bytes) -> None:
        (folder / "head.safetensors").write_bytes(weights)
        (folder / "state.json").write_bytes(state)
        fuzz.attempt(read)

    on_values(300, [json.loads(text)], lambda changed: attempt(content, json.dumps(changed).encode()))
    on_bytes(100, text.encode(), lambda changed: attempt(content, changed))
    on_bytes(100, content, lambda changed: attempt(changed, text.encode()))
    fuzz.finish(500)


def test_files_that_a_run_appends_to(tmp_path: Path) -> None:
    """A torn end is cut off, anything else that is no row is named."""
    fuzz, file = Fuzz("appended rows"), tmp_path / "responses.jsonl"
    append_jsonl(file, [{"id": str(n), "tokens": [n, n + 1]} for n in range(4)])
    content = file.read_bytes()

    def read() -> str:
        rows = list(read_jsonl_durable(file))
        assert all(isinstance(row, dict) for row in rows)
        return "accepted"

    def attempt(changed: bytes) -> None:
        file.write_bytes(changed)
        fuzz.attempt(read)

    on_bytes(400, content, attempt, most=3)
    fuzz.finish(400)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3"])
def test_configs_of_targets(tmp_path: Path, model_type: str) -> None:
    """A target's config.json gives a spec or one line."""
    assert model_type in FAMILY_KEYS
    fuzz, folder = Fuzz(f"config.json of {model_type}"), tiny_family(tmp_path / "t", model_type)
    file = folder / "config.json"
    config = json.loads(file.read_text())

    def read() -> str:
        assert isinstance(read_spec(folder), TargetSpec)
        return "accepted"

    def attempt(changed: Any) -> None:
        file.write_text(json.dumps(changed))
        fuzz.attempt(read)

    on_values(300, [config], attempt, most=2)
    fuzz.finish(300)


def _tiny_gguf(file: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(40)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{n}" for n in range(37))])
    writer.add_token_types([1] * 40)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd.weight": (40, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}
    shapes |= {f"blk.0.attn_{n}.weight": (32, 32) for n in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate.weight": (64, 32), "blk.0.ffn_up.weight": (64, 32), "blk.0.ffn_down.weight": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("length", [41, 2**20, 2**33, 2**56, 2**63])
def test_a_gguf_that_announces_more_than_it_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Of an array of numbers, of strings, of its entries: the reader would count up to there, and keep every step."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "t.gguf"
    _tiny_gguf(file)
    content = file.read_bytes()
    check_header(file)
    for at in (content.index(b"tokenizer.ggml.token_type") + 33, content.index(b"tokenizer.ggml.tokens") + 29, 8, 16):
        file.write_bytes(content[:at] + struct.pack("<Q", length) + content[at + 8 :])
        with pytest.raises(UserError, match=r"t\.gguf is damaged"):
            gguf_target.from_gguf(file)


def test_gguf_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, metadata and tensor table of a GGUF: a folder whose spec can be read, or one line."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    fuzz, file = Fuzz("GGUF"), tmp_path / "t.gguf"
    _tiny_gguf(file)
    content = file.read_bytes()
    table = content.index(b"blk.0.ffn_down.weight") + 60

    def read() -> str:
        folder = gguf_target.from_gguf(file)
        read_spec(folder)
        return "accepted"

    read()

    @many(60)
    @given(at=st.integers(0, table), value=st.integers(1, 255), length=st.sampled_from([1, 1, 4, 8]))
    def of_bytes(at: int, value: int, length: int) -> None:
        file.write_bytes(content[:at] + bytes(b ^ value for b in content[at : at + length]) + content[at + length :])
        fuzz.attempt(read)

    @many(15)
    @given(where=st.floats(0, 1, exclude_max=True))
    def cut(where: float) -> None:
        file.write_bytes(content[: int(where * len(content))])
        fuzz.attempt(read)

    began = time.monotonic()
    of_bytes()
    cut()
    print(f"{time.monotonic() - began:.0f} s")
    fuzz.finish(60)
