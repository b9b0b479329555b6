"""The precompute stage on a tiny real target: equal to transformers, resumed to the same bytes, mended, extended, and honest about NaN."""

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mtptrain import manifest
from mtptrain.config import Codec, Config, Device, Dtype, OnStale
from mtptrain.data.documents import FILE, Document, write_documents
from mtptrain.errors import StaleError, UserError
from mtptrain.files import hash_file, hash_json
from mtptrain.stages import capture, parity, precompute
from mtptrain.store.reader import Store
from tests.unit.stores import random_documents
from tests.unit.tiny import tiny_llama

LENGTHS = [30, 20, 50, 10, 5, 64, 7, 33]
"""With 64 tokens a shard: [30, 20], [50, 10], [5], [64], [7, 33]."""
POISON = 319
"""A token whose embedding is NaN in the poisoned target."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """The stage collects garbage at its end; among the objects of every imported package that takes most of a test's time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))


def config(root: Path, target: Path, documents: list[Document] | None = None, **precompute_options: Any) -> Config:
    cfg = Config(root=str(root), device=Device.cpu)
    cfg.target.path = str(target)
    cfg.target.dtype = Dtype.float32
    cfg.store.shard_tokens = 64
    cfg.store.codec = Codec.bf16  # what other codecs make of the same states is in test_codecs.py
    cfg.precompute.batch_tokens = 48
    for key, value in precompute_options.items():
        setattr(cfg.precompute, key, value)
    write_documents(cfg.data_dir, random_documents(LENGTHS, vocab_size=300) if documents is None else documents)
    manifest.finish(cfg.data_dir, {}, {FILE: hash_file(cfg.data_dir / FILE)})
    return cfg


def bytes_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Of all files but config.yaml, which has the run's own path."""
    return {p.name: p.read_bytes() for p in sorted(folder.glob(pattern)) if p.name != "config.yaml"}


def counted(monkeypatch: pytest.MonkeyPatch, fail_after: int | None = None) -> list[list[int]]:
    """Record the lengths of each stored forward; die at number `fail_after`."""
    calls: list[list[int]] = []

    def counted(model: Any, tokens: list[list[int]], names: list[str]) -> dict[str, torch.Tensor]:
        if len(calls) == fail_after:
            raise KeyboardInterrupt
        calls.append([len(t) for t in tokens])
        return real(model, tokens, names)

    real: Callable[..., dict[str, torch.Tensor]] = capture.capture_packed
    monkeypatch.setattr(capture, "capture_packed", counted)
    return calls


