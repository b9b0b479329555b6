#!/usr/bin/env python3
"""Break a stage at many points, run the same command again, and compare its folder with that of a run left alone.

    python tools/fault_test.py [--stage prepare|precompute|train|validate|export] [--fault kill|term|big|full|readonly|damage] [--points N]
                               [--engine] [--seed S] [--json FILE] [key=value ...]

kill    SIGKILL: half of the points at a random moment, half at a random one of the moments before a file is synced (what was not synced
        before is cut at a random place first, as a power cut would), between sync and rename, and after the rename
term    SIGTERM at a random moment: the stage must end within --grace seconds with status 143, or have been through
big     files may not grow beyond a random size (RLIMIT_FSIZE, EFBIG): status 2 and one line, or through
full    a small tmpfs that fills up (ENOSPC): status 2 and one line, or through; it is enlarged for the second run. Needs the right to mount
damage  (of the finished stage, or of a run that train has finished) one file has a byte changed or a number, is cut, emptied, deleted, or
        a folder or a link to nowhere lies in its place: the same command mends it, or ends with status 2 and one line; files that nothing
        reads any more may stay as they are, and what the store holds must be found by `verify`
readonly  a tmpfs that may only be read: status 2 and one line; the second run may write. Needs the right to mount

Everything is compared but what differs between two runs left alone (durations; printed). A stage that is started again is given every
earlier stage's folder as it was. Stages run in forks of this process, which has imported everything before, on the tiny recipe.
With --engine a real vLLM answers, computes the states and measures; what it leaves in its job folder is not compared.
"""

import argparse
import contextlib
import importlib
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import save

from mtptrain import cli
from mtptrain.store.verify import find_damage
from mtptrain.target.tiny import make_tiny_target

STAGES = ["prepare", "precompute", "train", "validate", "export"]
FAULTS = ["kill", "term", "big", "full", "readonly", "damage"]
DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "a byte changed": lambda path, was: path.write_bytes(_with_another_byte(was)),
    "a number changed": lambda path, was: path.write_bytes(_with_another_number(was)),
    "cut": lambda path, was: path.write_bytes(was[: len(was) // 2]),
    "emptied": lambda path, was: path.write_bytes(b""),
    "deleted": lambda path, was: path.unlink(),
    "a folder": lambda path, was: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path, was: (path.unlink(), path.symlink_to("/nowhere/at/all")),
}
_UNREAD = re.compile(
    r"config\.yaml|started\.json|rejects\.jsonl|samples\.(txt|html)|responses\.jsonl|self_turns\.jsonl|log\.jsonl|report\.html|checkpoints/|candidate/"
)
"""Of a finished run: for people, or for going on where a stage was stopped."""
TINY = [
    "+recipe=tiny",
    "name=run",
    "wandb.mode=disabled",
    "data.limit=12",
    "data.held_out_max=3",
    "data.responses.max_new_tokens=12",
    "data.self_prompts.count=1",
    "store.shard_tokens=512",
    "train.max_updates=8",
    "train.log_every=2",
    "train.eval_every=4",
    "train.checkpoint_every=2",
    "validate.documents=3",
    "validate.reference_documents=1",
]
SHAPE = {"hidden_size": 128, "head_dim": 32}
"""With an engine: 32 is the smallest head that vLLM's CPU attention has."""
ENGINE = [
    "data.responses.backend=vllm",
    "precompute.backend=vllm",
    "validate.measure=[walk,reference,vllm]",
    "engine.python=auto",
    "engine.kv_cache_gib=1",
    *(f"target.shape.{key}={value}" for key, value in SHAPE.items()),
]
_UNSEEN = {".lock"}
_JOB = "engine"
"""The folder of an engine's process."""
_SHOWS_DURATIONS = {"report.html"}
"""Compared by being there."""
_WITHOUT_ORDER = {"responses.jsonl"}
"""Rows are written as they are made, and what is left to make is batched anew."""
_MADE = {"train": ["heads"], "validate": ["heads/lookup/report", "heads/lookup/export"], "export": ["heads/lookup/export"]}
"""Taken away before a stage, which the job before it has made: train runs to the end."""
_LONGEST = 300.0
_TERMINATED = 128 + signal.SIGTERM


@dataclass(slots=True)
class Events:
    """What a stage told of its files, through memory shared with it: `names` after a run left alone, `count` at any time."""

    shared: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1 << 20))

    @property
    def count(self) -> int:
        return int.from_bytes(self.shared[:8], "little")

    def names(self) -> list[str]:
        return self.shared[16 : 16 + int.from_bytes(self.shared[8:16], "little")].decode().splitlines()

    def clear(self) -> None:
        self.shared[:16] = bytes(16)

    def happened(self, name: str) -> int:
        """Note it; its number, from 0."""
        number, used = self.count, int.from_bytes(self.shared[8:16], "little")
        line = f"{name}\n".encode()
        if 16 + used + len(line) < len(self.shared):
            self.shared[16 + used : 16 + used + len(line)] = line
            self.shared[8:16] = (used + len(line)).to_bytes(8, "little")
        self.shared[:8] = (number + 1).to_bytes(8, "little")
        return number


