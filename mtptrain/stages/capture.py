"""The target's states, shard after shard: by transformers in packed forwards, or by an engine's prefill.

What is packed into one forward is a pure function of the shard. N tokens of a shard, T of a document, H hidden size.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from mtptrain.config import Config, StoreConfig
from mtptrain.data.documents import Document
from mtptrain.data.packing import pack
from mtptrain.engines.process import require_engine
from mtptrain.engines.vllm import capture_states, llm_arguments
from mtptrain.errors import UserError
from mtptrain.stages.parity import check_engine, check_packed
from mtptrain.store.codecs import CODECS, StateCodec
from mtptrain.store.format import Rejected
from mtptrain.target.model import capture_packed, load_model, pick_device
from mtptrain.target.spec import read_spec

_LARGEST = 2.0**126
"""A factor of four below what bf16 holds, so that no codec's rounding overflows."""
_GIVE_UP_AFTER = 64
"""Documents all rejected so far that make it pointless to go on."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one shard still needs. No captures: only its tokens."""

    shard: int
    documents: list[Document]
    captures: list[str]

    @property
    def tokens(self) -> int:
        return sum(len(d.tokens) for d in self.documents)


def codecs(store: StoreConfig) -> tuple[StateCodec, StateCodec]:
    """Of `final` and of the other captures."""
    return CODECS[store.codec.name], CODECS[(store.aux_codec or store.codec).name]


def shard_states(
    model: PreTrainedModel, work: Work, batch_tokens: int, bar: "tqdm[Any] | None" = None
) -> tuple[dict[str, Tensor], list[Rejected]]:
    """bf16 states [N, H] of each missing capture, on the CPU, and the documents whose state is not finite (their rows are zeros)."""
    lengths = [len(d.tokens) for d in work.documents]
    starts = [0, *accumulate(lengths)]
    states: dict[str, Tensor] = {}
    rejected: dict[int, list[Rejected]] = {}
    for batch in pack(lengths, batch_tokens) if work.captures else []:
        found = _forward(model, [work.documents[i].tokens for i in batch], work.captures)
        for i, state in zip(batch, found, strict=True):
            if _not_finite(state) and len(batch) > 1:  # a NaN spreads through attention masks: ask that document alone
                state = _forward(model, [work.documents[i].tokens], work.captures)[0]
            rows = slice(starts[i], starts[i] + lengths[i])
            bad = _not_finite(state)
            if bad:
                rejected[i] = [Rejected(id=work.documents[i].id, start=starts[i], capture=c, reason=r) for c, r in bad.items()]
            for capture, state_TH in state.items():
                if capture not in states:
                    states[capture] = torch.zeros(work.tokens, state_TH.shape[1], dtype=torch.bfloat16)
                if not bad:
                    states[capture][rows] = state_TH
        if bar is not None:
            bar.update(sum(lengths[i] for i in batch))
    return states, [r for i in sorted(rejected) for r in rejected[i]]


def _forward(model: PreTrainedModel, tokens: list[list[int]], captures: list[str]) -> list[dict[str, Tensor]]:
    """States of each document, bf16 [T, H] on the CPU, from one packed forward."""
    packed = capture_packed(model, tokens, captures)
    lengths = [len(t) for t in tokens]
    split = {capture: packed[capture].to("cpu", torch.bfloat16).split(lengths) for capture in captures}
    return [{capture: split[capture][i] for capture in captures} for i in range(len(tokens))]


def _not_finite(state: dict[str, Tensor]) -> dict[str, str]:
    """Captures that hold NaN or Inf (as stored: a value that overflows bf16, or nearly, counts), with the word for it."""
    bad = {capture: state_TH for capture, state_TH in state.items() if not state_TH.abs().amax() < _LARGEST}  # NaN is not less
    return {capture: "NaN" if torch.isnan(state_TH).any() else "Inf" for capture, state_TH in bad.items()}


Computed = Iterator[tuple[Work | None, dict[str, Tensor], list[Rejected]]]
"""Shards with their states; first a None once the target is loaded."""
_LOADED: tuple[None, dict[str, Tensor], list[Rejected]] = (None, {}, [])


