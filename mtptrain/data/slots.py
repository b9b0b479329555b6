"""Attention over running sequences, for a transformers decoder whose batch is one packed row of tokens.

A forward's tokens are [decode token of slot 0 .. D-1 | new prompt of slot D | new prompt of slot D+1 | ...], with no
padding. Linear layers see them all at once; here keys and values go into pre-allocated buffers with one row a slot,
and each token attends to its own slot only. The masks HF models prepare do not know slots, so none is asked for: the
attention function below is registered beside HF's own (like its flash path, it gets `sliding_window` and `softcap`
from the model's layer) and the `Slots` object travels to it as a keyword argument of the model's forward.

Legend: D decoding slots, T tokens of a forward, S slots, L cached positions, N query heads, G query heads a KV head,
K KV heads, E head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from mtptrain.errors import UserError

_NAME = "mtptrain_slots"
_WORTH_GROWING = 1.25
_GROUP_ON_CPU = 16  # a CPU is bound by reading keys and values, so groups of similar slots read less; a GPU by its launches
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class Segment:
    """Tokens start..stop of a forward: the not yet cached end of a prompt whose first `cached` positions are cached."""

    slot: int
    start: int
    stop: int
    cached: int

    @property
    def length(self) -> int:
        return self.cached + self.stop - self.start


@dataclass(slots=True)
class Group:
    """Decoding slots start..stop, attended together over the first `longest` positions."""

    start: int
    stop: int
    longest: int


class Slots:
    """Keys and values of all running sequences, and what the current forward holds.

    Each layer has two buffers [S, K, L, E], sized by `reserve`; what a slot does not use is masked. `prefix` positions
    common to all prompts are computed once and copied into each new slot.
    """

    def __init__(self) -> None:
        self.prefix = 0
        self._prefix_kv: dict[int, tuple[Tensor, Tensor]] = {}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = self._capacity = 0
        self._masks: dict[tuple[str, int, int | None], Tensor] = {}
        self.decoding: list[int] = []
        self.segments: list[Segment] = []
        self.groups: list[Group] = []

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` slots of `length` positions. A little more room than there is is not worth a copy of everything."""
        if rows > self.rows * _WORTH_GROWING or length > self._capacity:
            self.rows, self._capacity = max(rows, self.rows), length
            for layer, (keys, values) in self._kv.items():
                self._kv[layer] = (self._resized(keys), self._resized(values))

    def begin(self, decoding: list[int], segments: list[Segment], device: torch.device) -> None:
        """Announce the next forward: `decoding[i]` is the number of positions slot i has cached before its token."""
        self.decoding, self.segments = decoding, segments
        self._masks.clear()
        self._slots_D = torch.arange(len(decoding), device=device)
        self._cached_D = torch.tensor(decoding, dtype=torch.long, device=device)
        size = _GROUP_ON_CPU if device.type == "cpu" else max(len(decoding), 1)
        starts = range(0, len(decoding), size)
        self.groups = [Group(i, min(i + size, len(decoding)), max(decoding[i : i + size]) + 1) for i in starts]
        for segment in segments:
            if segment.cached:
                for layer, buffers in self._kv.items():
                    for buffer, prefix in zip(buffers, self._prefix_kv[layer], strict=True):
                        buffer[segment.slot, :, : segment.cached] = prefix

    def keep_prefix(self, length: int) -> None:
        """Keep the first `length` positions of slot 0 as the prefix of every later prompt."""
        self.prefix = length
        self._prefix_kv = {layer: (k[0, :, :length].clone(), v[0, :, :length].clone()) for layer, (k, v) in self._kv.items()}

    def move(self, source: int, target: int, length: int) -> None:
        """Copy `length` positions of slot `source` over slot `target`."""
        for buffers in self._kv.values():
            for buffer in buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def buffers(self, layer: int, key_KTE: Tensor, value_KTE: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's buffers after this forward's keys and values were written into them."""
        if layer not in self._kv:
            self._kv[layer] = (self._empty(key_KTE), self._empty(value_KTE))
        for buffer, new_KTE in zip(self._kv[layer], (key_KTE, value_KTE), strict=True):
            if self.decoding:
                buffer[self._slots_D, :, self._cached_D] = new_KTE[:, : len(self.decoding)].transpose(0, 1)
            for segment in self.segments:
                buffer[segment.slot, :, segment.cached : segment.length] = new_KTE[:, segment.start : segment.stop]
        return self._kv[layer]

    def decode_mask(self, group: Group, window: int | None, like: Tensor) -> Tensor:
        """Additive mask [D, 1, 1, L] of a group: a slot's token sees its own positions, at most `window` of them."""
        position_D1 = self._cached_D[group.start : group.stop, None]
        return self._mask(("decode", group.start, window), position_D1, group.longest, like)[:, None, None]

    def prompt_mask(self, segment: Segment, window: int | None, like: Tensor) -> Tensor:
        """Additive causal mask [T, L] of a new prompt's tokens over its slot's positions."""
        position_T1 = torch.arange(segment.cached, segment.length, device=like.device)[:, None]
        return self._mask(("prompt", segment.slot, window), position_T1, segment.length, like)

    def _mask(self, key: tuple[str, int, int | None], position_Q1: Tensor, length: int, like: Tensor) -> Tensor:
        if key not in self._masks:
            window = key[2]
            seen_L = torch.arange(length, device=like.device)
            hidden = seen_L > position_Q1
            if window is not None:
                hidden |= seen_L <= position_Q1 - window
            self._masks[key] = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
        return self._masks[key]

    def _empty(self, like_KTE: Tensor) -> Tensor:
        """Zeros, not garbage: a masked position has weight 0, and 0 times NaN is NaN."""
        return like_KTE.new_zeros(self.rows, like_KTE.shape[0], self._capacity, like_KTE.shape[2])

    def _resized(self, buffer_SKLE: Tensor) -> Tensor:
        rows, heads, length, size = buffer_SKLE.shape
        bigger = buffer_SKLE.new_zeros(self.rows, heads, self._capacity, size)
        rows, length = min(rows, self.rows), min(length, self._capacity)
        bigger[:rows, :, :length] = buffer_SKLE[:rows, :, :length]
        return bigger


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """softmax(cap(q k^T scale) + mask) v. For one token a slot, batched matmuls beat the fused kernel: no copy of keys per query head."""
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.matmul(torch.softmax(scores.add_(mask), -1, dtype=torch.float32).to(v.dtype), v)


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slots: Slots | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """HF attention interface. `query` [1, N, T, E], `key` and `value` [1, K, T, E]; returns [1, T, N, E]."""
    if slots is None or s_aux is not None or position_bias is not None:
        raise UserError(f"target.path: {type(module).__name__} has attention (sinks or a position bias) that the hf response backend lacks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads = query.shape[1], key.shape[1]
    keys_SKLE, values_SKLE = slots.buffers(int(module.layer_idx), key[0], value[0])  # type: ignore[arg-type]
    out_TNE = query.new_empty(query.shape[2], heads, values_SKLE.shape[-1])
    decoding = len(slots.decoding)
    query_DKGE = query[0, :, :decoding].transpose(0, 1).reshape(decoding, kv_heads, heads // kv_heads, query.shape[-1])
    for g in slots.groups:
        k, v = keys_SKLE[g.start : g.stop, :, : g.longest], values_SKLE[g.start : g.stop, :, : g.longest]
        mask_D11L = slots.decode_mask(g, sliding_window, query)
        out_TNE[g.start : g.stop] = _attend(query_DKGE[g.start : g.stop], k, v, mask_D11L, scale, softcap).flatten(1, 2)
    for s in slots.segments:
        query_1NTE = query[:, :, s.start : s.stop]
        k, v = keys_SKLE[s.slot, None, :, : s.length], values_SKLE[s.slot, None, :, : s.length]
        mask_TL = slots.prompt_mask(s, sliding_window, query)
        if softcap is None:
            out_1NTE = F.scaled_dot_product_attention(query_1NTE, k, v, mask_TL, scale=scale, enable_gqa=True)
        else:
            query_1KGTE = query_1NTE.unflatten(1, (kv_heads, -1))
            out_1NTE = _attend(query_1KGTE, k[:, :, None], v[:, :, None], mask_TL, scale, softcap).flatten(1, 2)
        out_TNE[s.start : s.stop] = out_1NTE[0].transpose(0, 1)
    return out_TNE[None], None


AttentionInterface.register(_NAME, _slot_attention)


def require_supported(model: PreTrainedModel) -> None:
    """Refuse, in one line, a model whose layers are not plain or sliding-window attention."""
    config = model.config.get_text_config(decoder=True)
    other = sorted(set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES)
    if other or not model._supports_attention_backend or getattr(config, "num_kv_shared_layers", None):
        what = f"layers of type {', '.join(other)}" if other else "an attention of its own"
        raise UserError(f"target.path: {config.model_type} has {what}, which the hf response backend lacks; use data.responses.mode=keep")


@contextmanager
def slot_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within this block the model's attention runs over slots; its own is put back afterwards."""
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
