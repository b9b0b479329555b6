"""The tiny recipe run for real, through the command people type: every stage, reuse, staleness, kill and resume, sweeps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtptrain.files import hash_file

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
HEAD = "heads/mtp"
EXPORTED = "heads/mtp/export/vllm.unproven"


def command(job: str, folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", f"mtptrain.{job}", "+recipe=tiny", "head=mtp", f"root={folder}", *overrides]


def run(job: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(job, folder, *overrides), capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=300)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    done = run("train", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_one_command_ends_with_an_exported_head_and_its_report(finished: Path) -> None:
    tiny = finished / "tiny"
    report = json.loads((tiny / HEAD / "report/report.json").read_text())
    assert report["schema"] == 3
    for measurement in (report["walk"], report["reference"]):
        assert measurement["overall"]["mean_accepted_length"] >= 1.0
        assert len(measurement["overall"]["accept_rate_per_position"]) == report["k"] == 3
    expected = report["expected_at_temperature_1"]
    assert expected["rows"] > 0
    assert all(1 <= expected[draft]["expected_accepted_length"] <= 1 + report["k"] for draft in ("greedy_draft", "sampled_draft"))
    assert report["engine"] is None
    assert report["certificate"]["output_agreement"] == 1.0
    assert report["certificate"]["drafted_token_agreement"] >= 0.98
    assert report["same_documents"]["walk"]["overall"]["drafts"] == report["reference"]["overall"]["drafts"]
    assert "plotly" in (tiny / HEAD / "report/report.html").read_text()
    about = json.loads((tiny / EXPORTED / "mtptrain.json").read_text())
    assert about["proof"] == "reference"
    assert about["conventions"]["concat_order"] == ["embedding", "hidden"]
    assert "fc.weight" in load_file(tiny / EXPORTED / "model.safetensors")
    for artefact in ("data", "store", f"{HEAD}/train", f"{HEAD}/report", EXPORTED):
        assert (tiny / artefact / "config.yaml").exists(), artefact


def test_a_finished_run_is_reused_and_a_changed_one_is_refused_by_key(finished: Path) -> None:
    weights = finished / "tiny" / HEAD / "train/best/head.safetensors"
    before = weights.stat().st_mtime_ns
    again = run("train", finished)
    assert again.returncode == 0, again.stderr
    assert weights.stat().st_mtime_ns == before
    changed = run("train", finished, "seed=5")
    assert changed.returncode == 2
    assert "seed: 0 -> 5" in changed.stderr
    assert "on_stale=redo" in changed.stderr
    assert "Traceback" not in changed.stderr


def test_a_threshold_judges_what_was_measured_again_and_a_damaged_export_is_written_again(finished: Path) -> None:
    export = finished / "tiny" / HEAD / "export"
    report = finished / "tiny" / HEAD / "report/report.json"
    weights = (export / "vllm.unproven/model.safetensors").read_bytes()
    measured = json.loads(report.read_text())["walk"]
    done = run("export", finished, "validate.min_accepted_length=9")
    assert done.returncode == 2
    assert [p.name for p in export.iterdir() if p.is_dir()] == ["vllm.rejected"]
    assert run("validate", finished).returncode == 0
    assert json.loads(report.read_text())["walk"] == measured
    assert run("export", finished).returncode == 0
    (export / "vllm.unproven/model.safetensors").write_bytes(b"")
    done = run("export", finished)
    assert done.returncode == 0
    assert "damaged or missing" in done.stdout
    assert (export / "vllm.unproven/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    ("job", "missing"),
    [("precompute", "mtptrain.prepare"), ("validate", "mtptrain.train"), ("export", "mtptrain.validate")],
)
def test_a_job_alone_says_which_command_makes_what_it_lacks(tmp_path: Path, job: str, missing: str) -> None:
    done = run(job, tmp_path)
    assert done.returncode == 2
    assert missing in done.stderr
    assert "Traceback" not in done.stderr


def test_a_shut_gate_exports_nothing_and_exits_non_zero(finished: Path) -> None:
    done = run("train", finished, "validate.min_accepted_length=9", "head.label=gated")
    assert done.returncode == 2
    assert "below validate.min_accepted_length=9" in done.stderr
    assert [p.name for p in (finished / "tiny/heads/gated/export").iterdir() if p.is_dir()] == ["vllm.rejected"]


def test_a_head_with_a_norm_off_is_exported_for_the_plugin_and_refused_for_the_stock_class_before_training(finished: Path) -> None:
    done = run("train", finished, "head.norms.hidden=false", "head.label=stock-no-norm", "export.vllm.layout=stock")
    assert done.returncode == 2
    assert "head.norms.hidden=false" in done.stderr
    assert not (finished / "tiny/heads/stock-no-norm").exists()
    done = run("train", finished, "head.norms.hidden=false", "head.label=no-hidden-norm")
    assert done.returncode == 0, done.stderr
    about = json.loads((finished / "tiny/heads/no-hidden-norm/export/vllm.unproven/mtptrain.json").read_text())
    assert about["layout"] == "plugin"
    assert about["conventions"]["recycled_hidden"] == "post_norm"


@pytest.mark.slow  # test_faults.py kills each stage; here one run is killed again and again
def test_kill_9_anywhere_then_resume_gives_the_same_bits(finished: Path, tmp_path: Path) -> None:
    """Killed again and again after ever longer times until a run gets through; documents, store and head equal the whole run's."""
    for attempt in range(40):
        process = subprocess.Popen(
            command("train", tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path, env=ENVIRONMENT
        )
        deadline = time.monotonic() + 2 * 1.3**attempt  # from before a fast machine has done anything
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            continue
        assert process.returncode == 0
        break
    else:
        pytest.fail("no run got through")
    assert attempt >= 2, "the runs were too short to be killed"
    for file in (
        "data/documents.parquet",
        "store/00000.tokens.safetensors",
        "store/00000.final.safetensors",
        f"{HEAD}/train/best/head.safetensors",
        f"{EXPORTED}/model.safetensors",
    ):
        assert hash_file(tmp_path / "tiny" / file) == hash_file(finished / "tiny" / file), file


def test_a_sweep_shares_data_and_store_and_overwrites_nothing(finished: Path) -> None:
    done = run("train", finished, "-m", "train.optim.lr=1e-3,3e-3", "validate.measure=[walk]")
    assert done.returncode == 0, done.stderr
    heads = [f.name for f in (finished / "tiny/heads").iterdir() if "lr" in f.name]
    assert len(heads) == 2
    for head in heads:
        assert (finished / "tiny/heads" / head / "report/report.json").exists()
