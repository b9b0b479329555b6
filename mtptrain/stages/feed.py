"""Training while the target's states are computed: a process beside it keeps a window of the store's shards filled (store/ring.py).

The states are those of the store's own shards, computed as precompute computes them, so a head comes out as it does from a whole store
in the same order (`train.shuffle_shards`).
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from mtptrain import manifest
from mtptrain.config import Config, Device, Executor, PrecomputeBackend
from mtptrain.config_io import config_yaml, load_config
from mtptrain.data.documents import TRAIN, Document
from mtptrain.errors import UserError
from mtptrain.files import write_text
from mtptrain.ranks import ALONE, Ranks, end_with_parent, without_rank
from mtptrain.signals import noted
from mtptrain.stages.capture import Lost, Work, codecs
from mtptrain.stages.context import store_fingerprint, wanted_captures
from mtptrain.stages.precompute import open_maker
from mtptrain.store.format import FINAL, StoreDamage, read_sidecar
from mtptrain.store.reader import Store
from mtptrain.store.ring import FEED_CONFIG, FEED_LOG, Ring, Visits
from mtptrain.store.writer import StoreWriter, drop_states
from mtptrain.target.model import set_threads
from mtptrain.target.resolve import resolve_target
from mtptrain.target.spec import read_spec
from mtptrain.trainer import epochs_of

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0
"""Between looks at signals, while states are waited for."""
_APPEAR_SECONDS = 120.0
"""Until what one rank has seen is there for another, on a shared file system."""
_END_SECONDS = 30.0
_GROUPS = 2
"""Whose states are on disk: one is trained on, the next is computed."""


class Feed:
    """What training asks: `wait` before an update, `passed` after it. The first rank starts the feeder, which ends with `with`."""

    def __init__(self, cfg: Config, store: Store, documents: Sequence[int], captures: Sequence[str], ranks: Ranks = ALONE) -> None:
        self._cfg, self._store, self._captures, self._ranks = cfg, store, list(dict.fromkeys((FINAL, *captures))), ranks
        epochs = epochs_of(cfg.train, cfg.seed, store, documents)
        batches = sum(map(len, epochs))
        updates = min(cfg.train.max_updates or batches, -(-batches // cfg.train.accumulate))
        used = [[dict.fromkeys(store.entries[i].shard for i in batch) for batch in epoch] for epoch in epochs]
        self._visits = Visits.of(used, cfg.train.accumulate, updates)
        self._ring = Ring(self._visits.shards, 0, max(self._visits.room(), _GROUPS * (cfg.train.shards_together or 1)))
        self._here: set[int] = set()
        self._lost: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, update: int) -> "Feed":
        """Begin to compute what updates from `update` on use."""
        self._ring.done = self._visits.done(update)
        self._ranks.first(self._start)
        return self

    def _start(self) -> None:
        folder = self._cfg.store_dir
        self._ring.write(folder)
        config = folder / FEED_CONFIG
        write_text(config, config_yaml(self._cfg))
        environment = without_rank(os.environ) | _devices(self._cfg, self._ranks.local_world)
        with open(folder / FEED_LOG, "wb") as log:
            command = [sys.executable, "-u", "-m", "mtptrain.stages.feed", str(config)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        print(f"train: states of {self._ring.room} shards at a time are computed beside it (log: {folder / FEED_LOG})", flush=True)

    def first_group(self) -> set[int]:
        """The shards that are trained on first; their states are waited for."""
        shards = list(dict.fromkeys(self._visits.shards[: self._cfg.train.shards_together]))
        self._admit(shards, lambda: None)
        return set(shards)

    def wait(self, update: int, meanwhile: Callable[[], None]) -> set[int]:
        """Until the states that an update uses are there; documents that have none (global indices). `meanwhile` is called by every rank
        once in a while, and may raise.
        """
        self._admit(self._visits.wanted(update), meanwhile)
        return self._lost

    def passed(self, update: int) -> None:
        """An update is done with: what no later one uses may go."""
        done = self._visits.done(update + 1)
        if done == self._ring.done:
            return
        gone = set(self._ring.shards[self._ring.done : done])
        self._ring.done = done
        for shard in (gone - set(self._ring.window)) & self._here:
            self._store.forget(shard)
            self._here.remove(shard)
        if self._ranks.is_first:
            self._ring.write(self._cfg.store_dir)

    def _admit(self, shards: Sequence[int], meanwhile: Callable[[], None]) -> None:
        if not (new := [shard for shard in shards if shard not in self._here]):
            return
        while not self._ranks.first(lambda: self._wait_for(new)):
            meanwhile()
        until = time.monotonic() + _APPEAR_SECONDS
        for shard in new:
            while not self._has(shard):
                if time.monotonic() > until:
                    raise UserError(f"{self._cfg.store_dir}: shard {shard} is there for the first rank and not for this one")
                time.sleep(_POLL_SECONDS)
            self._lost |= self._store.admit(shard)
        self._here |= set(new)

    def _wait_for(self, shards: Sequence[int]) -> bool:
        """Whether all have come, within `_LOOK_SECONDS`."""
        until = time.monotonic() + _LOOK_SECONDS
        while missing := [shard for shard in shards if not self._has(shard)]:
            if time.monotonic() > until or noted():
                return False
            if self._process is not None and self._process.poll() is not None and not all(map(self._has, missing)):
                raise UserError(self._why_it_ended())
            time.sleep(_POLL_SECONDS)
        return True

    def _has(self, shard: int) -> bool:
        try:
            sidecar = read_sidecar(self._cfg.store_dir, shard, self._store.sidecars[shard].fingerprint)
        except StoreDamage:
            return False
        return set(self._captures) <= sidecar.files.keys()

    def _why_it_ended(self) -> str:
        assert self._process is not None
        log = self._cfg.store_dir / FEED_LOG
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = next((line for line in reversed(lines) if line.strip()), "").removeprefix("error: ")
        return f"the process that computes states ended with status {self._process.returncode}: {told} (log: {log})"

    def finish(self) -> None:
        """Training is over: end the feeder, and delete what it left."""
        self._end()
        if self._ranks.is_first:
            for shard in sorted(set(self._ring.shards)):
                sidecar = read_sidecar(self._cfg.store_dir, shard, self._store.sidecars[shard].fingerprint)
                if len(sidecar.files) > 1:
                    drop_states(self._cfg.store_dir, sidecar)

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()


def feeder_gpus(cfg: Config) -> int:
    """GPUs of this machine that training leaves to the feeder: the last ones. 0 where it has none, or Ray gives it some."""
    count = torch.cuda.device_count() if cfg.device is not Device.cpu else 0
    if not cfg.train.online or count < 2 or cfg.precompute.executor is Executor.ray:
        return 0
    return cfg.engine.tensor_parallel if cfg.precompute.backend is PrecomputeBackend.vllm else 1


def _devices(cfg: Config, ranks: int) -> dict[str, str]:
    """What the feeder's environment says of GPUs, beside `ranks` processes that train on this machine."""
    wanted = feeder_gpus(cfg)
    if not wanted:
        return {}
    count = torch.cuda.device_count()
    if ranks + wanted > count:
        raise UserError(
            f"train.online=true: {ranks} ranks and the {wanted} GPUs of what computes states are more than the {count} here; "
            f"set train.ranks={max(1, count - wanted)}, or less engine.tensor_parallel"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[-wanted:])}


