"""Precompute on Ray: each worker holds the target, or an engine, and computes and writes whole shards; the driver only hands them out.

A shard's batches and bytes depend on nothing but the shard, so the store is the one that a single process with as many threads makes.
"""

import time
from functools import partial
from typing import Any

from tqdm import tqdm

from mtptrain.config import Config, PrecomputeBackend
from mtptrain.pool import Pool, chunks, resources, spread_config
from mtptrain.stages.capture import Lost, Work, by_engine, codecs, load_checked, shard_states
from mtptrain.store.format import Rejected, read_sidecar
from mtptrain.store.writer import StoreWriter
from mtptrain.target.model import pick_device, pick_dtype, set_threads
from mtptrain.target.resolve import resolve_target

_ENGINE_STARTS = 2
"""Of each worker: an engine is given a list of shards when it starts."""


def compute(cfg: Config, writer: StoreWriter, work: list[Work]) -> float:
    """Make all of `work`; returns the seconds it took, loading included. Raises UserError."""
    by_vllm = cfg.precompute.backend is PrecomputeBackend.vllm
    size = -(-len(work) // (cfg.ray.workers * _ENGINE_STARTS)) if by_vllm else 1
    cpus, gpus = resources(cfg, gpus=cfg.engine.tensor_parallel if by_vllm else 1)
    make = partial(_Worker, spread_config(cfg), writer.fingerprint)
    began, lost = time.monotonic(), Lost()
    total = sum(w.tokens for w in work if w.captures)
    with Pool(cfg.ray, make, cpus, gpus) as pool, tqdm(total=total, desc="precompute", unit="tok", unit_scale=True, mininterval=1) as bar:
        for shards, rejected in pool.run(chunks(work, size)):
            bar.update(sum(w.tokens for w in shards if w.captures))
            for item, of_item in zip(shards, rejected, strict=True):
                lost.count(item, of_item)
    return time.monotonic() - began


class _Worker:
    """Computes and writes shards, and returns the rejected documents of each."""

    def __init__(self, cfg: Config, fingerprint: str, number: int) -> None:
        set_threads(max(1, cfg.threads))
        self._cfg, self._number, self._target = cfg, number, resolve_target(cfg.target)
        self._dtype = pick_dtype(cfg.target.dtype, pick_device(cfg.device))
        self._writer = StoreWriter(cfg.store_dir, fingerprint, *codecs(cfg.store))
        self._model: Any = None

    def __call__(self, work: list[Work]) -> list[list[Rejected]]:
        left = [w for w in work if self._writer.missing(w.shard, w.captures)[0]]  # a worker that died had written some
        if self._cfg.precompute.backend is PrecomputeBackend.vllm:
            self._by_engine(left)
        else:
            self._by_transformers(left)
        return [read_sidecar(self._writer.folder, w.shard, self._writer.fingerprint).rejected for w in work]

    def _by_transformers(self, work: list[Work]) -> None:
        if self._model is None and any(w.captures for w in work):
            self._model = load_checked(self._cfg, self._target, self._dtype, work if self._number == 0 else [])
        for item in work:
            states, rejected = shard_states(self._model, item, self._cfg.precompute.batch_tokens)
            self._writer.write(item.shard, item.documents, states, rejected)

    def _by_engine(self, work: list[Work]) -> None:
        folder = self._cfg.store_dir / f"engine-{self._number}"
        for item, states, rejected in by_engine(self._cfg, self._target, self._dtype, work, folder):
            if item is not None:
                self._writer.write(item.shard, item.documents, states, rejected)
