"""The plugin and the capture on two tensor-parallel ranks of a real vLLM."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mtptrain.config import Config, VllmLayout
from mtptrain.engines.process import require_engine
from mtptrain.engines.vllm import VllmCapturer, llm_arguments
from mtptrain.exporters.vllm import from_vllm, to_vllm
from mtptrain.stages.engine_trial import NONE, certify, draft_of, run_trials
from mtptrain.target.model import capture_packed, load_model
from tests.engine.case import make_case

pytestmark = pytest.mark.engine


def test_two_ranks_draft_and_capture_what_one_does(tmp_path: Path) -> None:
    case = make_case(tmp_path, "llama")
    cfg = dataclasses.replace(case.cfg, engine=dataclasses.replace(case.cfg.engine, tensor_parallel=2))
    engine = require_engine(Config(), "this test")
    folder = tmp_path / "plugin"
    folder.mkdir()
    to_vllm(case.head, case.context.spec, VllmLayout.plugin).write(folder)
    case.head.load_state_dict(from_vllm(folder, case.head))
    runs = run_trials(cfg, case.context, engine, {NONE: None, "plugin": draft_of(folder, case.cfg.head.kind)}, case.store, case.documents)
    found = certify(cfg, case.context, case.head, case.store, case.documents, runs[NONE], runs["plugin"])
    assert found.drafts.compared > 500
    assert found.drafts.raw == found.outputs.raw == found.target.raw == 1.0

    documents = [case.store.tokens(i).tolist() for i in case.documents[:4]]
    arguments = llm_arguments(cfg, case.context.folder, case.context.spec, 128, eager=True)
    capturer = VllmCapturer(cfg, engine, tmp_path / "capture", arguments, ["final", "after_1"])
    states = capturer.states(documents)
    capturer.close()
    model = load_model(case.context.folder, torch.float32, torch.device("cpu"), False)
    for name, expected in capture_packed(model, documents, ["final", "after_1"]).items():
        assert states[name].shape == expected.shape
        assert float(((states[name].double() - expected.double()).abs() / expected.double().abs().clamp_min(1e-2)).max()) <= 2**-7
