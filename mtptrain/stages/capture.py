"""The target's states, shard after shard: by transformers in packed forwards, or by an engine's prefill.

What is packed into one forward is a pure function of the shard. N tokens of a shard, T of a document, H hidden size.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mtptrain.config import Config, PrecomputeBackend, StoreConfig
from mtptrain.data.documents import Document
from mtptrain.data.packing import pack
from mtptrain.engines.process import require_engine
from mtptrain.engines.vllm import VllmCapturer, llm_arguments
from mtptrain.errors import UserError
from mtptrain.stages.parity import check_engine, check_packed
from mtptrain.store.codecs import CODECS, StateCodec
from mtptrain.store.format import Rejected
from mtptrain.target.model import capture_packed, load_model, pick_device, pick_dtype
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec

_LARGEST = 2.0**126
"""A factor of four below what bf16 holds, so that no codec's rounding overflows."""
Tick = Callable[[int], object]
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


def shard_states(model: PreTrainedModel, work: Work, batch_tokens: int, tick: Tick) -> tuple[dict[str, Tensor], list[Rejected]]:
    """As `StatesOf`; `tick` is told the tokens of each forward."""
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
        tick(sum(lengths[i] for i in batch))
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


StatesOf = Callable[[Work, Tick], tuple[dict[str, Tensor], list[Rejected]]]
"""bf16 states [N, H] of each capture of a shard, on the CPU, and the documents whose state is not finite (their rows are zeros)."""


Make = Callable[[Sequence[Work]], Iterator[tuple[Work, list[Rejected]]]]
"""Computes and writes shards; each comes with its rejected documents once it is written."""


def open_target(cfg: Config, sample: Sequence[Work], longest: int, folder: Path) -> AbstractContextManager[StatesOf]:
    """The target, as `precompute.backend` says, from here to the end of `with`. Its states of some of the sample's documents are compared
    with a plain forward's. `longest`: tokens of the longest document that will come. An engine works in `folder`.
    """
    target = resolve_target(cfg.target)
    dtype = pick_dtype(cfg.target.dtype, pick_device(cfg.device))
    if cfg.precompute.backend is PrecomputeBackend.vllm:
        return _engine(cfg, target, dtype, sample, longest, folder)
    return _transformers(cfg, target, dtype, sample)


@contextmanager
def _transformers(cfg: Config, target: Path, dtype: torch.dtype, sample: Sequence[Work]) -> Iterator[StatesOf]:
    model = load_model(target, dtype, pick_device(cfg.device), cfg.target.trust_remote_code)
    batch, count = cfg.precompute.batch_tokens, cfg.precompute.parity_documents
    if batch > 1 and count and (captures := _captures(sample)):
        check_packed(model, target, [d for w in sample for d in w.documents], captures, batch, count)
    held = [model]  # who was given the function below may keep it
    del model
    yield lambda work, tick: shard_states(held[0], work, batch, tick)
    held.clear()
    gc.collect()  # transformers' modules refer to each other in cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _engine(cfg: Config, target: Path, dtype: torch.dtype, sample: Sequence[Work], longest: int, folder: Path) -> Iterator[StatesOf]:
    engine = require_engine(cfg, "precompute.backend=vllm")
    arguments = llm_arguments(cfg, target, read_spec(target), longest, eager=True)
    arguments["max_num_batched_tokens"] = max(cfg.precompute.batch_tokens, arguments["max_num_seqs"])
    capturer = VllmCapturer(cfg, engine, folder, arguments, _captures(sample))
    compared = not cfg.precompute.parity_documents

    def states_of(work: Work, tick: Tick) -> tuple[dict[str, Tensor], list[Rejected]]:
        nonlocal compared
        found = capturer.states([d.tokens for d in work.documents])
        documents = _split({c: found[c] for c in work.captures}, [len(d.tokens) for d in work.documents])
        if not compared:
            compared = True
            _compare(cfg, target, dtype, work, documents)
        rejected = []
        start = 0
        for document, states in zip(work.documents, documents, strict=True):
            if bad := _not_finite(states):
                rejected += [Rejected(id=document.id, start=start, capture=c, reason=r) for c, r in bad.items()]
                for state_TH in states.values():
                    state_TH.zero_()
            start += len(document.tokens)
        tick(work.tokens)
        return {c: found[c] for c in work.captures}, rejected

    failed = True
    try:
        yield states_of
        failed = False
    finally:
        capturer.close(failed)


def _captures(work: Sequence[Work]) -> list[str]:
    return sorted({c for w in work for c in w.captures})


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
