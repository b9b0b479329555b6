"""How hidden states are stored. A codec owns the tensors of a capture's file; `data` with a row a token is always one of them.

    bf16    data bf16 [N, H]
    int8    data int8 [N, H], scale f32 [N]                     x = data * scale; scale = largest / 127
    fp8     data f8_e4m3 [N, H], scale f32 [N]                  x = data * scale; scale = largest / 448
    int4    data u8 [N, G, 16], scale bf16 [N, G]               x = (nibble - 8) * scale, a scale for 32 channels, the first 16 of which
                                                                are the low nibbles
    and, but for bf16: outliers i32 [O], kept bf16 [N, O]       these channels' values as they were; in `data` they are zero

`largest` is that of a token's other channels. Some channels of a state are 10 to 1,000 times larger than the rest, the same ones in
almost every token; they would set the scale for all (arXiv 2208.07339). The outliers of a shard are the O channels that are most often
among a token's O largest, counted over a sample of its tokens. A count is exact, so the same states give the same bytes.

Legend: N tokens of a shard, T of a document, H hidden, O outliers (codec_bytes.py), G groups of E = 32 channels, C rows of a chunk.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mtptrain.errors import UserError
from mtptrain.store.codec_bytes import GROUP, outlier_channels

_SAMPLE = 4096
"""Tokens of a shard that its outliers are found on."""
_CHUNK = 1 << 17
"""Elements encoded at once, so that what lies between states and bytes stays in the cache."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCodec:
    """Name and version are written beside every capture; a change of the stored bytes needs a new version."""

    name: str
    version: int
    encode: Callable[[Tensor], dict[str, Tensor]]
    """Finite bf16 states [N, H] of a shard -> tensors of its file, on the device of the states."""
    decode: Callable[[Tensors, int, int], Tensor]
    """(tensors of the file, start, stop) -> bf16 states [T, H] of rows start..stop."""
    layout: Mapping[str, tuple[str, int]]
    """Dtype, by safetensors' names, and number of dimensions of the file's tensors."""
    shared: tuple[str, ...] = ()
    """Those that are not a row a token."""

    def check(self, tensors: Tensors, where: Path) -> None:
        """UserError where values of a sound file's tensors can't be decoded."""
        if "outliers" not in tensors:
            return
        channel_O, kept_NO = tensors["outliers"], tensors["kept"]
        hidden = math.prod(tensors["data"].shape[1:]) * (2 if self.name == "int4" else 1)
        ascending = bool((channel_O[1:] > channel_O[:-1]).all())
        if len(channel_O) != kept_NO.shape[1] or not ascending or (len(channel_O) and not 0 <= channel_O[0] <= channel_O[-1] < hidden):
            raise UserError(f"{where} names outliers that it has no room for; delete it and run precompute again")

    @property
    def tag(self) -> dict[str, str | int]:
        return {"name": self.name, "version": self.version}