def test_states_are_those_of_transformers(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(tmp_path, target, captures=["final", "after_0", "after_2"])
    precompute.run(cfg)
    store = Store.open(cfg.store_dir, ["final", "after_0", "after_2"])
    documents = random_documents(LENGTHS, vocab_size=300)
    assert [e.id for e in store.entries] == [d.id for d in documents]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for i, document in enumerate(documents):
        assert store.tokens(i).tolist() == document.tokens
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([document.tokens]), output_hidden_states=True).hidden_states
            normed = model.model.norm(store.state(i, "after_2").float())
        torch.testing.assert_close(store.state(i, "final").float(), hidden[3][0], rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(store.state(i, "after_0").float(), hidden[1][0], rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(normed, hidden[3][0], rtol=2**-6, atol=1e-3)
    shown = capsys.readouterr().out
    assert "4 documents, 46 tokens, float32: largest relative error after_0" in shown
    assert "top-1 agreement 100.00%" in shown
    assert "219 tokens of 8 documents" in shown
    assert "captures:\n  - final\n  - after_0\n  - after_2" in (cfg.store_dir / "config.yaml").read_text()


def test_batches_stay_inside_shards_and_budget(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    precompute.run(config(tmp_path, target))
    assert calls == [[30], [20], [50], [10], [5], [64], [7, 33]]


def test_a_finished_store_is_reused_without_a_forward(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(tmp_path, target)
    precompute.run(cfg)
    before = bytes_of(cfg.store_dir)
    calls = counted(monkeypatch, fail_after=0)
    monkeypatch.setattr(capture, "load_model", None)
    precompute.run(cfg)
    assert calls == []
    assert bytes_of(cfg.store_dir) == before


@pytest.mark.parametrize("forwards", [0, 3, 6])
def test_killed_and_resumed_store_is_bit_identical(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, forwards: int) -> None:
    whole = config(tmp_path / "whole", target)
    precompute.run(whole)
    killed = config(tmp_path / "killed", target)
    with monkeypatch.context() as patch:
        counted(patch, fail_after=forwards)
        with pytest.raises(KeyboardInterrupt):
            precompute.run(killed)
    assert not (killed.store_dir / manifest.MANIFEST).exists()
    with pytest.raises(UserError, match="unfinished"):
        Store.open(killed.store_dir, ["final"])
    finished = bytes_of(killed.store_dir, "0*.json")
    assert len(finished) == {0: 0, 3: 1, 6: 4}[forwards]
    again = counted(monkeypatch)
    precompute.run(killed)
    assert sum(map(sum, again)) == {0: 219, 3: 169, 6: 40}[forwards]
    assert bytes_of(killed.store_dir) == bytes_of(whole.store_dir)


def test_a_capture_is_appended_without_touching_the_rest(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = config(tmp_path / "both", target, captures=["final", "after_1"])
    precompute.run(both)
    late = config(tmp_path / "late", target)
    precompute.run(late)
    before = {p: p.stat().st_mtime_ns for p in late.store_dir.glob("*.safetensors")}
    late.precompute.captures = ["after_1"]
    with monkeypatch.context() as patch:
        counted(patch, fail_after=4)
        with pytest.raises(KeyboardInterrupt):
            precompute.run(late)
    assert len(Store.open(late.store_dir, ["final"]).entries) == 8
    with pytest.raises(UserError, match="no capture after_1"):
        Store.open(late.store_dir, ["after_1"])
    precompute.run(late)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert bytes_of(late.store_dir) == bytes_of(both.store_dir)


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped", "sidecar"])
def test_a_damaged_file_is_remade_alone(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    cfg = config(tmp_path, target, captures=["final", "after_1"])
    precompute.run(cfg)
    before = bytes_of(cfg.store_dir)
    others = {p: p.stat().st_mtime_ns for p in cfg.store_dir.glob("*.safetensors") if not p.name.startswith("00003.")}
    path = cfg.store_dir / ("00003.json" if damage == "sidecar" else "00003.final.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw[:-40] if damage == "truncated" else raw)
    if damage == "missing":
        path.unlink()
    with pytest.raises(UserError, match=str(path)):
        Store.open(cfg.store_dir, ["final"]).state(5, "final")
    calls = counted(monkeypatch)
    precompute.run(cfg)
    assert calls == [[64]]
    assert bytes_of(cfg.store_dir) == before
    assert {p: p.stat().st_mtime_ns for p in others} == others


def test_other_inputs_are_refused_by_name_or_redone(tmp_path: Path, target: Path) -> None:
    cfg = config(tmp_path, target)
    precompute.run(cfg)
    cfg.precompute.batch_tokens = 100
    with pytest.raises(StaleError, match=r"precompute\.batch_tokens: 48 -> 100"):
        precompute.run(cfg)
    cfg.on_stale = OnStale.redo
    precompute.run(cfg)
    assert manifest.require(cfg.store_dir, "", "")["inputs"]["precompute.batch_tokens"] == 100


def test_the_data_stage_is_asked_for(tmp_path: Path, target: Path) -> None:
    cfg = config(tmp_path, target)
    (cfg.data_dir / manifest.MANIFEST).unlink()
    with pytest.raises(UserError, match=r"python -m mtptrain\.prepare"):
        precompute.run(cfg)


def test_a_layer_the_target_lacks_is_refused(tmp_path: Path, target: Path) -> None:
    with pytest.raises(UserError, match=r"precompute\.captures=after_3: the target has 3 layers"):
        precompute.run(config(tmp_path, target, captures=["after_3"]))


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """219 tokens x (64 x 2 + 5) bytes = 29,127."""
    cfg = config(tmp_path, target)
    usage = type(precompute.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(precompute.shutil, "disk_usage", lambda _: usage(10**6, 10**6, 29_126))
    with pytest.raises(UserError, match="free space, set root="):
        precompute.run(cfg)
    assert not cfg.store_dir.exists()
    monkeypatch.setattr(precompute.shutil, "disk_usage", lambda _: usage(10**6, 10**6, 29_127))
    precompute.run(cfg)


def test_a_writer_that_fails_stops_the_run_in_its_words(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mtptrain.store.writer._write_bytes", full)
    calls = counted(monkeypatch)
    with pytest.raises(UserError, match=r"00000\.tokens\.safetensors: No space left on device"):
        precompute.run(config(tmp_path, target))
    assert len(calls) <= 5  # at most two shards beyond the first


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """Embedding of POISON is NaN."""
    folder = tiny_llama(tmp_path / "poisoned")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("leaks", [False, True])
def test_fault_14_nan_stored(
    tmp_path: Path, poisoned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leaks: bool
) -> None:
    """A document with NaN states is rejected by id, even where an attention mask spreads its NaN over its batch."""
    documents = random_documents(LENGTHS, vocab_size=300)
    documents[6].tokens[3] = POISON
    if leaks:
        real = capture.capture_packed

        def leaky(model: Any, tokens: list[list[int]], names: list[str]) -> dict[str, torch.Tensor]:
            states = real(model, tokens, names)
            return {name: state_TH + 0 * state_TH.sum(0, keepdim=True) for name, state_TH in states.items()}

        monkeypatch.setattr(capture, "capture_packed", leaky)
    cfg = config(tmp_path / "run", poisoned, documents)
    precompute.run(cfg)
    store = Store.open(cfg.store_dir, ["final"])
    assert [e.id for e in store.entries] == ["doc-0", "doc-1", "doc-2", "doc-3", "doc-4", "doc-5", "doc-7"]
    assert all(bool(torch.isfinite(store.state(i, "final")).all()) for i in range(7))
    for file in cfg.store_dir.glob("*.final.safetensors"):
        assert torch.isfinite(load_file(file)["data"]).all(), file
    rows = [json.loads(line) for line in (cfg.store_dir / "rejects.jsonl").read_text().splitlines()]
    assert rows == [{"id": "doc-6", "shard": 4, "capture": "final", "reason": "NaN"}]
    assert "1 documents rejected" in capsys.readouterr().out
    clean = config(tmp_path / "clean", poisoned, random_documents(LENGTHS, vocab_size=300))
    monkeypatch.undo()
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    precompute.run(clean)
    expected = Store.open(clean.store_dir, ["final"])
    torch.testing.assert_close(store.state(6, "final"), expected.state(7, "final"), rtol=2**-7, atol=1e-5)


def test_nothing_left_is_an_error(tmp_path: Path, poisoned: Path) -> None:
    documents = random_documents([9, 8, 7], vocab_size=300)
    for document in documents:
        document.tokens[0] = POISON
    cfg = config(tmp_path / "run", poisoned, documents)
    with pytest.raises(UserError, match=r"not finite in all of the first 3 documents \(NaN in `final` of doc-0\)"):
        precompute.run(cfg)
    assert not (cfg.store_dir / manifest.MANIFEST).exists()
    assert len((cfg.store_dir / "rejects.jsonl").read_text().splitlines()) == 3


def test_a_forward_that_mixes_documents_is_stopped(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = parity.capture_packed

    def mixes(model: Any, tokens: list[list[int]], names: list[str]) -> dict[str, torch.Tensor]:
        return real(model, [[t for document in tokens for t in document]], names)

    monkeypatch.setattr(parity, "capture_packed", mixes)
    with pytest.raises(UserError, match=r"use precompute\.batch_tokens=1"):
        precompute.run(config(tmp_path, target))
    precompute.run(config(tmp_path / "alone", target, batch_tokens=1))


def test_relative_error_is_that_of_the_worst_row() -> None:
    """|(0, 0.3)| / |(3, 4)| = 0.06 against 0.1 / 10 = 0.01."""
    alone = torch.tensor([[3.0, 4.0], [10.0, 0.0]])
    packed = torch.tensor([[3.0, 4.3], [10.1, 0.0]])
    assert parity.relative_error(packed, alone) == pytest.approx(0.06, rel=1e-6)


def test_inputs_hold_all_that_determines_the_bytes(tmp_path: Path, target: Path) -> None:
    cfg = config(tmp_path, target)
    inputs = precompute.store_inputs(cfg, target, torch.float32, None)
    assert set(inputs) == {
        "target", "tokenizer", "documents", "dtype", "store.codec", "store.aux_codec", "store.shard_tokens", "precompute.batch_tokens",
        "precompute.backend", "engine", "store_format",
    }  # fmt: skip
    assert inputs["store.codec"] == {"name": "bf16", "version": 1}
    write_documents(cfg.data_dir, random_documents([9]))
    assert hash_json(precompute.store_inputs(cfg, target, torch.float32, None)["documents"]) != hash_json(inputs["documents"])


@pytest.mark.parametrize("damage", ["missing", "cut", "flip", "empty"])
def test_fault_16_damaged_documents_are_named_before_anything_is_computed(target: Path, tmp_path: Path, damage: str) -> None:
    cfg = config(tmp_path, target)
    file = cfg.data_dir / FILE
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink() if damage == "missing" else file.write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b""}[damage])
    with pytest.raises(
        UserError, match=rf"documents\.parquet is {'missing' if damage == 'missing' else 'damaged'}; delete .*manifest\.json"
    ):
        precompute.run(cfg)
    assert not cfg.store_dir.exists()
