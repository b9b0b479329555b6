"""Runs `speculators train` (0.9) on a machine without an accelerator and counts what it does. Run it with the rival's own Python:

    RIVAL_PYTHON rival_train.py REPORT.json THREADS [arguments of `speculators train`]

The rival is used as installed; what it asks of an accelerator is answered from outside. Its Muon orthogonalises in bfloat16, which a CPU
without bf16 units emulates slowly: with `--hidden-states-dtype float32` the same iteration runs in float32.

REPORT.json: seconds and loss-bearing tokens of every step, steps an epoch, peak resident bytes.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # of mtptrain only what needs nothing else

import torch
from speculators.train import checkpointer, cli, trainer
from speculators.train.config import TrainConfig
from torch.optim import _muon

from mtptrain.peak import peak_bytes

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""The coefficients of Muon's quintic iteration."""


def on_cpu() -> None:
    """The device is "cpu" wherever the rival asks for an accelerator's."""
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_, **__: None
    begin = trainer.Trainer.setup_trainer

    def setup(self: Any) -> None:
        self.device_type = "cpu"
        begin(self)

    trainer.Trainer.setup_trainer = setup


def orthogonal(grad: torch.Tensor, _coefficients: object, steps: int, eps: float) -> torch.Tensor:
    """Muon's iteration in float32."""
    a, b, c = _NEWTON_SCHULZ
    wide = grad.shape[0] <= grad.shape[1]
    x = grad.float() if wide else grad.float().T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.T


class Meter:
    """Seconds and loss-bearing tokens of each training step, from the end of the one before (the first: from the epoch's start)."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.steps_per_epoch = self._tokens = 0
        self._began = 0.0

    def watch(self) -> None:
        run, step, meter = trainer.Trainer.train_epoch, trainer.Trainer._schedulers_step, self

        def train_epoch(trained: Any, *arguments: Any, **named: Any) -> Any:
            if not meter.steps_per_epoch:
                trained.model.register_forward_pre_hook(meter._forward, with_kwargs=True)
                meter.steps_per_epoch = len(trained.train_loader)
            meter._began = time.perf_counter()
            return run(trained, *arguments, **named)

        def stepped(trained: Any) -> None:
            step(trained)
            now = time.perf_counter()
            meter.steps.append((now - meter._began, meter._tokens))
            meter._began = now

        trainer.Trainer.train_epoch, trainer.Trainer._schedulers_step = train_epoch, stepped

    def _forward(self, module: torch.nn.Module, _: object, named: dict[str, Any]) -> None:
        if module.training:
            self._tokens = int(named["loss_mask"].sum())


def main() -> None:
    report, threads, *arguments = sys.argv[1:]
    torch.set_num_threads(int(threads))
    on_cpu()
    if "float32" in arguments:
        _muon._zeropower_via_newtonschulz = orthogonal
    meter = Meter()
    meter.watch()
    cli.main(TrainConfig.resolve(arguments))
    found = {"steps": meter.steps, "steps_per_epoch": meter.steps_per_epoch, "peak_bytes": peak_bytes()}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