def find_outliers(state_NH: Tensor, count: int) -> Tensor:
    """The `count` channels, int64 ascending, that are most often among a token's `count` largest; of equals the first."""
    sample_SH = state_NH[:: max(1, len(state_NH) // _SAMPLE)].abs()
    if not count or not len(sample_SH):
        return torch.arange(count, device=state_NH.device)
    often_H = (sample_SH >= _largest(sample_SH, count)).sum(0)
    return often_H.sort(descending=True, stable=True).indices[:count].sort().values


def _largest(size_SH: Tensor, count: int) -> Tensor:
    """Of each row of values that are not negative the `count`-th largest, [S, 1]. numpy's partition is ten times as fast as topk on a CPU,
    on integers, whose order is that of the floats with the same bits.
    """
    if size_SH.device.type != "cpu" or size_SH.dtype != torch.bfloat16:
        return size_SH.topk(count, dim=1).values[:, -1:]
    at = size_SH.shape[1] - count
    found_S1 = np.partition(size_SH.view(torch.int16).numpy(), at, axis=1)[:, at : at + 1]
    return torch.from_numpy(np.ascontiguousarray(found_S1)).view(torch.bfloat16)


_OUTLIER_LAYOUT = {"outliers": ("I32", 1), "kept": ("BF16", 2)}


class _Outliers:
    """Takes a shard's outliers out of its states, some rows at a time."""

    def __init__(self, codec: str, state_NH: Tensor) -> None:
        self.state_NH, self.channel_O = state_NH, find_outliers(state_NH, outlier_channels(codec, state_NH.shape[1]))
        self.kept_NO = torch.empty(len(state_NH), len(self.channel_O), dtype=torch.bfloat16, device=state_NH.device)

    def rest(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows, and their other channels: float32 [C, H] with zeros for the outliers, in room that the next rows take over."""
        count, hidden = self.state_NH.shape
        room_CH = torch.empty(max(1, _CHUNK // max(1, hidden)), hidden, device=self.state_NH.device)
        for start in range(0, count, len(room_CH)):
            rows = slice(start, min(start + len(room_CH), count))
            state_CH = self.state_NH[rows]
            torch.index_select(state_CH, 1, self.channel_O, out=self.kept_NO[rows])
            yield rows, room_CH[: len(state_CH)].copy_(state_CH).index_fill_(1, self.channel_O, 0.0)

    def tensors(self) -> dict[str, Tensor]:
        return {"outliers": self.channel_O.int(), "kept": self.kept_NO}


def _with_outliers(wide_TH: Tensor, tensors: Tensors, start: int, stop: int) -> Tensor:
    """bf16 [T, H] with the outliers put back."""
    state_TH = wide_TH.to(torch.bfloat16)
    return state_TH.index_copy_(1, tensors["outliers"].long(), tensors["kept"][start:stop])


def _inverse(scale: Tensor) -> Tensor:
    """0 where the scale is: a token of zeros stays one."""
    return torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))


def _widened(data_TH: Tensor) -> Tensor:
    """float32, a copy. A float8 becomes a bfloat16 by moving its bits, several times as fast on a CPU as torch's conversion: the exponents'
    biases differ by 120.
    """
    if not data_TH.is_floating_point():
        return data_TH.float()
    bits_TH = data_TH.view(torch.uint8).to(torch.int16)
    sign_TH = (bits_TH & 0x80) << 8
    return bits_TH.bitwise_and_(0x7F).bitwise_left_shift_(4).bitwise_or_(sign_TH).view(torch.bfloat16).float().mul_(2.0**120)


def _scaled(name: str, dtype: torch.dtype, limit: float) -> StateCodec:
    """One scale a token, `limit` the largest value of `dtype`."""

    def encode(state_NH: Tensor) -> dict[str, Tensor]:
        outliers = _Outliers(name, state_NH)
        data_NH = torch.empty(state_NH.shape, dtype=dtype, device=state_NH.device)
        scale_N = torch.empty(len(state_NH), dtype=torch.float32, device=state_NH.device)
        for rows, wide_CH in outliers.rest():
            scale_N[rows] = wide_CH.abs().amax(1) / limit
            wide_CH *= _inverse(scale_N[rows])[:, None]  # at most `limit` but for rounding, which casting takes away
            data_NH[rows] = wide_CH if dtype.is_floating_point else wide_CH.round_()
        return {"data": data_NH, "scale": scale_N, **outliers.tensors()}

    def decode(tensors: Tensors, start: int, stop: int) -> Tensor:
        wide_TH = _widened(tensors["data"][start:stop]).mul_(tensors["scale"][start:stop, None])
        return _with_outliers(wide_TH, tensors, start, stop)

    layout = {"data": ("F8_E4M3" if dtype.is_floating_point else "I8", 2), "scale": ("F32", 1), **_OUTLIER_LAYOUT}
    return StateCodec(name=name, version=1, encode=encode, decode=decode, layout=layout, shared=("outliers",))


def _encode_int4(state_NH: Tensor) -> dict[str, Tensor]:
    outliers = _Outliers("int4", state_NH)
    data_NG = torch.empty(len(state_NH), state_NH.shape[1] // GROUP, GROUP // 2, dtype=torch.uint8, device=state_NH.device)
    scale_NG = torch.empty(data_NG.shape[:2], dtype=torch.bfloat16, device=state_NH.device)
    for rows, wide_CH in outliers.rest():
        wide_CGE = wide_CH.unflatten(1, (-1, GROUP))
        scale_NG[rows] = wide_CGE.abs().amax(2) / 7
        level_CGE = (wide_CGE * _inverse(scale_NG[rows].float())[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
        low, high = level_CGE.chunk(2, dim=-1)
        data_NG[rows] = low | (high << 4)
    return {"data": data_NG, "scale": scale_NG, **outliers.tensors()}


def _decode_int4(tensors: Tensors, start: int, stop: int) -> Tensor:
    data_TG = tensors["data"][start:stop]
    level_TGE = torch.cat((data_TG & 15, data_TG >> 4), dim=-1).float() - 8
    wide_TH = (level_TGE * tensors["scale"][start:stop].float()[..., None]).flatten(1)
    return _with_outliers(wide_TH, tensors, start, stop)


BF16 = StateCodec(
    name="bf16",
    version=1,
    encode=lambda state_NH: {"data": state_NH.to(torch.bfloat16).contiguous()},
    decode=lambda tensors, start, stop: tensors["data"][start:stop],
    layout={"data": ("BF16", 2)},
)
INT8 = _scaled("int8", torch.int8, 127.0)
FP8 = _scaled("fp8", torch.float8_e4m3fn, 448.0)
INT4 = StateCodec(
    name="int4",
    version=1,
    encode=_encode_int4,
    decode=_decode_int4,
    layout={"data": ("U8", 3), "scale": ("BF16", 2), **_OUTLIER_LAYOUT},
    shared=("outliers",),
)
CODECS = {codec.name: codec for codec in (BF16, INT8, FP8, INT4)}


def codec_of(tag: Mapping[str, object], where: Path) -> StateCodec:
    """The codec that a store names. UserError for one that this version does not read; `where` is what names it."""
    codec = CODECS.get(str(tag.get("name")))
    if codec is None or codec.version != tag.get("version"):
        known = ", ".join(f"{c.name} {c.version}" for c in CODECS.values())
        raise UserError(
            f"{where} is stored as {tag.get('name')} {tag.get('version')}; this version reads {known}: "
            "use the version that wrote it, or make it anew with on_stale=redo"
        )
    return codec
