"""The store's codecs: what they lose against bounds in closed form, what they never change, and what a file of them holds."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtptrain.config import Codec
from mtptrain.data.documents import HELD_OUT, TRAIN
from mtptrain.errors import UserError
from mtptrain.files import hash_file, read_json
from mtptrain.store import codecs, format
from mtptrain.store.codec_bytes import outlier_channels, state_bytes
from mtptrain.store.codecs import CODECS, FP8, INT4, INT8, StateCodec, codec_of, find_outliers
from mtptrain.store.format import StoreDamage
from mtptrain.store.reader import Store
from tests.unit.stores import make_store, random_documents, random_state

LOSSY = [INT8, FP8, INT4]
BF16_ROUNDING = 2.0**-8
"""Relative, of a decoded value: half a unit of 8 bits, taken twice."""


def states(rows: int, hidden: int, seed: int, power: float = 0.0) -> Tensor:
    """bf16, with channels of very different size and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    size_H = torch.randn(hidden, generator=generator).exp()
    state_NH = torch.randn(rows, hidden, generator=generator) * size_H * 10.0**power
    state_NH[rows // 2] = 0
    return state_NH.bfloat16()


def whole(codec: StateCodec, tensors: dict[str, Tensor]) -> Tensor:
    return codec.decode(tensors, 0, len(tensors["data"]))


def largest_error(codec: StateCodec, tensors: dict[str, Tensor], state_NH: Tensor) -> Tensor:
    """[N, H] in float64: what rounding to the codec's levels may change, at most, in channels that are no outliers."""
    size_NH, scale = state_NH.double().abs(), tensors["scale"].double()
    if codec is INT8:
        return scale[:, None] / 2 + 0 * size_NH
    if codec is FP8:  # 3 bits after the first, and steps of 2^-9 below 2^-6
        return torch.maximum(size_NH * 2.0**-4, scale[:, None] * 2.0**-10)
    return (scale * (0.5 + 7 * 2.0**-8)).repeat_interleave(32, dim=1)  # the scale itself is rounded to bf16


@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.name)
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), blocks=st.integers(1, 5), seed=st.integers(0, 2**31), power=st.floats(-20, 20))
def test_no_value_moves_further_than_half_a_level(codec: StateCodec, rows: int, blocks: int, seed: int, power: float) -> None:
    state_NH = states(rows, 32 * blocks, seed, power)
    tensors = codec.encode(state_NH)
    read_NH = whole(codec, tensors)
    assert read_NH.dtype == torch.bfloat16
    error_NH = (read_NH.double() - state_NH.double()).abs()
    assert (error_NH <= largest_error(codec, tensors, state_NH) * (1 + 1e-5) + read_NH.double().abs() * BF16_ROUNDING).all()
    outliers_O = tensors["outliers"].long()
    assert torch.equal(read_NH[:, outliers_O], state_NH[:, outliers_O])
    assert not read_NH[rows // 2].any()


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda c: c.name)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(2, 60), data=st.data())
def test_a_part_reads_as_in_the_whole(codec: StateCodec, rows: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start, rows))
    tensors = codec.encode(states(rows, 64, seed=rows))
    assert torch.equal(codec.decode(tensors, start, stop), whole(codec, tensors)[start:stop])


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda c: c.name)
def test_a_tensor_is_what_the_codec_says_and_takes_the_bytes_that_plan_counts(codec: StateCodec) -> None:
    tensors = codec.encode(states(50, 96, seed=1))
    names = {"bf16": "BF16", "int8": "I8", "uint8": "U8", "float8_e4m3fn": "F8_E4M3", "float32": "F32", "int32": "I32"}
    found = {name: (names[str(t.dtype).removeprefix("torch.").replace("bfloat16", "bf16")], t.dim()) for name, t in tensors.items()}
    assert found == codec.layout
    rows = {name: t for name, t in tensors.items() if name not in codec.shared}
    assert all(len(t) == 50 for t in rows.values())
    assert sum(t.numel() * t.element_size() for t in rows.values()) == 50 * state_bytes(codec.name, 96)
    assert {c.name for c in Codec} == set(CODECS)