def watch(events: Events, root: Path, at: int | None, chance: random.Random) -> None:
    """In the stage's process: note every sync and rename under `root`, and die at event number `at`."""
    sync, replace, durable = os.fsync, os.replace, dict[str, int]()

    def event(moment: str, path: str) -> None:
        if not path.startswith(str(root)):
            return
        if events.happened(f"{moment} {Path(path).name}") == at:
            if moment == "before sync" and os.path.isfile(path):
                kept = durable.get(path, 0)
                os.truncate(path, chance.randint(kept, max(kept, os.path.getsize(path))))
            os.kill(os.getpid(), signal.SIGKILL)

    def watched_sync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        event("before sync of folder" if os.path.isdir(path) else "before sync", path)
        sync(fd)
        if os.path.isfile(path):
            durable[path] = os.path.getsize(path)

    def watched_replace(source: Any, target: Any) -> None:
        event("before rename", str(source))
        replace(source, target)
        event("after rename", str(target))

    os.fsync, os.replace = watched_sync, watched_replace  # type: ignore[assignment]


@dataclass(slots=True)
class Ended:
    status: int
    """Of the process; -9 for SIGKILL."""
    said: str
    seconds: float


class Bench:
    """A run folder that is put back before each point."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder, self.root = folder, folder / "root"
        self.overrides = [*TINY, f"root={self.root}", *overrides]
        self.events = Events()
        for stage in STAGES:
            importlib.import_module(f"mtptrain.stages.{stage}")
            importlib.import_module(f"mtptrain.{stage}")

    def run(self, stage: str, prepare: Callable[[], None] = lambda: None, after: tuple[float, int] | None = None) -> Ended:
        """The stage in a fork, whose `prepare` is called first; `after`: seconds until it is sent a signal."""
        self.events.clear()
        reading, writing = os.pipe()  # not a file, which may not grow with --fault big
        os.set_blocking(reading, False)
        began = time.monotonic()
        child = os.fork()
        if not child:
            self._be(stage, prepare, writing)
        os.close(writing)
        sent, said = None, b""
        while True:
            with contextlib.suppress(BlockingIOError):
                said += os.read(reading, 1 << 20)
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            elapsed = time.monotonic() - began
            if after and sent is None and elapsed >= after[0]:
                os.kill(child, after[1])
                sent = time.monotonic()
            if elapsed > _LONGEST:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        ended = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            said += os.read(reading, 1 << 20)
        os.close(reading)
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        return Ended(code, said.decode(errors="replace"), ended - (began if sent is None else sent))

    def _be(self, stage: str, prepare: Callable[[], None], log: int) -> None:
        status = 70
        try:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.folder)
            prepare()
            main = importlib.import_module(f"mtptrain.{stage}").main
            status = cli.run(main.__wrapped__, stage, self.overrides)
            sys.stdout.flush()
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def watched(self, at: int | None = None, seed: int = 0) -> Callable[[], None]:
        return lambda: watch(self.events, self.root, at, random.Random(seed))

    def keep(self, name: str) -> Path:
        kept = self.folder / name
        shutil.rmtree(kept, ignore_errors=True)
        if self.root.exists():
            shutil.copytree(self.root, kept)
        else:
            kept.mkdir()
        return kept

    def put_back(self, kept: Path) -> None:
        if self.root.exists():
            for child in self.root.iterdir():
                shutil.rmtree(child)
        shutil.copytree(kept, self.root, dirs_exist_ok=True)


def leaves(folder: Path) -> dict[str, Any]:
    """Everything below a folder that can be compared: a JSON value by file and key, the bytes of any other file."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in _UNSEEN):
        if _JOB in path.relative_to(folder).parts:
            continue
        name = str(path.relative_to(folder))
        found[name] = "there"
        if path.suffix == ".json":
            found |= {f"{name}: {key}": value for key, value in _flat(json.loads(path.read_text()))}
        elif path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            rows = [json.loads(line) for line in (sorted(lines) if path.name in _WITHOUT_ORDER else lines)]
            found |= {f"{name}: {key}": value for key, value in _flat(rows)}
        elif path.name not in _SHOWS_DURATIONS:
            found[f"{name}: content"] = path.read_bytes()
    return found


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
        yield f"{prefix}.length", len(value)
    else:
        yield prefix, value


