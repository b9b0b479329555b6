"""`plan`: what a run will take, before anything is spent; and the refusal of a run that the disk cannot hold."""

import shutil
import time
from pathlib import Path

from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.estimate import Plan, SizeUnknown, Stage, estimate, known_spec
from mtptrain.hardware import Gpu, gpu_of, predict, scaling
from mtptrain.target.spec import TargetSpec, read_spec

__all__ = ["Plan", "estimate", "refuse_if_it_cannot_fit", "run"]

_MEASURE_SECONDS = 0.25
"""For each of the matrix heights that the stages use: a second in all."""
_MEASURE_FLOPS = {"cpu": 4e9, "cuda": 4e12}
"""Of one product at most: short on a slow machine, long enough to fill a fast one."""


def run(cfg: Config) -> None:
    """Print the plan; UserError if the disk cannot hold it."""
    from mtptrain.stages.export import refuse_early
    from mtptrain.target.model import pick_device, pick_dtype, set_threads

    refuse_early(cfg, known_spec(cfg))
    if cfg.plan.hardware is not None:
        gpu, plan = gpu_of(cfg.plan.hardware), estimate(cfg, auto_bytes=2)
        print("\n".join([*_amounts(cfg, plan, ""), *_elsewhere(cfg, plan, gpu)]), flush=True)
        return
    set_threads(cfg.threads)
    device = pick_device(cfg.device)
    plan = estimate(cfg, pick_dtype(cfg.target.dtype, device).itemsize)
    if cfg.plan.measure:
        calibrate(cfg, plan)
    rates = {rows: measure_flops_per_second(cfg, plan.spec, rows) for rows in sorted({s.rows for s in plan.stages.values() if s.flops})}
    print("\n".join(describe(cfg, plan, rates, _memory_bytes(device.type))), flush=True)
    refuse(cfg, plan)


def calibrate(cfg: Config, plan: Plan) -> None:
    """Put what pieces of the stages take and hold on this machine into the plan; rates that were given stay."""
    from mtptrain.stages.calibrate import measure

    for name, found in measure(cfg, plan).items():
        stage = plan.stages[name]
        if stage.tokens_per_second is None:
            stage.tokens_per_second, stage.is_measured = found.tokens_per_second, True
        stage.memory = found.memory


def refuse_if_it_cannot_fit(cfg: Config, target_is_here: bool = False) -> None:
    """UserError if the run's store, checkpoints and export do not fit on its disk.

    What is unknown before it is fetched is said, not guessed; after `prepare` the target is here and its tokens are counted.
    """
    try:
        refuse(cfg, estimate(cfg, spec=_local_spec(cfg) if target_is_here else None))
    except SizeUnknown as unknown:
        print(f"disk not checked yet: {unknown}", flush=True)


def _local_spec(cfg: Config) -> TargetSpec:
    from mtptrain.target.resolve import resolve_target

    return read_spec(resolve_target(cfg.target))


def refuse(cfg: Config, plan: Plan) -> None:
    """See `refuse_if_it_cannot_fit`. What the run already wrote counts as there; one shard is kept as margin."""
    margin = cfg.store.shard_tokens * plan.bytes_per_token
    there = _folder_bytes(cfg.store_dir) + _folder_bytes(cfg.head_dir)
    needed, free = max(0, plan.disk_bytes - there) + margin, free_bytes(cfg.run_dir)
    if needed > free:
        raise UserError(
            f"root={cfg.root}: the run needs {size(needed)} more on disk (store {size(plan.store_bytes)}, checkpoints "
            f"{size(plan.checkpoint_bytes)}) and {size(free)} are free; give a root= on a larger disk, or fewer documents"
        )


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _memory_bytes(device: str) -> int:
    """Free memory of the device that computes."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
    import psutil

    return int(psutil.virtual_memory().available)


def measure_flops_per_second(cfg: Config, spec: TargetSpec, rows: int) -> float:
    """Rate of a product of `rows` x hidden with a matrix of the target's MLP in the target's dtype, or plan.matmul_tflops.

    The fastest of the repetitions counts: others may be using the machine.
    """
    if cfg.plan.matmul_tflops is not None:
        return cfg.plan.matmul_tflops * 1e12
    import torch

    from mtptrain.target.model import pick_device, pick_dtype

    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.target.dtype, device)
    work = _MEASURE_FLOPS[device.type]
    rows = min(rows, 1024 if device.type == "cpu" else 8192)
    outputs = max(64, min(spec.intermediate_size, int(work / (2 * rows * spec.hidden_size))))
    input_RH = torch.randn(rows, spec.hidden_size, device=device).to(dtype)
    weight_IH = torch.randn(outputs, spec.hidden_size, device=device).to(dtype)

    def multiply() -> float:
        started = time.perf_counter()
        torch.nn.functional.linear(input_RH, weight_IH)[0, 0].item()  # `item` waits for the device
        return time.perf_counter() - started

    with torch.inference_mode():
        multiply()
        stop = time.perf_counter() + _MEASURE_SECONDS
        taken: list[float] = []
        while not taken or time.perf_counter() < stop:
            taken.append(multiply())
    return 2.0 * rows * spec.hidden_size * outputs / min(taken)


def seconds(stage: Stage, rates: dict[int, float]) -> float:
    """From the given tokens a second, else from the work at the measured rate of the stage's matrix height."""
    if stage.tokens_per_second is not None:
        return stage.tokens / stage.tokens_per_second
    return stage.flops / rates[stage.rows] if stage.flops else 0.0