# -- the feeder's own process -----------------------------------------------------------------------------------------


def keep_full(cfg: Config) -> None:
    """Compute and delete states as `ring.json` says, until training is past all of them."""
    set_threads(cfg.threads)
    folder = cfg.store_dir
    manifest.hold(folder, patience=_END_SECONDS)
    captures = list(dict.fromkeys((FINAL, *wanted_captures(cfg, read_spec(resolve_target(cfg.target))))))
    store = Store.open(folder, captures)
    writer = StoreWriter(folder, store_fingerprint(cfg), *codecs(cfg.store))
    members: dict[int, list[int]] = {}
    for i in store.indices(TRAIN):
        members.setdefault(store.entries[i].shard, []).append(i)
    filled = {shard for shard in members if len(store.sidecars[shard].files) > 1}
    held = {shard for shard in filled if not writer.missing(shard, captures)[0]}
    ring, lost = Ring.read(folder), Lost()
    sample = [_work(store, members[shard], captures) for shard in ring.window[:1]]
    longest = max(store.entries[i].length for i in store.indices(TRAIN))
    with open_maker(cfg, writer, sample, longest, lambda tokens: None) as make:
        while ring.done < len(ring.shards):
            for shard in filled - set(ring.window):
                drop_states(folder, read_sidecar(folder, shard, writer.fingerprint))
                filled.discard(shard)
                held.discard(shard)
            missing = [shard for shard in ring.window if shard not in held]
            filled |= set(missing)
            for item, rejected in make([_work(store, members[shard], captures) for shard in missing]):
                lost.count(item, rejected)
                held.add(item.shard)
                print(f"shard {item.shard}: {item.tokens:,} tokens, {len(rejected)} rejected", flush=True)
            if not missing:
                time.sleep(_POLL_SECONDS)
            ring = Ring.read(folder)


def _work(store: Store, members: list[int], captures: list[str]) -> Work:
    documents = []
    for i in members:
        entry = store.entries[i]
        documents.append(Document(id=entry.id, source=entry.source, split=entry.split, tokens=store.tokens(i).tolist(), spans=entry.spans))
    return Work(shard=store.entries[members[0]].shard, documents=documents, captures=captures)


def main(config: Path) -> int:
    end_with_parent()
    try:
        keep_full(load_config(config))
    except UserError as error:
        print(f"error: {error}", flush=True)
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