def different(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if key not in one or key not in other or one[key] != other[key]}


def without_numbers(key: str) -> str:
    """A key without its rows' numbers: `log.jsonl: 3.seconds` and `log.jsonl: 12.seconds` vary for the same reason."""
    name, mark, inner = key.partition(": ")
    return name + mark + ".".join("*" if part.isdigit() else part for part in inner.split("."))


@contextlib.contextmanager
def small_disk(root: Path, size: int) -> Iterator[Callable[[str], None]]:
    """A tmpfs of `size` bytes at `root`; gives what changes its options. Raises PermissionError where nothing may be mounted."""
    root.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)], capture_output=True, check=False).returncode:
        raise PermissionError("mount: not permitted")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", str(root)], check=True)  # type: ignore[return-value]
    finally:
        subprocess.run(["umount", str(root)], check=True)


@dataclass(slots=True)
class Found:
    """Of one stage and fault."""

    points: int = 0
    through: int = 0
    """Points at which the stage ended well before the fault struck: not counted in `points`."""
    where: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest_end: float = 0.0


class StageTest:
    """One stage: its folder before it, after it, and what varies from run to run."""

    def __init__(self, bench: Bench, stage: str) -> None:
        self.bench, self.stage = bench, stage
        for made in _MADE.get(stage, []):
            shutil.rmtree(bench.root / "run" / made, ignore_errors=True)
        self.before = bench.keep("before")
        whole = self._whole(bench.watched())
        self.names, self.seconds = bench.events.names(), whole.seconds
        first = leaves(bench.root)
        bench.put_back(self.before)
        self._whole()
        self.after, self.bytes = leaves(bench.root), _size(bench.root)
        self.finished = bench.keep("finished")
        self.varies = {without_numbers(key) for key in different(first, self.after)}

    def _whole(self, prepare: Callable[[], None] = lambda: None) -> Ended:
        ended = self.bench.run(self.stage, prepare)
        if ended.status:
            sys.exit(f"error: {self.stage} left alone ends with status {ended.status}:\n{ended.said}")
        return ended

    def points(self, fault: str, count: int, seed: int, grace: float) -> Found:
        found, chance = Found(), random.Random(f"{self.stage}/{fault}/{seed}")
        while found.points < count and found.through < 4 * count:
            self._point(found, fault, chance, grace)
        return found

    def _point(self, found: Found, fault: str, chance: random.Random, grace: float) -> None:
        bench, moment = self.bench, chance.uniform(0, self.seconds)
        if fault == "damage":
            self._damage(found, chance)
            return
        if fault in ("full", "readonly"):
            share = chance.uniform(0.02, 0.98) if fault == "full" else 4.0
            size = int(_size(self.before) + share * (self.bytes - _size(self.before)))
            with small_disk(bench.root, size) as change:
                bench.put_back(self.before)
                if fault == "readonly":
                    change("ro")
                ended = bench.run(self.stage)
                change(f"rw,size={1 << 30}")
                self._judge(found, fault, ended, fault, grace)
            shutil.rmtree(bench.root)
            return
        bench.put_back(self.before)
        if fault == "kill" and found.points % 2 and self.names:
            at = chance.randrange(len(self.names))
            ended, where = bench.run(self.stage, bench.watched(at, seed=at)), self.names[at]
        elif fault == "big":
            most = int(10 ** chance.uniform(2, 7))
            ended = bench.run(self.stage, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY)))
            where = f"files of 10^{len(str(most)) - 1} bytes"
        else:
            number = signal.SIGKILL if fault == "kill" else signal.SIGTERM
            ended = bench.run(self.stage, bench.watched(), (moment, number))
            where = f"{bench.events.count * 10 // max(1, len(self.names)) * 10:3d} % of the files' events done"
        self._judge(found, fault, ended, where, grace)

    def _damage(self, found: Found, chance: random.Random) -> None:
        """Break a file of the finished stage, and run it again."""
        self.bench.put_back(self.finished)
        files = sorted(p for p in self.bench.root.rglob("*") if p.is_file() and p.name not in _UNSEEN)
        path, kind = chance.choice(files), chance.choice(list(DAMAGES))
        was, name = path.read_bytes(), f"{path.relative_to(self.bench.root)}: {kind}"
        if not was:
            return
        DAMAGES[kind](path, was)
        again = self.bench.run(self.stage)
        found.points += 1
        found.where[kind] += 1
        if again.status == 2 and again.said.count("error: ") == 1 and "Traceback" not in again.said:
            return
        if again.status:
            found.faults.append(f"{name}: status {again.status}:\n{again.said}")
        elif not (path.is_file() and path.read_bytes() == was) and not _UNREAD.search(name):
            store = path.parent
            if store.name != "store" or not any(find_damage(store)):
                found.faults.append(f"{name}: nothing is said of it")

    def _judge(self, found: Found, fault: str, ended: Ended, where: str, grace: float) -> None:
        """Whether the stage ended as it should, and whether running it again mends everything."""
        if ended.status == 0:
            found.through += 1
        else:
            found.points += 1
            found.where[where] += 1
            wanted = {"kill": -signal.SIGKILL, "term": _TERMINATED}.get(fault, 2)
            if ended.status != wanted:
                found.faults.append(f"{where}: status {ended.status} instead of {wanted}:\n{ended.said}")
            if wanted == 2 and ended.said.count("error: ") != 1:
                found.faults.append(f"{where}: not one line:\n{ended.said}")
            if fault == "term":
                found.slowest_end = max(found.slowest_end, ended.seconds)
                if ended.seconds > grace:
                    found.faults.append(f"{where}: {ended.seconds:.1f} s until it ended")
        again = self.bench.run(self.stage)
        if again.status:
            found.faults.append(f"{where}: started again, it ends with status {again.status}:\n{again.said}")
            return
        unlike = {key for key in different(leaves(self.bench.root), self.after) if without_numbers(key) not in self.varies}
        if fault == "term":  # a checkpoint more, in the place of one that is pruned
            unlike = {key for key in unlike if "/checkpoints/" not in key}
        if unlike:
            found.faults.append(f"{where}: {len(unlike)} differences, such as {', '.join(sorted(unlike)[:5])}")


