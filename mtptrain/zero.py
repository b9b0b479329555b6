"""DeepSpeed's ZeRO: each rank keeps its part of the moments (stage 1), of the gradients too (2), and of the weights (3)."""

import logging
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.ranks import Ranks
from mtptrain.stepper import Compute, Stepper

_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Whole(nn.Module):
    """The head as the one module that DeepSpeed calls, whose weights are all gathered for a forward and its backward.

    DeepSpeed takes the backward for done when the gradient of the module's input is there. `anchor` is one: the first that the forward
    touches, so the last that autograd, which goes by age, comes to.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.rest: Any = None

    def forward(self, anchor: Tensor, compute: Compute) -> Tensor:
        nothing = anchor * 0.0
        loss, self.rest = compute()
        return loss + nothing


class ZeroStepper(Stepper):
    """The same steps as `Stepper`'s to rounding. `module` holds the weights to begin with; its optimizer is taken over by DeepSpeed."""

    def __init__(self, stage: int, module: nn.Module, optimizer: torch.optim.AdamW, ranks: Ranks, clip: float) -> None:
        super().__init__(module, optimizer, ranks, clip)
        on_cpu = next(module.parameters()).device.type == "cpu"
        if on_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of names that it still calls
        self.is_partitioned = stage == 3
        self._gathered = deepspeed.zero.GatheredParameters
        self._whole = _Whole(module)
        if self.is_partitioned:
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(self._whole, [_Whole])
        deepspeed.init_distributed(dist_backend="gloo" if on_cpu else "nccl", verbose=False)
        self._engine, *_ = deepspeed.initialize(
            model=self._whole,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": clip,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
            },
        )
        found = self._engine.zero_optimization_stage()
        if type(self._engine) is not deepspeed.DeepSpeedEngine or found != stage or self._engine.dp_world_size != ranks.world:
            raise RuntimeError(f"DeepSpeed made {type(self._engine).__name__}, stage {found}, {self._engine.dp_world_size} ranks")

    def turns(self, batches: int) -> list[int | None]:
        mine: list[int | None] = [*self._ranks.share(range(batches))]
        return mine + [None] * (-(-batches // self._ranks.world) - len(mine))  # its sums need every rank every time

    def begin(self) -> None:
        pass  # after a step DeepSpeed holds none

    def forward(self, compute: Compute) -> tuple[Tensor, Any]:
        return self._engine(torch.zeros((), device=self._engine.device, requires_grad=True), compute), self._whole.rest

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._ranks.world)  # DeepSpeed takes the mean of the ranks

    def step(self) -> float:
        self._engine.step()
        return float(self._engine.get_global_grad_norm())  # infinite where it left out the step

    def discard(self, loss: Tensor | None) -> None:
        assert loss is not None
        self.backward(loss * float("nan"), is_last=True)
        self._engine.step()

    def weights(self) -> dict[str, Tensor]:
        if not self.is_partitioned:
            return super().weights()
        with self._gathered(list(self._module.parameters())):
            return {name: tensor.detach().clone() for name, tensor in self._module.state_dict().items()}

    def moments(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not (step := self._steps()):
            return {}
        self._link_moments()
        found: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            found[f"{name}.step"] = torch.tensor(float(step))
            for key in _MOMENTS:
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).detach().clone()
        return found

    def load_moments(self, tensors: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if not tensors:
            return
        inner = self._engine.optimizer
        step = next(tensor for name, tensor in tensors.items() if name.endswith(".step"))
        for flat in inner.fp32_partitioned_groups_flat if self.is_partitioned else inner.single_partition_of_fp32_groups:
            self._optimizer.state[flat] = {"step": step.clone()} | {key: torch.zeros_like(flat) for key in _MOMENTS}
        self._link_moments()
        for name, parameter in self._module.named_parameters():
            for key in _MOMENTS:
                safe_set_full_optimizer_state(parameter, tensors[f"{name}.{key}"].to(parameter.device), key)

    def _link_moments(self) -> None:
        """Stages 1 and 2 map each weight to its part of the moments once, after the first group's first step, when others have none."""
        if not self.is_partitioned:
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _steps(self) -> int:
        return max((int(state["step"]) for state in self._optimizer.state.values() if "step" in state), default=0)
