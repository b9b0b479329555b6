"""A sweep of two heads of the tiny recipe, for real: it ends with their comparison, which the job makes again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def run(job: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"mtptrain.{job}", "+recipe=tiny", f"root={folder}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=300)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("runs")
    done = run("train", folder, "-m", "head=mtp,eagle3", "train.max_updates=4")
    assert done.returncode == 0, done.stderr
    return folder / "tiny", done.stdout


def rows_of(out: str) -> list[list[str]]:
    """Cells of the tables printed last: the heads', in order of the comparison."""
    _, found, tables = out.partition("heads of tiny, each by its strongest measurement")
    assert found
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in tables.splitlines() if line.startswith("│")]


def test_a_sweep_of_two_heads_ends_with_their_comparison(swept: tuple[Path, str]) -> None:
    tiny, out = swept
    record = json.loads((tiny / "comparison.json").read_text())
    assert set(record["heads"]) == {"mtp", "eagle3"}
    assert record["notes"] == record["left_out"] == []
    for label, head in record["heads"].items():
        report = json.loads((tiny / "heads" / label / "report/report.json").read_text())
        assert (head["kind"], head["k"], head["measured_by"]) == (label, 3, "reference")
        assert head["mean_accepted_length"] == report["reference"]["overall"]["mean_accepted_length"]
        assert head["walk"]["mean_accepted_length"] == report["walk"]["overall"]["mean_accepted_length"]
        assert head["training_seconds"] == report["training"]["seconds"] > 0
        assert head["parameters"] > 0
        assert head["gate_open"] is True
        assert head["exports"] == {"vllm.unproven": "reference"}
    assert record["heads"]["mtp"]["captures"] == ["final"]
    assert len(record["heads"]["eagle3"]["captures"]) == 3
    assert record["heads"]["eagle3"]["store_bytes_per_token"] > record["heads"]["mtp"]["store_bytes_per_token"]
    page = (tiny / "comparison.html").read_text()
    assert "plotly" in page
    assert all(f'<th scope="row">{label}</th>' in page for label in record["heads"])
    rows = [row for row in rows_of(out) if row[0]]
    assert [row[0] for row in rows] == [*record["heads"]] * 2
    for row in rows[:2]:
        assert row[4] == f"{record['heads'][row[0]]['mean_accepted_length']:.3f}"
    assert all(row[-1] == "vllm.unproven: reference" for row in rows[2:])
    assert out.rstrip().endswith(f"compare: {tiny}/comparison.html and comparison.json")


def test_the_job_makes_the_same_comparison_again(swept: tuple[Path, str]) -> None:
    tiny, out = swept
    files = {name: (tiny / name).read_bytes() for name in ("comparison.json", "comparison.html")}
    for name in files:
        (tiny / name).unlink()
    done = run("compare", tiny.parent)
    assert done.returncode == 0, done.stderr
    assert {name: (tiny / name).read_bytes() for name in files} == files
    assert rows_of(done.stdout) == rows_of(out)


def test_a_folder_without_reports_is_refused(tmp_path: Path) -> None:
    done = run("compare", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path}/tiny: a comparison needs the reports of two heads and there is none; ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
