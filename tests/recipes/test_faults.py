"""Every stage broken at random points and run again, by tools/fault_test.py: what is left equals a run that was left alone."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.test_pipeline import ENVIRONMENT, ROOT

STAGES = ["prepare", "precompute", "train", "validate", "export"]
VARIES = re.compile(r"seconds|_per_second|: hash$|: results\.report$")
"""In the keys that two runs left alone may differ in: durations, and hashes of what holds them."""


def break_it(tmp_path: Path, stage: str, fault: str, points: int, *options: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "tools/fault_test.py"), "--stage", stage, "--fault", fault, "--points", str(points)]
    command += options
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(file.read_text())[stage]
    assert found["faults"] == []
    assert [key for key in found["varies"] if not VARIES.search(key)] == []
    return found


@pytest.mark.parametrize("fault", ["term", "big"])
@pytest.mark.parametrize("stage", [*(pytest.param(s, marks=pytest.mark.slow) for s in STAGES if s != "train"), "train"])
def test_a_signal_or_files_that_may_not_grow(tmp_path: Path, stage: str, fault: str) -> None:
    assert break_it(tmp_path, stage, fault, 3)["points"] > 0


@pytest.mark.parametrize("fault", ["full", "readonly"])
def test_a_disk_that_is_full_or_read_only(tmp_path: Path, fault: str) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("nothing may be mounted here; --fault big and the unit tests fill disks otherwise")
    subprocess.run(["umount", str(tmp_path)], check=True)
    assert break_it(tmp_path, "train", fault, 3)["points"] == 3


@pytest.mark.parametrize("points", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_any_file_of_a_finished_run_damaged(tmp_path: Path, points: int) -> None:
    assert break_it(tmp_path, "train", "damage", points)["points"] == points


@pytest.mark.parametrize("stage", STAGES)
def test_kill_9_at_any_point(tmp_path: Path, stage: str) -> None:
    found = break_it(tmp_path, stage, "kill", 10)
    assert found["points"] == 10
