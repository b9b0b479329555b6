"""The precompute stage: one forward of the target over every document, its hidden states into the store.

A shard is the unit of work and of resume; what is packed into one forward is a pure function of the shard, so a resumed store has the
same bytes as one made in a single go. A shard is written while the next one is computed.

N tokens of a shard, T of a document, H hidden size, V vocabulary.
"""

import gc
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from mtptrain import manifest
from mtptrain.config import Codec, Config, Executor, PrecomputeBackend, StoreConfig
from mtptrain.config_io import config_yaml
from mtptrain.data.documents import FILE, HELD_OUT, Document, check_documents, read_documents
from mtptrain.data.packing import pack
from mtptrain.engines.process import Engine, engine_inputs, require_engine
from mtptrain.engines.vllm import capture_states, llm_arguments
from mtptrain.errors import UserError
from mtptrain.files import hash_file, hash_json, write_text
from mtptrain.sizes import stored_bytes_per_token
from mtptrain.stages.context import wanted_captures
from mtptrain.stages.parity import check_engine, check_packed
from mtptrain.store.codec_bytes import GROUP
from mtptrain.store.codecs import CODECS, StateCodec
from mtptrain.store.format import TOKENS, VERSION, Rejected, read_sidecar, shards_of
from mtptrain.store.writer import StoreWriter
from mtptrain.target.ends import weights_hash
from mtptrain.target.model import capture_packed, load_model, pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec, read_spec
from mtptrain.target.tokenizer import tokenizer_hash

REJECTS = "rejects.jsonl"
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


def run(cfg: Config) -> None:
    """Make, resume, mend or extend the store in `cfg.store_dir`. Raises UserError."""
    prepared = manifest.require(cfg.data_dir, "the prepared data", "python -m mtptrain.prepare (with the same arguments)")
    check_documents(cfg.data_dir, prepared["results"])
    target = resolve_target(cfg.target)
    spec = read_spec(target)
    _check_captures(cfg.precompute.captures, spec)
    _check_codecs(cfg, spec)
    asked = list(dict.fromkeys([*cfg.precompute.captures, *wanted_captures(cfg, spec)]))
    set_threads(cfg.threads)
    dtype = pick_dtype(cfg.target.dtype, pick_device(cfg.device))
    engine = require_engine(cfg, "precompute.backend=vllm") if cfg.precompute.backend is PrecomputeBackend.vllm else None
    inputs = store_inputs(cfg, target, dtype, engine)
    complete = manifest.is_complete(cfg.store_dir, inputs, cfg.on_stale)
    captures = _captures_in(cfg.store_dir) if complete else []
    wanted = captures + [c for c in asked if c not in captures]
    documents = read_documents(cfg.data_dir)
    if not documents:
        raise UserError(f"{cfg.data_dir / FILE} holds no documents; prepare again with more data")
    if complete:
        inputs = manifest.require(cfg.store_dir, "", "")["inputs"]
    writer = StoreWriter(cfg.store_dir, hash_json(inputs), *codecs(cfg.store))
    shards = shards_of(inputs, documents, cfg.store.shard_tokens)
    work = plan_work(writer, documents, shards, wanted)
    if complete and not work and captures == wanted:
        print(f"precompute: {cfg.store_dir} is complete", flush=True)
        return
    _check_disk(cfg, work, spec)
    manifest.begin(cfg.store_dir, inputs)
    seconds = _compute(cfg, target, dtype, writer, work) if work else 0.0
    results = _summarise(cfg.store_dir, writer, len(shards), wanted, spec.hidden_size)
    write_text(cfg.store_dir / "config.yaml", config_yaml(cfg))
    manifest.finish(cfg.store_dir, inputs, results)
    _print_summary(cfg.store_dir, results, sum(w.tokens for w in work if w.captures), seconds)