def _with_another_byte(was: bytes) -> bytes:
    at = len(was) // 2
    return was[:at] + bytes([was[at] ^ 0x11]) + was[at + 1 :]


def _with_another_number(was: bytes) -> bytes:
    numbers = list(re.finditer(rb"\d+", was))
    if not numbers:
        return was[:-1]
    chosen = numbers[len(numbers) // 2]
    return was[: chosen.start()] + str(int(chosen[0]) + 1).encode() + was[chosen.end() :]


def _size(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="all of them without it")
    parser.add_argument("--fault", choices=FAULTS, default="kill")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--engine", action="store_true", help="with a real vLLM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    if bad := [o for o in overrides if "=" not in o]:
        sys.exit(f"error: {bad[0]} is neither an option nor key=value")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        own: list[str] = []
        if arguments.engine:
            own = [*ENGINE, f"target.path={make_tiny_target(Path(folder) / 'target', 'llama', **SHAPE)}"]
        bench = Bench(Path(folder), [*own, *overrides])
        for stage in STAGES:
            if arguments.stage not in (None, stage):
                ended = bench.run(stage)
                if ended.status:
                    sys.exit(f"error: {stage} ends with status {ended.status}:\n{ended.said}")
                continue
            test = StageTest(bench, stage)
            found = test.points(arguments.fault, arguments.points, arguments.seed, arguments.grace)
            results[stage] = _tell(stage, arguments.fault, test, found)
            bench.put_back(test.before)
            if arguments.stage == stage:
                break
            bench.run(stage)
    save(results, arguments.json)
    return 1 if any(r["faults"] for r in results.values()) else 0


def _tell(stage: str, fault: str, test: StageTest, found: Found) -> dict[str, Any]:
    print(f"{stage}: {found.points} points of {fault}, {len(found.faults)} faults; {found.through} times it was through before")
    for where, count in sorted(found.where.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:4d}  {where}")
    if fault == "term":
        print(f"  ended {found.slowest_end:.1f} s after the signal at the latest")
    print(f"  not compared: {', '.join(sorted(test.varies)) or 'nothing'}")
    for line in found.faults:
        print(f"  FAULT {line}")
    sys.stdout.flush()
    return {
        "points": found.points,
        "through": found.through,
        "where": dict(found.where),
        "faults": found.faults,
        "varies": sorted(test.varies),
        "slowest_end_seconds": found.slowest_end,
    }


if __name__ == "__main__":
    sys.exit(main())
