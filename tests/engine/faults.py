"""Exported folders broken on purpose, and what a real vLLM makes of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtptrain.config import VllmLayout
from mtptrain.engines.vllm import EngineRun
from mtptrain.exporters.vllm import to_vllm
from mtptrain.stages.engine_trial import NONE, certify, draft_of
from tests.engine.case import Case

Tensors = dict[str, torch.Tensor]
Folder = dict[str, Any]
Fault = Callable[[Folder, Tensors], None]


def ones(name: str) -> Fault:
    """A norm whose weight is lost."""
    return lambda config, tensors: tensors.update({name: torch.ones_like(tensors[name])})


def flag(key: str, value: bool) -> Fault:
    return lambda config, tensors: config.update({key: value})


@dataclass
class Runs:
    case: Case
    runs: dict[str, EngineRun]

    def agreement(self, name: str) -> float:
        """Of the run's drafts with the reference head, whose weights are the unbroken ones."""
        c = self.case
        return certify(c.cfg, c.context, c.head, c.store, c.documents, self.runs[NONE], self.runs[name]).drafts.agreement


def with_broken_copies(case: Case, folder: Path, layout: VllmLayout, faults: dict[str, Fault]) -> dict[str, dict[str, Any] | None]:
    """Drafts by name: the right folder, called after its layout, and a copy of it for each fault."""
    right = folder / layout.name
    right.mkdir()
    rows_DH = case.context.bind(case.head).lm_head.weight_VH
    to_vllm(case.head, case.context.spec, layout, rows_DH=rows_DH).write(right)
    drafts: dict[str, dict[str, Any] | None] = {layout.name: draft_of(right, case.cfg.head.kind)}
    for name, break_it in faults.items():
        config, tensors = json.loads((right / "config.json").read_text()), load_file(right / "model.safetensors")
        break_it(config, tensors)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / name / "model.safetensors")
        drafts[name] = draft_of(folder / name, case.cfg.head.kind)
    return drafts


def norms_that_matter(case: Case) -> None:
    """Every norm weight is changed, so that a lost one shows."""
    with torch.no_grad():
        for name, p in case.head.named_parameters():
            if p.dim() == 1:
                p.mul_(1 + 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