def store_inputs(cfg: Config, target: Path, dtype: torch.dtype, engine: Engine | None) -> dict[str, Any]:
    """Everything that determines the store's bytes, except which captures it holds: those are kept per capture."""
    codec, aux_codec = codecs(cfg.store)
    return {
        "target": weights_hash(target),
        "tokenizer": tokenizer_hash(target),
        "documents": hash_file(cfg.data_dir / FILE),
        "dtype": str(dtype).removeprefix("torch."),
        "store.codec": codec.tag,
        "store.aux_codec": aux_codec.tag,
        "store.shard_tokens": cfg.store.shard_tokens,
        "precompute.batch_tokens": cfg.precompute.batch_tokens,
        "precompute.backend": cfg.precompute.backend.name,
        "engine": engine and engine_inputs(cfg, engine),
        "store_format": VERSION,
    }


def codecs(store: StoreConfig) -> tuple[StateCodec, StateCodec]:
    """Of `final` and of the other captures."""
    return CODECS[store.codec.name], CODECS[(store.aux_codec or store.codec).name]


def plan_work(writer: StoreWriter, documents: list[Document], shards: list[range], captures: list[str]) -> list[Work]:
    """The shards that lack a part, or whose part is damaged (which is said)."""
    work = []
    for shard, members in enumerate(shards):
        missing, damage = writer.missing(shard, captures)
        if damage:
            print(f"precompute: making anew: {damage}", flush=True)
        if missing:
            work.append(Work(shard=shard, documents=[documents[i] for i in members], captures=[c for c in captures if c in missing]))
    return work


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


@dataclass(slots=True)
class Lost:
    """Counts rejected documents, and gives up where every one of the first is."""

    seen: int = 0
    lost: int = 0

    def count(self, work: Work, rejected: list[Rejected]) -> None:
        self.seen, self.lost = self.seen + len(work.documents), self.lost + len({r.start for r in rejected})
        if self.lost == self.seen >= _GIVE_UP_AFTER:
            raise _all_rejected(self.seen, rejected[0])


def _compute(cfg: Config, target: Path, dtype: torch.dtype, writer: StoreWriter, work: list[Work]) -> float:
    """Forward and write; a shard is written while the next is computed. Returns the seconds this took, without loading the model."""
    if cfg.precompute.executor is Executor.ray:
        from mtptrain.stages import precompute_ray

        return precompute_ray.compute(cfg, writer, work)
    total = sum(w.tokens for w in work if w.captures)
    began, lost = time.monotonic(), Lost()
    pending: Future[None] | None = None
    with ThreadPoolExecutor(max_workers=1) as pool, tqdm(total=total, desc="precompute", unit="tok", unit_scale=True, mininterval=1) as bar:
        for item, states, rejected in _computed(cfg, target, dtype, work, bar):
            if item is None:
                began = time.monotonic()
                continue
            if pending is not None:
                pending.result()
            pending = pool.submit(writer.write, item.shard, item.documents, states, rejected)
            lost.count(item, rejected)
        if pending is not None:
            pending.result()
    return time.monotonic() - began


Computed = Iterator[tuple[Work | None, dict[str, Tensor], list[Rejected]]]
"""Shards with their states; first a None once the target is loaded."""
_LOADED: tuple[None, dict[str, Tensor], list[Rejected]] = (None, {}, [])


def _computed(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work], bar: "tqdm[Any]") -> Computed:
    if cfg.precompute.backend is not PrecomputeBackend.vllm:
        yield from _by_transformers(cfg, target, dtype, work, bar)
        return
    for item, states, rejected in by_engine(cfg, target, dtype, work, cfg.store_dir / "engine"):
        bar.update(item.tokens if item and item.captures else 0)
        yield item, states, rejected


def load_checked(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work]) -> PreTrainedModel:
    """The target, whose packed forward was compared with the plain one on some of the documents."""
    model = load_model(target, dtype, pick_device(cfg.device), cfg.target.trust_remote_code)
    batch, count = cfg.precompute.batch_tokens, cfg.precompute.parity_documents
    if batch > 1 and count and (captures := sorted({c for w in work for c in w.captures})):
        check_packed(model, target, [d for w in work for d in w.documents], captures, batch, count)
    return model


