"""Stores of two machines become one run, for real: merged, extended by captures, trained on, damaged and mended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.test_pipeline import ENVIRONMENT


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, words in (("a", ("river", "bread", "moon")), ("b", ("rust", "sleep", "moon"))):
        rows = [{"prompt": f"{verb} {word}."} for verb in ("Explain", "Draw", "Count", "Sing about") for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = ["+recipe=tiny", "head=mtp", f"name={name}", "data.source=files", f"data.train=[{name}.jsonl]", "store.shard_tokens=512"]
        for job in ("prepare", "precompute"):
            done = run(folder, f"mtptrain.{job}", *own)
            assert done.returncode == 0, done.stderr
    done = run(folder, "mtptrain.store", "merge", "runs/all", "runs/a", "runs/b")
    assert done.returncode == 0, done.stderr
    assert "-> runs/all" in done.stdout
    return folder


def test_a_merged_run_is_trained_on_like_any_other(merged: Path) -> None:
    """lookup asks for streams that neither store has: they are computed for the merged shards, and nothing else is."""
    before = {p.name: p.stat().st_mtime_ns for p in (merged / "runs/all/store").glob("*.final.safetensors")}
    short = ["train.max_updates=4", "train.eval_every=4", "validate.documents=4", "validate.reference_documents=1"]
    command = ["+recipe=tiny", "name=all", "data.source=files", "data.train=[a.jsonl]", "store.shard_tokens=512", *short]
    done = run(merged, "mtptrain.train", *command)
    assert done.returncode == 0, done.stderr
    assert "prepare: runs/all/data is complete" in done.stdout
    assert {p.name: p.stat().st_mtime_ns for p in (merged / "runs/all/store").glob("*.final.safetensors")} == before
    assert len(list((merged / "runs/all/store").glob("*.after_1.safetensors"))) == len(before)
    report = json.loads((merged / "runs/all/heads/lookup/report/report.json").read_text())
    assert report["codec_error"]["codec"]["final"] == "int8 1"
    assert run(merged, "mtptrain.store", "verify", "runs/all").returncode == 0
    refused = run(merged, "mtptrain.train", *command, "target.dtype=bfloat16", "data.responses.max_new_tokens=9")
    assert refused.returncode == 2
    assert "was made from other inputs" in refused.stderr


def test_a_damaged_file_is_named_and_made_anew_alone(merged: Path) -> None:
    store = merged / "runs/a/store"
    file = store / "00000.final.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    done = run(merged, "mtptrain.store", "verify", "runs/a")
    assert done.returncode == 2
    assert "00000.final.safetensors is corrupt" in done.stdout
    others = {p.name: p.stat().st_mtime_ns for p in store.glob("*.safetensors")}
    own = ["+recipe=tiny", "head=mtp", "name=a", "data.source=files", "data.train=[a.jsonl]", "store.shard_tokens=512"]
    again = run(merged, "mtptrain.precompute", *own)
    assert again.returncode == 0, again.stderr
    assert "making anew" in again.stdout
    assert file.read_bytes() == sound
    assert {name: p for name, p in others.items() if (store / name).stat().st_mtime_ns != p} == {}
    assert run(merged, "mtptrain.store", "verify", "runs/a").returncode == 0
