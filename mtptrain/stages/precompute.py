"""The precompute stage: one forward of the target over every document, its hidden states into the store.

A shard is the unit of work and of resume; what is packed into one forward is a pure function of the shard, so a resumed store has the
same bytes as one made in a single go. A shard is written while the next one is computed.

N tokens of a shard, T of a document, H hidden size, V vocabulary.
"""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mtptrain import manifest
from mtptrain.config import Codec, Config, Executor, PrecomputeBackend, StoreConfig
from mtptrain.config_io import config_yaml
from mtptrain.data.documents import FILE, HELD_OUT, Document, check_documents, read_documents
from mtptrain.engines.process import Engine, engine_inputs, require_engine
from mtptrain.errors import UserError
from mtptrain.files import hash_file, hash_json, write_text
from mtptrain.sizes import stored_bytes_per_token
from mtptrain.stages.capture import Lost, Make, StatesOf, Tick, Work, all_rejected, codecs, open_target
from mtptrain.stages.context import wanted_captures
from mtptrain.store.codec_bytes import GROUP
from mtptrain.store.format import ONLINE, TOKENS, VERSION, Rejected, parts_kept, read_sidecar, shards_of
from mtptrain.store.writer import StoreWriter
from mtptrain.target.ends import weights_hash
from mtptrain.target.model import pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import TargetSpec, read_spec
from mtptrain.target.tokenizer import tokenizer_hash

REJECTS = "rejects.jsonl"


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
    work = plan_work(writer, documents, shards, wanted, inputs)
    if complete and not work and captures == wanted:
        print(f"precompute: {cfg.store_dir} is complete", flush=True)
        return
    _check_disk(cfg, work, spec)
    manifest.begin(cfg.store_dir, inputs)
    seconds = _compute(cfg, writer, work) if work else 0.0
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
        **({ONLINE: True} if cfg.train.online else {}),
    }


def plan_work(
    writer: StoreWriter, documents: list[Document], shards: list[range], captures: list[str], inputs: dict[str, Any]
) -> list[Work]:
    """The shards that lack a part, or whose part is damaged (which is said). `inputs`: of the store."""
    work = []
    for shard, members in enumerate(shards):
        kept = parts_kept(inputs, documents[members[0]].split, captures)[1:]
        missing, damage = writer.missing(shard, kept)
        if damage:
            print(f"precompute: making anew: {damage}", flush=True)
        if missing:
            work.append(Work(shard=shard, documents=[documents[i] for i in members], captures=[c for c in kept if c in missing]))
    return work


def _compute(cfg: Config, writer: StoreWriter, work: list[Work]) -> float:
    """Make all of `work`; returns the seconds this took, without loading the target here."""
    total, lost = sum(w.tokens for w in work if w.captures), Lost()
    longest = max(len(d.tokens) for w in work for d in w.documents)
    bar = tqdm(total=total, desc="precompute", unit="tok", unit_scale=True, mininterval=1)
    with bar, open_maker(cfg, writer, work, longest, bar.update) as make:
        began = time.monotonic()
        for item, rejected in make(work):
            lost.count(item, rejected)
    return time.monotonic() - began


@contextmanager
def open_maker(cfg: Config, writer: StoreWriter, sample: list[Work], longest: int, tick: Tick) -> Iterator[Make]:
    """What makes and writes shards, here or on Ray, with the target loaded once, from here to the end of `with`.

    `sample`: some of the work that will come; `longest`: tokens of its longest document; `tick` is told the tokens done.
    """
    if cfg.precompute.executor is Executor.ray:
        from mtptrain.stages import precompute_ray

        with precompute_ray.open_workers(cfg, writer, longest) as make:
            yield partial(_counted, make, tick)
        return
    with ExitStack() as target:
        states_of = None
        if any(w.captures for w in sample):
            states_of = target.enter_context(open_target(cfg, [w for w in sample if w.captures], longest, cfg.store_dir / "engine"))
        yield partial(_make, writer, states_of, tick)


def _counted(make: Make, tick: Tick, work: Sequence[Work]) -> Iterator[tuple[Work, list[Rejected]]]:
    for item, rejected in make(work):
        tick(item.tokens if item.captures else 0)
        yield item, rejected


def _make(writer: StoreWriter, states_of: StatesOf | None, tick: Tick, work: Sequence[Work]) -> Iterator[tuple[Work, list[Rejected]]]:
    """A shard is written while the next one is computed."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending: tuple[Work, list[Rejected], Future[None]] | None = None
        for item in work:
            states, rejected = states_of(item, tick) if states_of and item.captures else ({}, [])
            if pending is not None:
                pending[2].result()
                yield pending[:2]
            pending = item, rejected, pool.submit(writer.write, item.shard, item.documents, states, rejected)
        if pending is not None:
            pending[2].result()
            yield pending[:2]


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


def _summarise(folder: Path, writer: StoreWriter, shards: int, captures: list[str], hidden_size: int) -> dict[str, Any]:
    """Read the sidecars back, list the rejected documents in `REJECTS`, and return the manifest's results."""
    sidecars = [read_sidecar(folder, shard, writer.fingerprint) for shard in range(shards)]
    entries = [entry for sidecar in sidecars for entry in sidecar.entries()]
    rows = [{"id": r.id, "shard": s.shard, "capture": r.capture, "reason": r.reason} for s in sidecars for r in s.rejected]
    write_text(folder / REJECTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    documents = sum(len(s.documents) for s in sidecars)
    if not entries:
        raise all_rejected(documents, sidecars[0].rejected[0])
    return {
        "captures": writer.made(captures),
        "hidden_size": hidden_size,
        "shards": shards,
        "documents": len(entries),
        "rejected": documents - len(entries),
        "tokens": sum(entry.length for entry in entries),
        "bytes": sum(s.files[part].bytes for s in sidecars for part in [TOKENS, *captures] if part in s.files),
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
