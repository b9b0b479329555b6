#!/usr/bin/env python3
"""Training and capture on one GPU: tokens a second, share of the GPU's bfloat16 rate, peak memory.

    python tools/bench_gpu.py [--shape 1b,8b,70b] [--heads mtp,eagle3] [--tokens N] [--json FILE]

Random weights and states of the named sizes. Training: updates of one packed batch, three draft steps; its
products are those of tools/bench_train.py. Capture: the target's packed forward with the states taken off, of a target cut to `--layers`
layers, as many products a layer as the whole one has. The share is of the datasheet's dense rate where the GPU's name tells it
(mtptrain/hardware.py), else of a product measured here. `--device cpu --shape tiny` runs the same code without a GPU.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench import apart, save, write_store
from bench_train import _rows, floor_flops

from mtptrain import sizes
from mtptrain.cli import compose
from mtptrain.config import Config
from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.hardware import GPUS
from mtptrain.stages.context import open_context, open_store, wanted_captures
from mtptrain.stages.first_weights import initial_head
from mtptrain.stages.plan import measure_flops_per_second
from mtptrain.stages.train import loss_projection, make_trainer, training_documents
from mtptrain.store.codecs import BF16
from mtptrain.target.model import capture_packed, load_model
from mtptrain.target.spec import TargetSpec
from mtptrain.target.tiny import make_tiny_target

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
}
_DOCUMENT = 1024
_WARM = 2


def _target(root: Path, shape: str, layers: int) -> tuple[Path, dict[str, int]]:
    values = SHAPES[shape] | {"head_dim": SHAPES[shape]["hidden_size"] // SHAPES[shape]["num_attention_heads"], "num_hidden_layers": layers}
    return make_tiny_target(root / "target", dtype="bfloat16", **values), values


def _config(root: Path, shape: str, head: str, device: str, tokens: int, layers: int) -> Config:
    target, values = _target(root, shape, layers)
    own = [f"target.shape.{key}={value}" for key, value in values.items()]
    own += [f"root={root}", f"target.path={target}", "target.dtype=bfloat16", f"device={device}", "train.dtype=bfloat16"]
    return compose(["+recipe=tiny", f"head={head}", f"train.batch_tokens={tokens}", "head.init=random", "train.epochs=1", *own])[0]


def training(shape: str, head: str, device: str, tokens: int, updates: int, layers: int) -> dict[str, Any]:
    """Some updates of one packed batch each."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = _config(Path(folder), shape, head, device, tokens, layers)
        context = open_context(cfg)
        captures = ["final", *wanted_captures(cfg, context.spec)]
        _random_store(cfg, context.spec, list(dict.fromkeys(captures)), tokens, _WARM + updates)
        store = open_store(cfg, wanted_captures(cfg, context.spec))
        documents = training_documents(store)
        draft = initial_head(cfg, context, store, documents)
        trainer = make_trainer(cfg, context, store, documents, draft, lambda _: {"mean_accepted_length": 0.0}, lambda _: None)
        vocabulary = len(loss_projection(cfg, context, store, documents, draft).weight_VH)
        rate = _rate(cfg, context.spec)
        _reset(device)
        for number in range(_WARM):
            trainer.update(trainer.updates[number])
        began, before = _now(device), trainer.progress.tokens
        chosen = trainer.updates[_WARM : _WARM + updates]
        for update in chosen:
            trainer.update(update)
        seconds = _now(device) - began
        flops = sum(floor_flops(draft, _rows(store, batch, cfg.train.steps), vocabulary) for u in chosen for batch in u)
        done = trainer.progress.tokens - before
        peak = _peak(device)
    return {"tokens_per_second": done / seconds, "mfu": flops / seconds / rate, "gpu_peak_bytes": peak}


def capture(shape: str, device: str, tokens: int, rounds: int, layers: int) -> dict[str, Any]:
    """Packed forwards of a target of `layers` layers, states of the last layer and `final` taken off."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = _config(Path(folder), shape, "mtp", device, tokens, layers)
        context = open_context(cfg)
        rate, spec = _rate(cfg, context.spec), context.spec
        model = load_model(context.folder, torch.bfloat16, context.device, False)
        random = torch.Generator().manual_seed(0)
        length = min(_DOCUMENT, tokens)
        documents = [torch.randint(spec.vocab_size, (length,), generator=random).tolist() for _ in range(tokens // length)]
        names = ["final", f"after_{layers - 1}"]
        _reset(device)
        capture_packed(model, documents, names)
        began = _now(device)
        for _ in range(rounds):
            {name: state.to("cpu") for name, state in capture_packed(model, documents, names).items()}
        seconds = _now(device) - began
        done = rounds * length * len(documents)
        peak = _peak(device)
    return {"tokens_per_second": done / seconds, "mfu": 2.0 * sizes.layers_parameters(spec) * done / seconds / rate, "gpu_peak_bytes": peak}


def _random_store(cfg: Config, spec: TargetSpec, captures: list[str], tokens: int, batches: int) -> None:
    """Documents that fill that many batches; every token is supervised."""
    random, length = torch.Generator().manual_seed(0), min(_DOCUMENT, tokens)
    count = 1 + batches * (tokens // length)
    documents = [
        Document(
            id=f"{i}",
            source="random",
            split=HELD_OUT if i == 0 else TRAIN,
            tokens=torch.randint(spec.vocab_size, (length,), generator=random).tolist(),
            spans=[(0, length)],
        )
        for i in range(count)
    ]

    def states(members: range) -> dict[str, torch.Tensor]:
        return {name: torch.randn(len(members) * length, spec.hidden_size, generator=random).bfloat16() for name in captures}

    write_store(cfg.store_dir, {"made": "at random"}, (BF16, BF16), documents, 1 << 14, states)


def _rate(cfg: Config, spec: TargetSpec) -> float:
    if torch.cuda.is_available() and cfg.device.name == "cuda":
        name = torch.cuda.get_device_name().lower().replace(" ", "")
        for known, gpu in GPUS.items():
            if known in name:
                return gpu.flops
    return measure_flops_per_second(cfg, spec, 1024)


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int | None:
    """Of a GPU's allocations; a CPU's is the process's, which `apart` adds."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b,8b")
    parser.add_argument("--heads", default="mtp,eagle3")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: this PyTorch sees no CUDA device; --device cpu --shape tiny runs the same code on a CPU")
    print(torch.cuda.get_device_name() if a.device == "cuda" else "CPU")
    print("| target | what | tokens/s | share of the bfloat16 rate | peak memory |")
    print("|---|---|---|---|---|")
    found: dict[str, Any] = {}
    for shape in a.shape.split(","):
        for what in [*a.heads.split(","), "capture"]:
            if what == "capture":
                row = apart(capture, shape, a.device, a.tokens, a.updates, a.layers)
            else:
                row = apart(training, shape, what, a.device, a.tokens, a.updates, a.layers)
            found.setdefault(shape, {})[what] = row
            name = f"capture of {a.layers} layers" if what == "capture" else f"training, {what}"
            peak = (row["gpu_peak_bytes"] or row["peak_bytes"]) / 1e9
            print(f"| {shape} | {name} | {row['tokens_per_second']:,.0f} | {100 * row['mfu']:.0f} % | {peak:.2f} GB |", flush=True)
    save(found, a.json)


if __name__ == "__main__":
    main()
