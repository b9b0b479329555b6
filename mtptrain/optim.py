"""AdamW and the learning-rate schedule as a pure function of the update."""

import math
from typing import Any

import torch
from torch import nn

from mtptrain.config import OptimConfig, Schedule

_LAYER = ("layer.", "lm_head.")
"""Names of a head's decoder layer and of its own output projection; what else it has fuses or norms."""
_QUERY_KEY = ("layer.self_attn.q_", "layer.self_attn.k_")
_VALUE_OUTPUT = ("layer.self_attn.v_", "layer.self_attn.o_")


def lr_factor(config: OptimConfig, update: int, total: int) -> float:
    """Share of `lr` used for update `update` (0-based) of `total`.

    Linear warm-up to 1 over `warmup * total` updates; then cosine to `min_lr_ratio`, or 1 until the last `decay * total`
    updates and linear to `min_lr_ratio` (wsd), or constant.
    """
    warmup = round(config.warmup * total)
    if update < warmup:
        return (update + 1) / (warmup + 1)
    floor = config.min_lr_ratio
    if config.schedule is Schedule.cosine:
        progress = (update - warmup) / max(total - 1 - warmup, 1)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    if config.schedule is Schedule.wsd:
        decay = max(round(config.decay * total), 1)
        remaining = (total - update) / decay
        return floor + (1 - floor) * min(remaining, 1.0)
    return 1.0


def build_adamw(config: OptimConfig, module: nn.Module) -> torch.optim.AdamW:
    """Weight decay on matrices only; parameters in the order of their names. A group's `ratio` is its share of the learning rate."""
    named = sorted((n, p) for n, p in module.named_parameters() if p.requires_grad)
    fusion_lr = 1.0 if config.fusion_lr is None else config.fusion_lr
    query_key_lr = 1.0 if config.query_key_lr is None else config.query_key_lr
    value_output_lr = 1.0 if config.value_output_lr is None else config.value_output_lr

    def ratio(name: str) -> float:
        if name.startswith(_QUERY_KEY):
            return query_key_lr
        if name.startswith(_VALUE_OUTPUT):
            return value_output_lr
        return 1.0 if name.startswith(_LAYER) else fusion_lr

    groups: list[dict[str, Any]] = [
        {
            "params": [p for n, p in named if (p.dim() >= 2) is matrix and ratio(n) == share],
            "weight_decay": config.weight_decay if matrix else 0.0,
            "ratio": share,
        }
        for share in dict.fromkeys((1.0, fusion_lr, query_key_lr, value_output_lr))
        for matrix in (True, False)
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=config.fused or None)


def set_lr(optimizer: torch.optim.AdamW, lr: float) -> None:
    """The learning rate of the next update, each group's its share."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


def moments(optimizer: torch.optim.AdamW, module: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter name: `<name>.exp_avg`, `<name>.exp_avg_sq`, `<name>.step`."""
    return {f"{name}.{key}": value for name, p in module.named_parameters() for key, value in optimizer.state.get(p, {}).items()}


def load_moments(optimizer: torch.optim.AdamW, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, p in module.named_parameters():
        if f"{name}.step" in tensors:
            optimizer.state[p] = {key: tensors[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
