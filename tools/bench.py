"""What the benchmarks share: data small enough for a short run, and sides that run in processes of their own."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from peak import peak_bytes

from mtptrain.cli import compose
from mtptrain.files import write_json
from mtptrain.stages import precompute, prepare

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


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` returns, run in a process of its own, and that process's `peak_bytes`."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_peak, function, arguments).result()


def _with_peak(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    return function(*arguments) | {"peak_bytes": peak_bytes()}


def save(found: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        write_json(file, found)
