"""Training on several ranks for real, over gloo: by the job itself, under torchrun, as srun starts it; killed, ended and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtptrain.files import hash_file
from tests.recipes.test_pipeline import ENVIRONMENT, ROOT

TRAINING = ["train.accumulate=2", "train.max_updates=120", "train.epochs=40", "train.eval_every=60", "train.checkpoint_every=20"]


def command(root: Path, label: str, *overrides: str) -> list[str]:
    return ["mtptrain.train", "+recipe=tiny", f"root={root}", f"head.label={label}", "train.log_every=1", *TRAINING, *overrides]


def run(root: Path, label: str, *overrides: str, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    words = [*(launcher or [sys.executable]), "-m", *command(root, label, *overrides)]
    return subprocess.run(words, capture_output=True, text=True, cwd=root, env=ENVIRONMENT, timeout=300)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose head was trained by one process."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run(folder, "one")
    assert done.returncode == 0, done.stderr
    return folder


def outcome(root: Path, label: str) -> tuple[str, str]:
    """The last weights, the best ones."""
    folder = root / "tiny/heads" / label / "train"
    return hash_file(folder / "checkpoints/00000120/head.safetensors"), hash_file(folder / "best/head.safetensors")


def losses(root: Path, label: str) -> list[float]:
    rows = [json.loads(line) for line in (root / "tiny/heads" / label / "train/log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def _wait_for_updates(root: Path, label: str, count: int, process: "subprocess.Popen[str]") -> None:
    log, until = root / "tiny/heads" / label / "train/log.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def _ranks_at_work(label: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "mtptrain.stages.train" in line and f"mtptrain-ranks-{label}" in line]


def test_killed_and_ended_on_two_ranks_and_finished_on_one_is_as_if_one_had_done_it_all(root: Path) -> None:
    """Two batches an update: their gradients' sum has the same bits on two ranks as on one."""
    for number, (sent, status) in enumerate(((signal.SIGKILL, -9), (signal.SIGTERM, 143))):
        words = [sys.executable, "-m", *command(root, "two", "train.ranks=2")]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root, env=ENVIRONMENT)
        _wait_for_updates(root, "two", 25 + 30 * number, process)
        process.send_signal(sent)
        said = process.communicate(timeout=120)
        assert process.returncode == status, said
        until = time.monotonic() + 20
        while _ranks_at_work("two"):
            assert time.monotonic() < until, "ranks outlive the job that started them"
            time.sleep(0.05)
    saved = sorted(path.name for path in (root / "tiny/heads/two/train/checkpoints").iterdir())
    assert saved
    assert int(saved[-1]) >= 55, saved
    done = run(root, "two")
    assert done.returncode == 0, done.stderr
    assert outcome(root, "two") == outcome(root, "one")
    assert losses(root, "two") == pytest.approx(losses(root, "one"), rel=1e-6)


def test_a_whole_job_under_torchrun(root: Path) -> None:
    done = run(
        root,
        "torchrun",
        launcher=[str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"],
    )
    assert done.returncode == 0, done.stderr
    assert outcome(root, "torchrun") == outcome(root, "one")
    assert (root / "tiny/heads/torchrun/export/vllm.unproven/model.safetensors").exists()
    assert done.stdout.count("validate: ") == 1, "every rank validated"


def test_a_whole_job_as_srun_starts_it(root: Path) -> None:
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", *command(root, "slurm", "train.deepspeed.stage=2")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=root,
            env=ENVIRONMENT | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    for task in tasks:
        said = task.communicate(timeout=300)[0]
        assert task.returncode == 0, said
    assert losses(root, "slurm") == pytest.approx(losses(root, "one"), rel=1e-5)


def test_what_a_rank_finds_is_told_once_in_one_line(root: Path) -> None:
    part = next((root / "tiny/store").glob("00000.final.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        done = run(root, "broken", "train.ranks=2")
    finally:
        for left in part.parent.glob("*.corrupt"):
            left.unlink()
        part.write_bytes(whole)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "rror" in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert "00000.final.safetensors is corrupt" in errors[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.ranks=3"], "at most train.accumulate=2"),
        (["train.deepspeed.stage=2"], "needs two ranks or more"),
        (["train.deepspeed.stage=4"], "must be 0, 1, 2 or 3"),
        (["train.deepspeed.stage=3", "train.ema=0.9"], "needs train.deepspeed.stage below 3"),
    ],
)
def test_what_does_not_go_together_is_one_line(root: Path, overrides: list[str], said: str) -> None:
    done = run(root, "wrong", *overrides)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("arguments", [["--ranks", "1,2", "--zero", "3"], pytest.param([], marks=pytest.mark.slow)], ids=["two", "all"])
def test_any_number_of_ranks_and_any_stage_of_zero_train_alike(arguments: list[str]) -> None:
    words = [sys.executable, str(ROOT / "tools/check_ranks.py"), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_sweep_by_another_launcher_fails_where_a_job_of_it_fails(root: Path) -> None:
    """submitit's local one runs each job in a process of its own, as its Slurm one does."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [sys.executable, "-m", "mtptrain.train", "-m", "+recipe=tiny", f"root={root}", "hydra/launcher=submitit_local"]
    done = subprocess.run(
        [*words, "head=mtp,eagle", "target.path=/nowhere"], capture_output=True, text=True, cwd=root, env=ENVIRONMENT, timeout=200
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "/nowhere" in errors[0]
