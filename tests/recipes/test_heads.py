"""EAGLE heads through the whole pipeline from the command line: every format, somebody else's checkpoint, one store for all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtptrain.files import read_json
from tests.recipes.test_pipeline import ROOT

_TINY = [
    "+recipe=tiny",
    "train.max_updates=6",
    "train.eval_every=6",
    "head=eagle3",
    "head.draft_vocabulary=80",
    "head.aux_captures=[after_0,after_1]",
]


def run(folder: Path, job: str, *overrides: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"mtptrain.{job}", *overrides]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an eagle3 head in every format that needs no more than three layers of its target."""
    folder = tmp_path_factory.mktemp("heads")
    done = run(folder, "train", *_TINY, "export.engines=[vllm,sglang,trtllm,hf]")
    assert done.returncode == 0, done.stderr
    assert "the head drafts 80 of 320 ids" in done.stdout
    return folder


def head(folder: Path, label: str) -> Path:
    return folder / "runs" / "tiny" / "heads" / label


def test_each_engine_gets_a_folder_that_says_how_far_it_is_proven(finished: Path) -> None:
    export = head(finished, "eagle3") / "export"
    proofs = {f.name: read_json(f / "mtptrain.json")["proof"] for f in export.iterdir() if f.is_dir()}
    assert proofs == {"vllm.unproven": "reference", "sglang": "contract", "trtllm": "contract", "hf": "contract"}
    report = read_json(head(finished, "eagle3") / "report" / "report.json")
    assert report["head"]["draft_vocabulary"] == 80
    assert report["head"]["captures"] == ["after_0", "after_1"]
    assert report["head"]["store_bytes_per_token"] == 3 * (64 + 4 + 2 * 4) + 5
    assert report["certificate"]["drafted_token_agreement"] == 1.0


def test_the_store_grows_by_what_a_head_needs_and_is_not_made_again(tmp_path: Path) -> None:
    first = run(tmp_path, "train", "+recipe=tiny", "head=mtp", "train.max_updates=2", "train.eval_every=2")
    assert first.returncode == 0, first.stderr
    store = tmp_path / "runs/tiny/store"
    before = {f.name: f.stat().st_mtime_ns for f in store.glob("*.final.safetensors")}
    second = run(tmp_path, "train", *_TINY)
    assert second.returncode == 0, second.stderr
    assert {f.name: f.stat().st_mtime_ns for f in store.glob("*.final.safetensors")} == before
    assert len(list(store.glob("*.after_1.safetensors"))) == len(before)
    assert (head(tmp_path, "mtp") / "export").is_dir()
    again = run(tmp_path, "train", "+recipe=tiny", "head=mtp", "train.max_updates=2", "train.eval_every=2")
    assert again.returncode == 0, again.stderr
    assert "heads/mtp/train is complete" in again.stdout  # the first head is not stale


@pytest.mark.parametrize("layout", ["hf", "vllm.unproven", "sglang", "trtllm"])
def test_somebody_elses_head_is_measured_as_it_is(finished: Path, layout: str) -> None:
    """What was exported, read again as a checkpoint of a public layout, accepts what it accepted."""
    folder = head(finished, "eagle3") / "export" / layout
    label = f"theirs-{layout}"
    done = run(finished, "validate", "+recipe=tiny", "head=eagle3", f"head.checkpoint={folder}", f"head.label={label}")
    assert done.returncode == 0, done.stderr
    theirs, ours = (read_json(head(finished, name) / "report" / "report.json") for name in (label, "eagle3"))
    assert theirs["walk"]["overall"] == ours["walk"]["overall"]
    assert not (head(finished, label) / "train").exists()


def test_training_starts_from_a_checkpoint(finished: Path) -> None:
    folder = head(finished, "eagle3") / "export" / "hf"
    command = ["+recipe=tiny", "head=eagle3", f"head.checkpoint={folder}", "head.label=warm", "train.max_updates=1", "train.optim.lr=1e-9"]
    done = run(finished, "train", *command)
    assert done.returncode == 0, done.stderr
    walks: list[Any] = [read_json(head(finished, name) / "report" / "report.json")["walk"]["overall"] for name in ("warm", "eagle3")]
    assert walks[0] == walks[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head=eagle", "export.engines=[trtllm]"], "export.engines=trtllm: TensorRT-LLM cannot express this head"),
        (["export.engines=[sglang]"], "export.engines=sglang: SGLang cannot express this head"),
        (["head=eagle3", "head.norm_before_residual=true", "export.engines=[vllm,sglang]"], "norm_before_residual"),
        (["head=eagle3", "export.engines=[gguf]"], "export.engines=gguf: llama.cpp cannot express this head"),
        (["head=eagle", "head.fc_bias=true"], "vLLM's own class cannot express this head (head.fc_bias=true"),
        (["head=eagle3", "head.aux_captures=[after_0,after_7]"], "head.aux_captures=after_7: the target's last layer is after_2"),
        (["head=eagle3", "head.checkpoint=nowhere"], "nowhere"),
    ],
)
def test_what_an_engine_cannot_express_is_refused_before_anything_is_made(tmp_path: Path, overrides: list[str], message: str) -> None:
    done = run(tmp_path, "train", "+recipe=tiny", *overrides)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs/tiny/data/manifest.json").exists()


def test_the_first_weights_are_as_good_where_training_computes_in_bfloat16(tmp_path: Path) -> None:
    """Sums of products rounded to bfloat16 make a first head whose first gradient is three times as large."""
    norms = {}
    for dtype in ("float32", "bfloat16"):
        short = ["train.max_updates=1", "train.log_every=1", "validate.measure=[walk]", "export.engines=[hf]"]
        lookup = ["store.codec=bf16", "head=lookup", "head.aux_captures=[after_0,after_1]", f"head.label={dtype}"]
        done = run(tmp_path, "train", "+recipe=tiny", *lookup, *short, f"train.dtype={dtype}")
        assert done.returncode == 0, done.stderr
        norms[dtype] = json.loads((head(tmp_path, dtype) / "train" / "log.jsonl").read_text().splitlines()[0])["grad_norm"]
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.1)  # the rest of bfloat16's rounding moves it by 3 %
