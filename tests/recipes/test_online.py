"""A head trained while its states are computed is the one of a whole store in the same order: interrupted, on ranks, ended."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtptrain.files import hash_file
from mtptrain.store.ring import FEED_LOG, Ring
from tests.recipes.test_pipeline import ENVIRONMENT

SHAPE = ["head=mtp", "store.shard_tokens=256", "train.shuffle_shards=2", "train.batch_tokens=128", "train.accumulate=2", "train.epochs=6"]
LENGTH = ["train.max_updates=60", "train.eval_every=30", "train.checkpoint_every=10", "train.log_every=1", "store.codec=int8"]
UPDATES = 60


def command(root: Path, name: str, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "mtptrain.train", "+recipe=tiny", f"root={root}", f"name={name}", *SHAPE, *LENGTH, *overrides]


def run(root: Path, name: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(root, name, *overrides), capture_output=True, text=True, cwd=root, env=ENVIRONMENT, timeout=300)


def outcome(root: Path, name: str, label: str = "mtp") -> tuple[str, str]:
    folder = root / name / "heads" / label / "train"
    return hash_file(folder / f"checkpoints/{UPDATES:08d}/head.safetensors"), hash_file(folder / "best/head.safetensors")


def states(root: Path, name: str) -> set[str]:
    """Shards of training documents whose states are on disk."""
    store = root / name / "store"
    ring = set(Ring.read(store).shards)
    return {p.name[:5] for p in store.glob("*.final.safetensors") if int(p.name[:5]) in ring}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all states on disk."""
    folder = tmp_path_factory.mktemp("online")
    done = run(folder, "whole")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_head_is_that_of_a_whole_store_and_only_a_window_of_it_is_ever_on_disk(root: Path) -> None:
    process = subprocess.Popen(
        command(root, "online", "train.online=true"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=ENVIRONMENT
    )
    most, store = 0, root / "online/store"
    while process.poll() is None:
        if (store / "ring.json").exists():
            most = max(most, len(states(root, "online")))
        time.sleep(0.01)
    said = process.communicate()
    assert process.returncode == 0, said
    ring = Ring.read(store)
    assert len(set(ring.shards)) > 2 * ring.room, "too few shards for a ring to matter"
    assert 0 < most <= ring.room
    assert not states(root, "online"), "states outlive the training"
    assert outcome(root, "online") == outcome(root, "whole")
    verified = subprocess.run(
        [sys.executable, "-m", "mtptrain.store", "verify", str(root / "online")], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_killed_and_ended_it_goes_on_to_the_same_head(root: Path) -> None:
    for number, (sent, status) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGKILL, -9))):
        process = subprocess.Popen(
            command(root, "killed", "train.online=true"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=ENVIRONMENT,
        )
        log, until = root / "killed/heads/mtp/train/log.jsonl", time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") >= 5 + 17 * number):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(sent)
        said = process.communicate(timeout=60)
        assert process.returncode == status, said
    done = run(root, "killed", "train.online=true")
    assert done.returncode == 0, done.stderr
    assert outcome(root, "killed") == outcome(root, "whole")


def test_on_two_ranks_it_is_the_head_that_two_ranks_make_of_a_whole_store(root: Path) -> None:
    for name, overrides in (("whole", []), ("ranks", ["train.online=true"])):
        done = run(root, name, "train.ranks=2", "head.label=two", *overrides)
        assert done.returncode == 0, done.stderr
    assert outcome(root, "ranks", "two") == outcome(root, "whole", "two")


def test_where_the_process_that_computes_states_ends_its_reason_is_told(root: Path) -> None:
    process = subprocess.Popen(
        command(root, "alone", "train.online=true"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=ENVIRONMENT
    )
    log, until = root / "alone/store" / FEED_LOG, time.monotonic() + 120
    while not (log.exists() and "shard" in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    subprocess.run(["pkill", "-9", "-f", f"mtptrain.stages.feed {root / 'alone'}"], check=True)
    said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    errors = [line for line in said[1].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    assert "the process that computes states ended with status -9" in errors[0]


def test_a_store_of_held_out_states_is_told_from_a_whole_one(root: Path) -> None:
    done = run(root, "whole", "train.online=true")
    assert done.returncode == 2
    assert "train.online" in done.stderr
    merged = subprocess.run(
        [sys.executable, "-m", "mtptrain.store", "filter", str(root / "made"), str(root / "online"), "--split", "train"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert merged.returncode == 2
    assert "keeps no states of training documents" in merged.stderr


def test_losses_are_those_of_the_whole_store(root: Path) -> None:
    def losses(name: str) -> list[float]:
        rows = [json.loads(line) for line in (root / name / "heads/mtp/train/log.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if "loss" in row]

    assert losses("online") == losses("whole")
    assert len(losses("online")) == UPDATES
