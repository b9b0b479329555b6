"""Precompute on Ray: each worker holds the target, or an engine, and computes and writes whole shards; the driver only hands them out.

A shard's batches and bytes depend on nothing but the shard, so the store is the one that a single process with as many threads makes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from mtptrain.config import Config, PrecomputeBackend
from mtptrain.pool import Pool, resources, spread_config
from mtptrain.stages.capture import Make, StatesOf, Work, codecs, open_target
from mtptrain.store.format import Rejected, read_sidecar
from mtptrain.store.writer import StoreWriter
from mtptrain.target.model import set_threads


@contextmanager
def open_workers(cfg: Config, writer: StoreWriter, longest: int) -> Iterator[Make]:
    """Workers that make shards, from here to the end of `with`. Raises UserError."""
    by_vllm = cfg.precompute.backend is PrecomputeBackend.vllm
    cpus, gpus = resources(cfg, gpus=cfg.engine.tensor_parallel if by_vllm else 1)
    with Pool(cfg.ray, partial(_Worker, spread_config(cfg), writer.fingerprint, longest), cpus, gpus) as pool:
        yield pool.run


class _Worker:
    """Computes and writes shards, and returns the rejected documents of each."""

    def __init__(self, cfg: Config, fingerprint: str, longest: int, number: int) -> None:
        set_threads(max(1, cfg.threads))
        self._cfg, self._longest, self._number = cfg, longest, number
        self._writer = StoreWriter(cfg.store_dir, fingerprint, *codecs(cfg.store))
        self._open = ExitStack()
        self._states_of: StatesOf | None = None

    def __call__(self, work: Work) -> list[Rejected]:
        if self._writer.missing(work.shard, work.captures)[0]:  # a worker that died may have written it
            states, rejected = self._target(work)(work, _silent) if work.captures else ({}, [])
            self._writer.write(work.shard, work.documents, states, rejected)
        return read_sidecar(self._writer.folder, work.shard, self._writer.fingerprint).rejected

    def _target(self, work: Work) -> StatesOf:
        """One worker's is compared with a plain forward."""
        if self._states_of is None:
            folder = self._cfg.store_dir / f"engine-{self._number}"
            parity = self._cfg.precompute if self._number == 0 else replace(self._cfg.precompute, parity_documents=0)
            opened = open_target(replace(self._cfg, precompute=parity), [work], self._longest, folder)
            self._states_of = self._open.enter_context(opened)
        return self._states_of


def _silent(tokens: int) -> None:
    """The driver counts whole shards."""