def _by_transformers(cfg: Config, target: Path, dtype: torch.dtype, work: list[Work], bar: "tqdm[Any]") -> Computed:
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


def _captures_in(folder: Path) -> list[str]:
    found = manifest.require(folder, "the hidden-state store", "python -m mtptrain.precompute (with the same arguments)")
    return list(found["results"]["captures"])


def _check_captures(captures: list[str], spec: TargetSpec) -> None:
    for capture in captures:
        if capture != "final" and int(capture.removeprefix("after_")) >= spec.num_layers:
            raise UserError(
                f"precompute.captures={capture}: the target has {spec.num_layers} layers, so the last one is after_{spec.num_layers - 1}"
            )


def _check_codecs(cfg: Config, spec: TargetSpec) -> None:
    if Codec.int4 in (cfg.store.codec, cfg.store.aux_codec) and spec.hidden_size % GROUP:
        raise UserError(f"store.codec=int4: the target's hidden size, {spec.hidden_size}, is no multiple of {GROUP}; use int8")


def _check_disk(cfg: Config, work: list[Work], spec: TargetSpec) -> None:
    """Refuse to begin what the disk cannot hold."""
    exact = StoreConfig(codec=Codec.bf16)
    needed = sum(
        w.tokens * stored_bytes_per_token(exact if w.documents[0].split == HELD_OUT else cfg.store, w.captures, spec) for w in work
    )
    free = shutil.disk_usage(cfg.store_dir if cfg.store_dir.exists() else cfg.run_dir).free
    if needed > free:
        raise UserError(
            f"the store needs {needed / 1e9:,.2f} GB in {cfg.store_dir}, {free / 1e9:,.2f} GB are free; free space, set root= to a larger "
            "disk, or use fewer documents (data.limit) or precompute.captures"
        )


def _all_rejected(count: int, first: Rejected) -> UserError:
    return UserError(
        f"the target's states are not finite in all of the first {count} documents ({first.reason} in `{first.capture}` of {first.id}); "
        "check the target's weights, or use target.dtype=float32 with on_stale=redo"
    )


def _summarise(folder: Path, writer: StoreWriter, shards: int, captures: list[str], hidden_size: int) -> dict[str, Any]:
    """Read the sidecars back, list the rejected documents in `REJECTS`, and return the manifest's results."""
    sidecars = [read_sidecar(folder, shard, writer.fingerprint) for shard in range(shards)]
    entries = [entry for sidecar in sidecars for entry in sidecar.entries()]
    rows = [{"id": r.id, "shard": s.shard, "capture": r.capture, "reason": r.reason} for s in sidecars for r in s.rejected]
    write_text(folder / REJECTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    documents = sum(len(s.documents) for s in sidecars)
    if not entries:
        raise _all_rejected(documents, sidecars[0].rejected[0])
    return {
        "captures": writer.made(captures),
        "hidden_size": hidden_size,
        "shards": shards,
        "documents": len(entries),
        "rejected": documents - len(entries),
        "tokens": sum(entry.length for entry in entries),
        "bytes": sum(s.files[part].bytes for s in sidecars for part in [TOKENS, *captures]),
    }


def _print_summary(folder: Path, results: dict[str, Any], computed_tokens: int, seconds: float) -> None:
    if results["rejected"]:
        print(f"precompute: {results['rejected']} documents rejected (state not finite), listed in {folder / REJECTS}", flush=True)
    rate = f", computed {computed_tokens:,} at {computed_tokens / seconds:,.0f} tokens/s" if seconds else ""
    print(
        f"precompute: {results['tokens']:,} tokens of {results['documents']:,} documents, {results['bytes'] / 1e6:,.1f} MB in "
        f"{results['shards']} shards{rate} -> {folder}",
        flush=True,
    )
