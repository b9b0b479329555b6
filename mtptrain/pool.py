"""Work spread over workers on Ray: a worker that dies is replaced and its item done again; a slow one holds up only its own item.

Without Ray's address a cluster of this machine is started for the job and ended with it.
"""

import logging
import re
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from mtptrain.config import Config, Device, RayConfig
from mtptrain.errors import UserError, one_line

Item = TypeVar("Item")
Result = TypeVar("Result")
Do = Callable[[Item], Result]

_CONNECT_SECONDS = 10
_MOST_TRIES = 3
"""Of one item whose workers die."""


class _Worker(Generic[Item, Result]):
    """What lives in a process of its own: something made once, and called with item after item."""

    def __init__(self, make: Callable[[int], "Do[Item, Result]"], number: int) -> None:
        self._do = make(number)

    def do(self, item: Item) -> Result:
        return self._do(item)


class Pool(Generic[Item, Result]):
    """`ray.workers` workers, each with `make(its number)`, which is pickled and called where the worker runs. Raises UserError.

    `cpus`, `gpus`: what one worker takes.
    """

    def __init__(self, config: RayConfig, make: Callable[[int], Do[Item, Result]], cpus: int, gpus: int) -> None:
        self._config, self._make, self._cpus, self._gpus = config, make, cpus, gpus
        self._workers: dict[int, Any] = {}

    def __enter__(self) -> "Pool[Item, Result]":
        ray = _ray()
        count, address = self._config.workers, self._config.address
        if address is None:
            options: dict[str, Any] = {"num_cpus": count * self._cpus, "include_dashboard": False}
        else:
            options = {"address": address}
        try:
            if address is not None and (named := re.fullmatch(r"([^/]+):(\d+)", address)):  # Ray itself would try for minutes
                socket.create_connection((named[1], int(named[2])), timeout=_CONNECT_SECONDS).close()
            ray.init(**options, logging_level=logging.ERROR)
        except (OSError, ValueError, RuntimeError) as e:
            raise UserError(f"ray.address={address}: no Ray cluster answers ({one_line(e)[:200]})") from e
        self._refuse_too_few(ray)
        for number in range(count):
            self._start(number)
        return self

    def _refuse_too_few(self, ray: Any) -> None:
        there = ray.cluster_resources()
        for kind, wanted in (("CPU", self._cpus), ("GPU", self._gpus)):
            if wanted * self._config.workers > there.get(kind, 0):
                ray.shutdown()
                raise UserError(
                    f"ray.workers={self._config.workers} take {wanted * self._config.workers} {kind}s and the cluster has "
                    f"{there.get(kind, 0):g}; set fewer workers, or fewer threads for each"
                )

    def _start(self, number: int) -> None:
        actor = _ray().remote(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0)(_Worker)
        self._workers[number] = actor.remote(self._make, number)

    def run(self, items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        """Every item with its result, once each, as they are done."""
        ray = _ray()
        waiting, tries = deque(range(len(items))), Counter[int]()
        idle, running = deque(self._workers), dict[Any, tuple[int, int]]()
        while waiting or running:
            while waiting and idle:
                index, number = waiting.popleft(), idle.popleft()
                running[self._workers[number].do.remote(items[index])] = (index, number)
            done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)  # a signal is looked at once a second
            for reference in done:
                index, number = running.pop(reference)
                idle.append(number)
                try:
                    yield items[index], ray.get(reference)
                except ray.exceptions.RayActorError as died:
                    tries[index] += 1
                    if tries[index] == _MOST_TRIES:
                        raise UserError(
                            f"{_MOST_TRIES} workers died at the same item, the last one of this: {one_line(died)[:300]}"
                        ) from died
                    print(f"ray: worker {number} died; another one does its item again", flush=True)
                    self._start(number)
                    waiting.appendleft(index)
                except ray.exceptions.RayTaskError as failed:
                    if isinstance(failed.cause, UserError):
                        raise UserError(str(failed.cause)) from failed
                    raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ray = _ray()
        for worker in self._workers.values():
            ray.kill(worker)
        ray.shutdown()


def chunks(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def _ray() -> Any:
    try:
        import ray
    except ImportError as e:
        raise UserError("executor=ray: Ray is not installed; pip install 'mtptrain[ray]'") from e
    return ray


def spread_config(cfg: Config) -> Config:
    """The config as a worker needs it, whatever folder it starts in."""
    path = Path(cfg.target.path).expanduser()
    target = replace(cfg.target, path=str(path.resolve())) if path.exists() else cfg.target
    return replace(cfg, root=str(Path(cfg.root).resolve()), target=target)


def resources(cfg: Config, gpus: int) -> tuple[int, int]:
    """CPUs and GPUs of one worker that computes with the target: `threads` (0: one), and `gpus` where there are any."""
    import torch

    on_gpu = cfg.device is not Device.cpu and torch.cuda.is_available()
    return max(1, cfg.threads), gpus if on_gpu else 0