@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.name)
def test_the_same_states_give_the_same_bytes_however_they_are_chunked(codec: StateCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    state_NH = states(70, 64, seed=2)
    first = codec.encode(state_NH)
    monkeypatch.setattr(codecs, "_CHUNK", 64 * 7)
    again = codec.encode(state_NH.clone())
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name].view(torch.uint8), again[name].view(torch.uint8)) for name in first)


def test_int8_by_hand() -> None:
    """One outlier of 16 channels: the largest. The next, 127, sets the scale to 1."""
    state_1H = torch.zeros(1, 16, dtype=torch.bfloat16)
    state_1H[0, :5] = torch.tensor([300.0, 127.0, -1.5, 0.4, -2.5])
    tensors = INT8.encode(state_1H)
    assert tensors["outliers"].tolist() == [0]
    assert tensors["kept"].tolist() == [[300.0]]
    assert tensors["scale"].tolist() == [1.0]
    assert tensors["data"][0, :5].tolist() == [0, 127, -2, 0, -2]  # halves to even
    assert whole(INT8, tensors)[0, :5].tolist() == [300.0, 127.0, -2.0, 0.0, -2.0]


def test_fp8_by_hand() -> None:
    state_1H = torch.zeros(1, 64, dtype=torch.bfloat16)
    state_1H[0, :5] = torch.tensor([9024.0, 448.0, -1.1875, 0.0009765625, 17.0])
    tensors = FP8.encode(state_1H)
    assert tensors["outliers"].tolist() == [0]
    assert tensors["scale"].tolist() == [1.0]
    # 1.1875 lies between 1.125 and 1.25, as near to both: the even one; half of the smallest step, 2^-9, goes to zero; 17 to 16
    assert whole(FP8, tensors)[0, :5].tolist() == [9024.0, 448.0, -1.25, 0.0, 16.0]


def test_int4_by_hand() -> None:
    state_1H = torch.zeros(1, 32, dtype=torch.bfloat16)
    state_1H[0, :6] = torch.tensor([50.0, 60.0, 7.0, -7.0, 2.4, -0.6])
    tensors = INT4.encode(state_1H)
    assert tensors["outliers"].tolist() == [0, 1]
    assert tensors["scale"].tolist() == [[1.0]]
    assert tensors["data"][0, 0, :6].tolist() == [8 + 16 * 8, 8 + 16 * 8, 15 + 16 * 8, 1 + 16 * 8, 10 + 16 * 8, 7 + 16 * 8]
    assert whole(INT4, tensors)[0, :6].tolist() == [50.0, 60.0, 7.0, -7.0, 2.0, -1.0]


def test_every_float8_is_read_as_torch_reads_it() -> None:
    """All 254 that are numbers."""
    byte = torch.arange(256, dtype=torch.uint8)
    data = byte[(byte & 0x7F) != 0x7F].view(torch.float8_e4m3fn)[None]
    assert data.numel() == 254
    assert torch.equal(codecs._widened(data), data.float())


def test_the_outliers_are_the_channels_that_are_large_in_most_tokens() -> None:
    state_NH = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    state_NH[:, [5, 40]] *= 50
    state_NH[7, 11] = 1e6  # large once
    assert find_outliers(state_NH.bfloat16(), 2).tolist() == [5, 40]
    assert find_outliers(state_NH.bfloat16(), 0).tolist() == []
    assert find_outliers(torch.zeros(0, 64), 2).tolist() == [0, 1]


def test_outliers_are_kept_apart_because_they_would_set_the_scale() -> None:
    """A channel a hundred times larger: with one scale for all the others would move by up to 100 / 254 of their own size."""
    state_NH = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    state_NH[:, 3] = 100
    read_NH = whole(INT8, INT8.encode(state_NH.bfloat16())).float()
    error_NH = (read_NH - state_NH.bfloat16().float())[:, 4:]
    assert error_NH.norm() / state_NH[:, 4:].norm() < 0.01
    assert outlier_channels("int8", 256) == 16


