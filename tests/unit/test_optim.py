"""The schedule against its closed form; moments saved and loaded by name."""

import math

import pytest
import torch

from mtptrain.config import HeadKind, OptimConfig, Schedule
from mtptrain.optim import build_adamw, load_moments, lr_factor, moments, set_lr
from tests.unit.heads import small_head, small_spec


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


@pytest.mark.parametrize(("kind", "outside"), [(HeadKind.mtp, {"enorm", "hnorm", "eh_proj", "norm"}), (HeadKind.eagle, {"fc"})])
def test_what_lies_outside_the_layer_has_its_share_of_the_rate(kind: HeadKind, outside: set[str]) -> None:
    head = small_head(small_spec(), kind=kind)
    optimizer = build_adamw(OptimConfig(fusion_lr=0.2), head)
    set_lr(optimizer, 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in head.named_parameters()}
    assert len(found) == len(rates)
    assert {name.split(".")[0] for name, rate in found.items() if rate == 0.1} == outside
    assert {rate for name, rate in found.items() if name.startswith("layer.")} == {0.5}
    set_lr(other := build_adamw(OptimConfig(), head), 0.5)
    assert {group["lr"] for group in other.param_groups} == {0.5}


def test_attention_has_shares_of_its_own() -> None:
    head = small_head(small_spec(num_layers=8), kind=HeadKind.eagle3)
    set_lr(optimizer := build_adamw(OptimConfig(fusion_lr=0.2, query_key_lr=0.1, value_output_lr=0.4), head), 0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in head.named_parameters()}
    assert len(found) == len(rates)
    assert {name for name, rate in found.items() if rate == 0.05} == {f"layer.self_attn.{x}_proj.weight" for x in "qk"}
    assert {name for name, rate in found.items() if rate == 0.2} == {f"layer.self_attn.{x}_proj.weight" for x in "vo"}
    assert {name.split(".")[0] for name, rate in found.items() if rate == 0.1} == {"fc", "embed_norm", "hidden_norm", "norm"}
    assert found["lm_head.weight"] == found["layer.mlp.up_proj.weight"] == 0.5


def test_the_fused_optimizer_takes_the_same_steps() -> None:
    """Up to the rounding of another order of the same products."""
    made = []
    for fused in (False, True):
        head = small_head(small_spec())
        optimizer = build_adamw(OptimConfig(weight_decay=0.1, fused=fused), head)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for _, p in sorted(head.named_parameters()):
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        made.append(head)
    assert optimizer.defaults["fused"]
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