def load_checked(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work]) -> PreTrainedModel:
    """The target, whose packed forward was compared with the plain one on some of the documents."""
    model = load_model(target, dtype, pick_device(cfg.device), cfg.target.trust_remote_code)
    batch, count = cfg.precompute.batch_tokens, cfg.precompute.parity_documents
    if batch > 1 and count and (captures := sorted({c for w in work for c in w.captures})):
        check_packed(model, target, [d for w in work for d in w.documents], captures, batch, count)
    return model


def by_transformers(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work], bar: "tqdm[Any]") -> Computed:
    model = load_checked(cfg, target, dtype, work)
    yield _LOADED
    for item in work:
        yield item, *shard_states(model, item, cfg.precompute.batch_tokens, bar)
    del model
    gc.collect()  # transformers' modules refer to each other in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def by_engine(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work], folder: Path) -> Computed:
    """States from the engine's own prefill, at work in `folder`; the first shard is compared with transformers' forward."""
    engine = require_engine(cfg, "precompute.backend=vllm")
    captures = sorted({c for w in work for c in w.captures})
    asked = {w.shard: w for w in work if w.captures}
    longest = max((len(d.tokens) for w in work for d in w.documents), default=1)
    arguments = llm_arguments(cfg, target, read_spec(target), longest, eager=True)
    arguments["max_num_batched_tokens"] = max(cfg.precompute.batch_tokens, arguments["max_num_seqs"])
    shards = ((w.shard, [d.tokens for d in w.documents]) for w in asked.values())
    first = True
    for shard, found in capture_states(cfg, engine, folder, arguments, shards, captures) if asked else ():
        if shard is None:
            yield _LOADED
            continue
        item = asked[shard]
        documents = _split({c: found[c] for c in item.captures}, [len(d.tokens) for d in item.documents])
        if first and cfg.precompute.parity_documents:
            _compare(cfg, target, dtype, item, documents)
        first = False
        rejected = []
        start = 0
        for document, states in zip(item.documents, documents, strict=True):
            if bad := _not_finite(states):
                rejected += [Rejected(id=document.id, start=start, capture=c, reason=r) for c, r in bad.items()]
                for state_TH in states.values():
                    state_TH.zero_()
            start += len(document.tokens)
        yield item, {c: found[c] for c in item.captures}, rejected
    for item in work:
        if not item.captures:
            yield item, {}, []


def _split(states: dict[str, Tensor], lengths: list[int]) -> list[dict[str, Tensor]]:
    """Views of a shard's states, one dict a document."""
    parts = {c: state.split(lengths) for c, state in states.items()}
    return [{c: parts[c][i] for c in states} for i in range(len(lengths))]


def _compare(cfg: Config, target: Path, dtype: torch.dtype, item: Work, documents: list[dict[str, Tensor]]) -> None:
    finite = [i for i, states in enumerate(documents) if not _not_finite(states)][: cfg.precompute.parity_documents]
    if not finite:
        print("precompute: parity not measured, the states of the first documents are not finite", flush=True)
        return
    model = load_model(target, dtype, pick_device(cfg.device), cfg.target.trust_remote_code)
    check_engine(model, target, [item.documents[i] for i in finite], [documents[i] for i in finite], item.captures)
    del model
    gc.collect()


@dataclass(slots=True)
class Lost:
    """Counts rejected documents, and gives up where every one of the first is."""

    seen: int = 0
    lost: int = 0

    def count(self, work: Work, rejected: list[Rejected]) -> None:
        self.seen, self.lost = self.seen + len(work.documents), self.lost + len({r.start for r in rejected})
        if self.lost == self.seen >= _GIVE_UP_AFTER:
            raise all_rejected(self.seen, rejected[0])


def all_rejected(count: int, first: Rejected) -> UserError:
    return UserError(
        f"the target's states are not finite in all of the first {count} documents ({first.reason} in `{first.capture}` of {first.id}); "
        "check the target's weights, or use target.dtype=float32 with on_stale=redo"
    )
