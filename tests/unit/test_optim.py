"""The schedule against its closed form; moments saved and loaded by name."""

import math

import pytest
import torch

from mtptrain.config import OptimConfig, Schedule
from mtptrain.optim import build_adamw, load_moments, lr_factor, moments


def test_cosine_with_warmup() -> None:
    config = OptimConfig(warmup=0.1, min_lr_ratio=0.1)
    factors = [lr_factor(config, u, 100) for u in range(100)]
    assert factors[:3] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
    assert factors[10] == pytest.approx(1.0)
    assert factors[99] == pytest.approx(0.1)
    assert factors[10 + 44] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 44 / 89)))
    assert max(factors) <= 1.0


def test_wsd_is_flat_then_linear() -> None:
    config = OptimConfig(schedule=Schedule.wsd, warmup=0.0, decay=0.2, min_lr_ratio=0.0)
    factors = [lr_factor(config, u, 50) for u in range(50)]
    assert factors[:41] == [1.0] * 41
    assert factors[40:] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_constant() -> None:
    assert lr_factor(OptimConfig(schedule=Schedule.constant, warmup=0.0), 7, 10) == 1.0


def test_moments_round_trip_by_name() -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        optimizer = build_adamw(OptimConfig(weight_decay=0.1), module)
        for _ in range(steps):
            step(module, optimizer)
        return module, optimizer

    def step(module: torch.nn.Module, optimizer: torch.optim.AdamW) -> None:
        optimizer.zero_grad()
        (module(torch.ones(2, 3)) ** 3).sum().backward()
        optimizer.step()

    module, optimizer = trained(2)
    fresh, other = trained(0)
    fresh.load_state_dict(module.state_dict())
    load_moments(other, fresh, {n: t.clone() for n, t in moments(optimizer, module).items()})
    step(module, optimizer)
    step(fresh, other)
    for a, b in zip(module.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_matrices_decay() -> None:
    module = torch.nn.Linear(2, 2)
    groups = build_adamw(OptimConfig(weight_decay=0.3), module).param_groups
    assert [(len(g["params"]), g["weight_decay"], g["params"][0].dim()) for g in groups] == [(1, 0.3, 2), (1, 0.0, 1)]
