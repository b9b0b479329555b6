"""Responses and states by workers on Ray: a cluster of two, with one killed midway; what is left is what one process makes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipes.test_pipeline import ENVIRONMENT

pytest.importorskip("ray")

RAY = ["precompute.executor=ray", "data.responses.executor=ray"]


def command(job: str, root: Path, name: str, *overrides: str) -> list[str]:
    words = ["+recipe=tiny", f"root={root}", f"name={name}", "store.shard_tokens=256", "head=mtp"]
    return [sys.executable, "-m", f"mtptrain.{job}", *words, *overrides]


def run(job: str, root: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job, root, name, *overrides), capture_output=True, text=True, cwd=root, env=ENVIRONMENT, timeout=300)


def contents(folder: Path) -> dict[str, bytes]:
    kept = {".safetensors", ".json", ".jsonl", ".parquet"}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in kept}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    for job in ("prepare", "precompute"):
        done = run(job, folder, "alone")
        assert done.returncode == 0, done.stderr
    return folder


def _workers_of(parent: int) -> list[int]:
    """Ray's processes that hold a worker of the pool, of the job `parent` started."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(ppid) for pid, ppid, _ in rows}

    def within(pid: int) -> bool:
        while pid in parents:
            if pid == parent:
                return True
            pid = parents[pid]
        return False

    return [int(pid) for pid, _, words in rows if words.startswith("ray::_Worker") and within(int(pid))]


def test_a_store_made_by_workers_of_which_one_is_killed_is_the_one_that_a_single_process_makes(alone: Path) -> None:
    done = run("prepare", alone, "spread", *RAY)
    assert done.returncode == 0, done.stderr
    whole = contents(alone / "alone/data")
    mine = contents(alone / "spread/data")
    assert mine["documents.parquet"] == whole["documents.parquet"], "answers of float32 on one thread are the same in any company"
    process = subprocess.Popen(
        command("precompute", alone, "spread", *RAY), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=alone, env=ENVIRONMENT
    )
    until = time.monotonic() + 120
    written = alone / "spread/store"
    while not (written.exists() and len(list(written.glob("*.json"))) >= 4):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(_workers_of(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert re.search(r"worker \d died; another one does its item again", out), out
    assert contents(alone / "spread/store") == contents(alone / "alone/store")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ray.workers=2", "ray.address=127.0.0.1:1"], "no Ray cluster answers"),
        (["ray.workers=0"], "must be at least 1"),
        (["ray.address=auto"], "no Ray cluster answers"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(alone: Path, overrides: list[str], said: str) -> None:
    done = run("precompute", alone, "alone", "on_stale=redo", "store.shard_tokens=300", *RAY, *overrides)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
