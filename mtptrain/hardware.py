"""Times and memory of a plan on machines that are not at hand: datasheet figures, and what share of them is reached.

Assumptions, beside the figures: compute reaches `plan.efficiency` of the dense bfloat16 rate, reading weights `_READ` of the memory's, and
sums of gradients `_LINK` of the link's; ranks in a node talk over its links, between nodes over one network port a GPU; a stage
shares its work evenly and nothing overlaps; what reads the target starts with `_START` seconds and its weights at `_DISK` a node.
"""

from dataclasses import dataclass

from mtptrain import sizes
from mtptrain.config import Config
from mtptrain.errors import UserError
from mtptrain.estimate import Plan, forward_flops

_READ, _LINK = 0.6, 0.6
_FULL = 0.9
"""Of a GPU's memory: what an engine fills."""
_ROOM = 0.75
"""Of a GPU's memory: what the target's weights may take, so that keys, values and activations have room."""
_START, _DISK = 120.0, 2e9
_NODE = 8
"""GPUs of a node."""
_NETWORK = 50e9
"""Bytes a second of one 400 Gbit/s port a GPU."""


@dataclass(slots=True, frozen=True)
class Gpu:
    """Of a datasheet."""

    flops: float
    """Dense bfloat16 products, a second."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes of it, a second."""
    link: float
    """Bytes a second to the others of its node, one way."""


GPUS = {
    "a100": Gpu(312e12, 80e9, 2.0e12, 300e9),
    "h100": Gpu(989e12, 80e9, 3.35e12, 450e9),
    "h200": Gpu(989e12, 141e9, 4.8e12, 450e9),
    "b200": Gpu(2250e12, 180e9, 7.7e12, 900e9),
    "l40s": Gpu(362e12, 48e9, 0.864e12, 32e9),
    "rtx4090": Gpu(165e12, 24e9, 1.008e12, 32e9),
}


@dataclass(slots=True, frozen=True)
class Run:
    """A run on `gpus` GPUs: seconds and bytes a GPU of each stage."""

    gpus: int
    tensor_parallel: int
    """GPUs that hold one copy of the target."""
    seconds: dict[str, float]
    memory: dict[str, float]
    sum_bytes: float
    """What a rank sends and receives to sum the gradients of one update."""
    sum_seconds: float
    """Of one update, of which there are `updates`."""
    updates: int


def gpu_of(name: str) -> Gpu:
    if name not in GPUS:
        raise UserError(f"plan.hardware={name}: its figures are not known; there are: {', '.join(GPUS)}")
    return GPUS[name]


def predict(cfg: Config, plan: Plan, gpu: Gpu, gpus: int) -> Run:
    """Times and memory of each stage on `gpus` of them. Raises UserError where the target does not fit."""
    width = 2
    weights = float(plan.target_parameters * width)
    parallel = 1
    while weights / parallel > _ROOM * gpu.memory:
        parallel *= 2
    if parallel > gpus:
        raise UserError(
            f"plan.gpus={gpus}: the target's weights, {weights / 1e9:,.0f} GB, need {parallel} of these GPUs; plan with more of them"
        )
    rate = gpu.flops * cfg.plan.efficiency
    copies = gpus // parallel
    stages = plan.stages
    ranks = min(gpus, cfg.train.accumulate * max(1, gpus // _NODE))  # a batch for each rank; more nodes, more batches an update
    updates = max(1, plan.trained_tokens // (cfg.train.batch_tokens * max(cfg.train.accumulate, ranks)))
    sum_bytes = 2 * (ranks - 1) / ranks * 4 * plan.head_parameters
    sum_seconds = sum_bytes / (_LINK * (gpu.link if gpus <= _NODE else _NETWORK)) if ranks > 1 else 0.0
    load = _START + weights / _DISK
    sequences = _sequences(cfg, plan, gpu, parallel)
    seconds = {
        "prepare": load + _generation(cfg, plan, gpu, rate, parallel, sequences) / copies,
        "precompute": load + stages["precompute"].flops / (rate * copies * parallel),
        "train": _START + stages["train"].flops / (rate * ranks) + updates * sum_seconds,
        "validate": load + stages["validate"].flops / (rate * parallel),
    }
    memory = {name: stages[name].memory - weights + weights / parallel for name in ("precompute", "validate")}
    memory["prepare"] = (weights + sequences * _context(plan) * cached_bytes_per_token(plan)) / parallel
    memory["train"] = train_memory(cfg, plan, ranks)
    return Run(gpus, parallel, seconds, {name: memory[name] for name in seconds}, sum_bytes, sum_seconds, updates)


def cached_bytes_per_token(plan: Plan) -> int:
    """Keys and values as engines keep them: of MLA the small vector."""
    latent = plan.spec.latent
    if latent is not None:
        return plan.spec.num_layers * (latent.rank + latent.rotated) * 2
    return sizes.kv_bytes_per_token(plan.spec, 2)


def _context(plan: Plan) -> float:
    return plan.volume.tokens / max(1, plan.volume.documents)


def _sequences(cfg: Config, plan: Plan, gpu: Gpu, parallel: int) -> int:
    """Answered at once by a copy of the target: as many as asked for, or as there is room for."""
    room = parallel * _FULL * gpu.memory - plan.target_parameters * 2
    return max(1, min(cfg.data.responses.batch_size, int(room / (_context(plan) * cached_bytes_per_token(plan)))))


def train_memory(cfg: Config, plan: Plan, ranks: int) -> float:
    """Of one rank, with what ZeRO shares out."""
    stage = cfg.train.deepspeed.stage
    kept = {0: 0, 1: 8, 2: 12, 3: 16}[stage]  # bytes a parameter that are shared: two moments, the gradient, the weight
    return plan.stages["train"].memory - plan.head_parameters * kept * (1 - 1 / ranks)


def _generation(cfg: Config, plan: Plan, gpu: Gpu, rate: float, parallel: int, sequences: int) -> float:
    """Seconds of one copy of the target for all responses: prompts at the rate of compute, then steps of a full batch, each of which reads
    all weights (of experts as well: a large batch needs every one) and its sequences' keys and values.
    """
    if not plan.volume.generated:
        return 0.0
    a_token = forward_flops(plan)
    read = plan.target_parameters * 2 + sequences * _context(plan) * cached_bytes_per_token(plan)
    step = max(read / (_READ * gpu.bandwidth), sequences * a_token / rate) / parallel
    prompts = max(0, plan.volume.tokens - plan.volume.generated)
    return plan.volume.generated / sequences * step + prompts * a_token / (rate * parallel)


def scaling(cfg: Config, plan: Plan, gpu: Gpu, counts: tuple[int, ...] = (8, 64, 512)) -> dict[int, float]:
    """Seconds of all stages on so many GPUs; those that hold the target."""
    found = {}
    for gpus in counts:
        try:
            found[gpus] = sum(predict(cfg, plan, gpu, gpus).seconds.values())
        except UserError:
            continue
    return found