def describe(cfg: Config, plan: Plan, rates: dict[int, float], memory: int) -> list[str]:
    """The lines that are printed."""
    lines = [*_amounts(cfg, plan, f", {size(free_bytes(cfg.run_dir))} free"), f"  {'stage':12} {'memory':>10} {'time':>10}"]
    for name, stage in plan.stages.items():
        given = ""
        if stage.tokens_per_second is not None:
            given = f"  at {stage.tokens_per_second:,.0f} tokens/s, {'measured here' if stage.is_measured else 'given'}"
        too_large = "" if stage.memory <= memory else f"  more than the {size(memory)} that are free here"
        lines.append(f"  {name:12} {size(stage.memory):>10} {duration(seconds(stage, rates)):>10}{given}{too_large}")
    total = sum(seconds(stage, rates) for stage in plan.stages.values())
    lines.append(f"  {'all':12} {size(max(s.memory for s in plan.stages.values())):>10} {duration(total):>10}")
    shown = ", ".join(f"{rate / 1e9:,.1f} at {rows} rows" for rows, rate in rates.items())
    source = "plan.matmul_tflops" if cfg.plan.matmul_tflops is not None else "measured here"
    lines.append(f"  times without a rate are lower bounds from matrix products alone ({source}, GFLOP/s: {shown});")
    lines.append(
        "  plan.measure=true runs a piece of each stage here; rates you have go into plan.{generate,precompute,train}_tokens_per_second;"
    )
    lines.append("  plan.hardware=h100 plan.gpus=8 plans for other machines than this one")
    return lines


def _amounts(cfg: Config, plan: Plan, free: str) -> list[str]:
    """What does not depend on the machine."""
    volume = plan.volume
    return [
        f"plan of {cfg.run_dir} for {cfg.target.path} ({plan.spec.model_type}, {plan.target_parameters:,} parameters)",
        f"  tokens       {volume.tokens:,} in {volume.documents:,} documents ({volume.basis}); {volume.generated:,} to generate",
        f"  head         {plan.head_parameters:,} parameters ({cfg.head.kind.name}), trained on {plan.trained_tokens:,} tokens",
        f"  store        {size(plan.store_bytes)} on disk ({plan.bytes_per_token:,} bytes a token)",
        f"  checkpoints  {size(plan.checkpoint_bytes)}, export {size(plan.export_bytes)}",
        f"  disk         {size(plan.disk_bytes)} in all{free}",
    ]


def _elsewhere(cfg: Config, plan: Plan, gpu: Gpu) -> list[str]:
    """On GPUs that are not here."""
    run = predict(cfg, plan, gpu, cfg.plan.gpus)
    idle = f", {run.gpus % run.tensor_parallel} idle but in training" if run.gpus % run.tensor_parallel else ""
    lines = [
        f"  on {run.gpus} {cfg.plan.hardware}, {run.tensor_parallel} to a copy of the target{idle}",
        f"  {'stage':12} {'a GPU':>10} {'time':>10}",
    ]
    for name, taken in run.seconds.items():
        too_large = "" if run.memory[name] <= gpu.memory else f"  more than the {size(gpu.memory)} it has"
        lines.append(f"  {name:12} {size(run.memory[name]):>10} {duration(taken):>10}{too_large}")
    lines.append(f"  {'all':12} {size(max(run.memory.values())):>10} {duration(sum(run.seconds.values())):>10}")
    lines.append(
        f"  {run.updates:,} updates; to sum the gradients of one, a rank moves {size(run.sum_bytes)} in {1000 * run.sum_seconds:,.0f} ms"
    )
    more = ", ".join(f"{gpus} in {duration(taken)}" for gpus, taken in scaling(cfg, plan, gpu).items())
    lines.append(f"  all stages on more of them: {more} (an update grows with the nodes)")
    lines.append(f"  from datasheets, at plan.efficiency={cfg.plan.efficiency:g} of their bfloat16 rate; assumptions: mtptrain/hardware.py")
    return lines


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def duration(s: float) -> str:
    """Seconds for people."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if s >= 2 * length:
            return f"{s / length:,.1f} {unit}"
    return f"{s:.0f} s"
