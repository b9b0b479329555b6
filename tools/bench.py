"""What the benchmarks share: data small enough for a short run, and sides that run in processes of their own."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from mtptrain import manifest
from mtptrain.cli import compose
from mtptrain.config import Config
from mtptrain.data.documents import Document
from mtptrain.files import hash_json, write_json
from mtptrain.peak import peak_bytes
from mtptrain.stages import precompute, prepare
from mtptrain.store.codecs import StateCodec
from mtptrain.store.format import shard_ranges
from mtptrain.store.writer import StoreWriter

SMALL = [
    "+recipe=smollm2",
    "head=mtp",
    "name=bench",
    "data.limit=64",
    "data.self_prompts.count=8",
    "data.responses.max_new_tokens=64",
    "wandb.mode=disabled",
]
"""Some 10,000 tokens of the project's own prompts: prepared in about two minutes, once."""


def prepare_store(overrides: list[str]) -> dict[str, Any]:
    """Responses and target states, where they are not complete yet. Meant for `apart`: its memory is not the benchmark's."""
    cfg = compose(overrides)[0]
    prepare.run(cfg, for_training=True)
    precompute.run(cfg)
    return {"store": str(cfg.store_dir)}


def run_config(run: Path, changes: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Of a finished run, with a head from the start: what its store was made with, then `changes`, then `key=value`."""
    base = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(run / "store" / "config.yaml"))
    base.head = OmegaConf.structured(Config).head
    config = OmegaConf.to_object(OmegaConf.merge(base, changes, OmegaConf.from_dotlist(list(overrides))))
    assert isinstance(config, Config)
    config.root, config.name = str(run.parent), run.name
    return config


def write_store(
    folder: Path,
    inputs: dict[str, Any],
    codecs: tuple[StateCodec, StateCodec],
    documents: Sequence[Document],
    shard_tokens: int,
    states: Callable[[range], dict[str, Tensor]],
) -> float:
    """A finished store of the documents; `states`: of some of them, by their numbers. Seconds of encoding, hashing and writing alone."""
    writer, seconds = StoreWriter(folder, hash_json(inputs), *codecs), 0.0
    shards, captures = shard_ranges(documents, shard_tokens), list[str]()
    for shard, members in enumerate(shards):
        found = states(members)
        began = time.perf_counter()
        writer.write(shard, [documents[i] for i in members], found)
        seconds += time.perf_counter() - began
        captures = list(found)
    manifest.finish(folder, inputs, {"captures": writer.made(captures), "shards": len(shards)})
    return seconds


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` returns, run in a process of its own, and that process's `peak_bytes`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_peak, function, arguments).result()


def _with_peak(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    return function(*arguments) | {"peak_bytes": peak_bytes()}


def save(found: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        write_json(file, found)
