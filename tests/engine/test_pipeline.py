"""The whole path with a real vLLM: an int8 target answered, captured, trained for, validated and exported; then served as printed."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.config import Config, Dtype, Engine, HeadConfig, HeadKind, VllmLayout
from mtptrain.engines.process import find_engine
from mtptrain.errors import UserError
from mtptrain.files import read_json
from mtptrain.stages import export, precompute, prepare, train, validate
from mtptrain.stages.context import open_store
from mtptrain.target.tiny import make_tiny_target
from tests.engine.case import make_case, make_config
from tests.engine.test_backends import with_engine
from tests.engine.w8a8 import quantize

pytestmark = pytest.mark.engine
INT8_DTYPE = Dtype.bfloat16 if torch.cpu._is_avx512_supported() else Dtype.float32  # vLLM's AVX-512 int8 product takes no float32


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("pipeline")
    target = quantize(make_tiny_target(folder / "target", "llama", hidden_size=128, head_dim=32))
    cfg = with_engine(make_config(folder, str(target)), "int8")
    cfg = dataclasses.replace(cfg, target=dataclasses.replace(cfg.target, dtype=INT8_DTYPE))
    cfg = dataclasses.replace(cfg, validate=dataclasses.replace(cfg.validate, batch_sizes=[1, 2]))
    for stage in (prepare, precompute, train, validate, export):
        stage.run(cfg)
    return cfg


def test_an_int8_target_ends_with_an_export_that_the_engine_proved(finished: Config) -> None:
    report = read_json(finished.report_dir / "report.json")
    assert report["proof"] == "engine"
    found = report["certificate"]
    assert found["between"] == ["reference", "engine"]
    assert found["drafted_token_agreement"] >= 0.98
    assert found["output_agreement"] == 1.0
    # activations are quantized step by step, so a rounding of bfloat16 can move one by a whole int8 step
    assert found["raw_target_agreement"] >= (0.98 if INT8_DTYPE is Dtype.float32 else 0.9)
    assert found["drafts_altered_by_the_scheduler"] == 0
    assert report["engine"]["overall"]["drafts"] == report["counters"]["drafts"]
    assert set(report["baselines"]) == {"ngram"}
    assert {(row["method"], row["batch_size"]) for row in report["speed"]["rows"]} == {
        (m, b) for m in ("none", "head", "ngram") for b in (1, 2)
    }
    assert len(report["samples"]) == 2
    for name in ("walk", "reference", "engine"):
        assert report["same_documents"][name]["overall"]["generated_tokens"] == report["walk"]["overall"]["generated_tokens"]
    assert "plotly" in (finished.report_dir / "report.html").read_text()
    about = read_json(finished.export_dir / "vllm" / "mtptrain.json")
    assert (about["proof"], about["layout"], about["gate"]["open"]) == ("engine", "plugin", True)
    assert about["certificate"] == found


def test_a_shut_gate_keeps_the_candidate_under_a_name_that_says_so(finished: Config) -> None:
    other = dataclasses.replace(finished.head, label="rejected")
    strict = dataclasses.replace(
        finished, head=other, validate=dataclasses.replace(finished.validate, min_accepted_length=3.9, batch_sizes=[])
    )
    train.run(strict)
    with pytest.raises(UserError, match=r"the gate is shut.*below validate\.min_accepted_length=3\.9.*\*\.rejected"):
        validate.run(strict)
    assert [p.name for p in strict.export_dir.iterdir() if p.is_dir()] == ["vllm.rejected"]
    assert read_json(strict.export_dir / "vllm.rejected" / "mtptrain.json")["gate"]["open"] is False
    with pytest.raises(UserError, match="the gate is shut"):
        export.run(strict)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return make_case(tmp_path_factory.mktemp("serve")).cfg


SERVED = {
    "mtp, stock": (HeadConfig(), VllmLayout.stock),
    "mtp, plugin": (HeadConfig(), VllmLayout.plugin),
    "eagle3, speculators": (HeadConfig(kind=HeadKind.eagle3, draft_vocabulary=120), VllmLayout.speculators),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_printed_command_serves_and_drafts_are_accepted(
    plain: Config, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, layout = SERVED[name]
    loss = dataclasses.replace(plain.train.loss, hidden_weight=0.0 if head.kind is HeadKind.eagle3 else 1.0)
    cfg = dataclasses.replace(
        plain,
        head=dataclasses.replace(head, label=layout.name),
        train=dataclasses.replace(plain.train, loss=loss),
        export=dataclasses.replace(plain.export, vllm=dataclasses.replace(plain.export.vllm, layout=layout)),
        engine=dataclasses.replace(plain.engine, python="none"),
        validate=dataclasses.replace(plain.validate, reference_documents=1),
    )
    for stage in (precompute, train, validate, export):
        stage.run(cfg)
    printed = re.search(r"serve +(vllm serve .*)", capsys.readouterr().out)
    assert printed is not None
    engine = find_engine(Config())
    assert engine is not None
    program, *words = shlex.split(printed[1])
    assert program == "vllm"
    with serving([str(Path(engine.python).parent / program), *words], tmp_path / "serve.log") as url:
        prompt = open_store(cfg, []).tokens(0)[:23].tolist()  # a training document: the head knows how it goes on
        asked = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True, "model": words[1]}
        answer = post(f"{url}/v1/completions", asked)
        assert answer["usage"]["completion_tokens"] == 48
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    accepted = re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} ([\d.e+]+)$", metrics, re.M)
    assert accepted is not None
    assert float(accepted[1]) > 0


def test_an_eagle3_head_ends_with_an_export_that_the_engine_proved(plain: Config) -> None:
    head = HeadConfig(kind=HeadKind.eagle3, draft_vocabulary=120, aux_captures=["after_0", "after_1"], label="proven")
    cfg = dataclasses.replace(
        plain,
        head=head,
        train=dataclasses.replace(plain.train, loss=dataclasses.replace(plain.train.loss, hidden_weight=0.0)),
        export=dataclasses.replace(plain.export, engines=[Engine.vllm, Engine.sglang, Engine.trtllm, Engine.hf]),
    )
    for stage in (precompute, train, validate, export):
        stage.run(cfg)
    report = read_json(cfg.report_dir / "report.json")
    assert report["proof"] == "engine"
    found = report["certificate"]
    assert found["drafted_tokens_compared"] > 0
    # the engine's logits are within 1.2e-4 of the reference's (14,000 float32 drafts measured): a nearer choice may fall either way
    assert all(d["margin"] is not None and d["margin"] < 2e-4 for d in found["differing_drafts"])
    assert found["drafted_token_agreement"] == 1.0 - len(found["differing_drafts"]) / found["drafted_tokens_compared"]
    assert found["output_agreement"] == 1.0
    proofs = {f.name: read_json(f / "mtptrain.json")["proof"] for f in cfg.export_dir.iterdir() if f.is_dir()}
    assert proofs == {"vllm": "engine", "sglang": "contract", "trtllm": "contract", "hf": "contract"}
    assert '"method": "eagle3"' in report["serve"]
    again = read_json(cfg.report_dir / "runs" / "head.json")
    (cfg.report_dir / "manifest.json").unlink()  # as after an interruption: finished engine runs are kept
    validate.run(cfg)
    assert read_json(cfg.report_dir / "runs" / "head.json") == again


@contextlib.contextmanager
def serving(command: list[str], log: Path) -> Iterator[str]:
    """vLLM's server on a free port of this machine; ended afterwards with all its processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    small = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", "--enforce-eager", "--dtype", "float32"]
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if k not in dropped}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(log, "wb") as out:
        process = subprocess.Popen([*command, *small], stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=120))