@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.name)
def test_a_store_of_any_codec_reads_as_its_codec_decodes(codec: StateCodec, tmp_path: Path) -> None:
    """Held-out documents, by which heads are chosen and measured, as they were."""
    documents = random_documents([5, 9, 30, 12, 40, 3])
    state = {c: random_state(documents, c, 64) for c in ("final", "after_1")}
    make_store(tmp_path, documents, state, shard_tokens=50, codecs=(codec, CODECS["bf16"]))
    store = Store.open(tmp_path, ["final", "after_1"])
    for i in range(len(documents)):
        assert torch.equal(store.state(i, "after_1"), state["after_1"][i])
        entry = store.entries[i]
        shard = torch.cat([state["final"][j] for j, e in enumerate(store.entries) if e.shard == entry.shard])
        coded = shard if entry.split == HELD_OUT else whole(codec, codec.encode(shard))
        expected = coded[entry.start : entry.start + entry.length]
        assert torch.equal(store.state(i, "final"), expected)
    assert {e.split for e in store.entries} == {TRAIN, HELD_OUT}
    assert {f.codec["name"] for s in store.sidecars for f in s.files.values() if f.codec} == {codec.name, "bf16"}


def test_a_codec_that_this_version_does_not_read_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"x/store is stored as int9 1; this version reads bf16 1, int8 1.*on_stale=redo"):
        codec_of({"name": "int9", "version": 1}, Path("x/store"))
    with pytest.raises(UserError, match=r"int8 2; this version reads"):
        codec_of({"name": "int8", "version": 2}, Path("x/store"))


def test_fault_16_a_file_of_another_dtype_is_named(tmp_path: Path) -> None:
    """Even where size, hash and header name are as the sidecar says."""
    documents = random_documents([5, 9])
    make_store(tmp_path, documents, {"final": random_state(documents, "final", 64)})
    body = read_json(format.sidecar_path(tmp_path, 0))
    store = Store.open(tmp_path, ["final"])
    path = format.part_path(tmp_path, 0, "final")
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))
    sidecar = store.sidecars[0]
    sidecar.files["final"] = replace(sidecar.files["final"], hash=hash_file(path))
    format.write_sidecar(tmp_path, sidecar)
    assert read_json(format.sidecar_path(tmp_path, 0)) != body
    with pytest.raises(StoreDamage, match=r"00000\.final\.safetensors holds \{'data': \('F16', 2\)\}.* instead of \{'data': \('BF16'"):
        Store.open(tmp_path, ["final"])


def test_fault_16_a_shard_in_another_codec_than_the_manifest_says_is_named(tmp_path: Path) -> None:
    documents = random_documents([5, 9])
    make_store(tmp_path, documents, {"final": random_state(documents, "final", 64)}, codecs=(INT8, INT8))
    sidecar = Store.open(tmp_path, ["final"]).sidecars[0]
    sidecar.files["final"] = replace(sidecar.files["final"], codec=FP8.tag)
    format.write_sidecar(tmp_path, sidecar)
    with pytest.raises(StoreDamage, match=r"00000\.final\.safetensors"):
        Store.open(tmp_path, ["final"])


def test_no_value_that_precompute_lets_through_overflows() -> None:
    """It rejects from 2^126 on."""
    state_NH = torch.full((4, 64), 2.0**126, dtype=torch.bfloat16)
    state_NH[1] = 2.0**-120
    for codec in LOSSY:
        read_NH = whole(codec, codec.encode(state_NH))
        assert torch.isfinite(read_NH).all()
        assert math.isclose(read_NH[1, 40].item(), 2.0**-120, rel_tol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("codec", LOSSY, ids=lambda c: c.name)
def test_a_cuda_device_gives_the_same_bytes(codec: StateCodec) -> None:
    state_NH = states(300, 192, seed=5)
    ours, theirs = codec.encode(state_NH), codec.encode(state_NH.cuda())
    for name, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[name].cpu().view(torch.uint8)), name
    assert torch.equal(whole(codec, ours), whole(codec, theirs).cpu())
