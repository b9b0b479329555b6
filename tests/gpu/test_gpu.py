"""On a CUDA device: the tiny recipe's head is the one that a CPU trains, and the benchmark runs. `pytest -m gpu` runs these."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.test_pipeline import ENVIRONMENT, ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_gpu_trains_the_head_that_a_cpu_trains(tmp_path: Path) -> None:
    """float32 on both; sums in another order."""
    losses = {}
    for device in ("cpu", "cuda"):
        words = ["+recipe=tiny", f"root={tmp_path}", f"name={device}", f"device={device}", "head=mtp", "train.log_every=1"]
        done = subprocess.run(
            [sys.executable, "-m", "mtptrain.train", *words], capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=400
        )
        assert done.returncode == 0, done.stderr
        log = (tmp_path / device / "heads/mtp/train/log.jsonl").read_text().splitlines()
        losses[device] = [row["loss"] for row in map(json.loads, log) if "loss" in row]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


def test_the_benchmark_runs(tmp_path: Path) -> None:
    words = ["--shape", "tiny", "--tokens", "2048", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/bench_gpu.py"), *words], capture_output=True, text=True, env=ENVIRONMENT, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text())
