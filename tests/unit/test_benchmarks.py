"""What the benchmarks reckon with: the floor of a training step against counted products, and the gate's idea of worse."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtptrain.config import HeadKind, OutputProjection
from mtptrain.heads.lm_head import LmHead
from mtptrain.heads.unroll import Unroll, true_token_steps
from mtptrain.losses import distillation_kl
from tests.recipes.test_pipeline import ENVIRONMENT, ROOT
from tests.unit.heads import HIDDEN, VOCAB, bound, small_batch, small_head, small_spec


def tool(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": HeadKind.mtp},
        {"kind": HeadKind.eagle},
        {"kind": HeadKind.eagle3, "lm_head": OutputProjection.target, "fc_norm": True},
        {"kind": HeadKind.eagle3, "num_kv_heads": 4},
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_floor_of_a_step_is_what_its_products_take(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], steps: int) -> None:
    """One chunk for all rows, so that a teacher state is projected once; the counter's matrix products are those with weights. Beyond the
    floor an eagle head computes the gradient of the embeddings it fuses at later steps.
    """
    bench = tool(monkeypatch, "bench_train")
    head = small_head(small_spec(num_layers=8), **options)
    batch = small_batch([20, 15], [[(4, 20)], [(2, 9), (10, 15)]], steps, captures=("final", *head.captures))
    drafter = bound(head)
    counter = FlopCounterMode(display=False)
    with counter:
        found = list(true_token_steps(Unroll(drafter, 2), batch.rows, batch.token_T, batch.states, steps))
        rows = torch.cat([row for row, _ in found])
        teachers = torch.cat([batch.rows.teacher_RK[row, k] for k, (row, _) in enumerate(found)])
        own = None if head.lm_head is None else head.lm_head.weight
        states = torch.cat([state for _, state in found])
        loss, _ = distillation_kl(states, torch.ones(len(rows)), teachers, batch.final_TH, drafter.lm_head, 4096, own)
        loss.backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    beyond = 0
    if options["kind"] is HeadKind.eagle:
        beyond = head.fc.weight.numel() * sum(len(row) for row, _ in found[1:])  # half of 2 a weight
    assert products == bench.weight_flops(head, batch.rows, VOCAB) + beyond


def test_the_profile_tells_loss_and_optimizer_by_what_is_around_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's product has the very shape of the loss's."""
    bench = tool(monkeypatch, "bench_train")
    layer = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    states, ids = torch.randn(6, HIDDEN), torch.arange(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        loss, _ = distillation_kl(layer(states), torch.ones(6), ids, states, LmHead(torch.randn(HIDDEN, HIDDEN)), 4096)
        loss.backward()
        optimizer.step()
    parts: dict[str, set[str]] = {}
    for event in found.events():
        parts.setdefault(bench._part(event), set()).add(event.name)
    assert "aten::mm" in parts["products with the vocabulary"]
    assert "aten::mm" in parts["other products with weights"]
    assert "aten::exp_" in parts["passes over logits"]
    assert not {"aten::mm", "aten::addmm"} & (parts["passes over logits"] | parts["optimizer"] | parts["the rest"])
    assert parts["optimizer"]


@pytest.mark.parametrize(("now", "worse"), [(0.76, False), (0.74, True), (2.0, False)])
def test_the_gate_shuts_on_a_ratio_that_fell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], now: float, worse: bool
) -> None:
    gate = tool(monkeypatch, "bench_gate")
    name = f"precompute: {gate.BENCHMARKS['precompute'][0].name}"
    assert gate.compare({name: now}, {name: 1.0}) == ([name] if worse else [])
    assert ("WORSE" in capsys.readouterr().out) is worse


def test_the_gate_shuts_on_memory_that_grew_and_has_no_opinion_without_a_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tool(monkeypatch, "bench_gate")
    name = f"memory: {gate.BENCHMARKS['memory'][0].name}"
    assert gate.compare({name: 1.12}, {name: 1.0}) == [name]
    assert gate.compare({name: 1.08}, {name: 1.0}) == []
    assert gate.compare({name: 9.0}, {}) == []


def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    file, command = tmp_path / "found.json", [sys.executable, str(ROOT / "tools/bench_gpu.py")]
    words = ["--device", "cpu", "--shape", "tiny", "--heads", "mtp", "--tokens", "512", "--updates", "1", "--layers", "2"]
    done = subprocess.run([*command, *words, "--json", str(file)], capture_output=True, text=True, env=ENVIRONMENT, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["tiny"]
    assert all(row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 for row in found.values())
    refused = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}, timeout=100)
    assert refused.stderr.startswith("error: this PyTorch sees no CUDA device")
