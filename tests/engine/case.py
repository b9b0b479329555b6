"""A random-weight target of some architecture, its own greedy answers, and a head overfitted to them: something an engine can accept."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from mtptrain.config import (
    Config,
    DataConfig,
    DataSource,
    Dtype,
    HeadConfig,
    HeadInit,
    HeadKind,
    LossConfig,
    OptimConfig,
    ResponsesConfig,
    TargetConfig,
    TrainConfig,
    ValidateConfig,
    WandbConfig,
    WandbMode,
)
from mtptrain.files import write_json
from mtptrain.heads.head import DraftHead
from mtptrain.stages import precompute, prepare, train
from mtptrain.stages.context import Context, load_trained_head, open_context, open_store
from mtptrain.store.reader import Store
from mtptrain.target.tiny import make_tiny_target

PROMPTS = [
    f"{verb} {thing}."
    for verb in ("Explain", "Describe", "Draw", "Sing about")
    for thing in ("a river", "bread", "the moon", "rust", "sleep")
]
_SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, "num_hidden_layers": 3}
"""Head size 32 is the smallest that vLLM's CPU attention has."""


@dataclass(slots=True)
class Case:
    cfg: Config
    context: Context
    store: Store
    head: DraftHead
    documents: list[int]


def make_config(folder: Path, target: str, head: HeadConfig | None = None, updates: int = 60) -> Config:
    prompts = folder / "prompts.json"
    write_json(prompts, [{"id": f"p{i}", "prompt": text} for i, text in enumerate(PROMPTS)])
    head = replace(head or HeadConfig(), init=HeadInit.random)  # learns the answers, but not all of them
    return Config(
        name="case",
        root=str(folder),
        threads=1,
        target=TargetConfig(path=target, dtype=Dtype.float32),
        data=DataConfig(
            source=DataSource.files,
            train=[str(prompts)],
            held_out_fraction=0.1,
            max_length=128,
            responses=ResponsesConfig(max_new_tokens=48),
        ),
        head=head,
        train=TrainConfig(
            dtype=Dtype.float32,
            epochs=updates,
            max_updates=updates,
            batch_tokens=1024,
            loss=LossConfig(hidden_weight=0.0 if head.kind is HeadKind.eagle3 else 1.0),
            optim=OptimConfig(lr=4e-3),
            eval_every=updates,
            checkpoint_every=updates,
        ),
        validate=ValidateConfig(batch_sizes=[], min_accepted_length=1.0),
        wandb=WandbConfig(mode=WandbMode.disabled),
    )


def outweigh_the_embedding(weights: Path) -> None:
    """A random Gemma with tied embeddings only repeats its last token: its embedding is scaled up, its layers' outputs are normed."""
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            tensor += 3.0
    save_file(tensors, weights, metadata={"format": "pt"})


def make_case(folder: Path, model_type: str = "llama", head: HeadConfig | None = None, updates: int = 60, **shape: Any) -> Case:
    """Prepare, precompute and train through the stages themselves. `documents`: those the head was trained on."""
    target = make_tiny_target(folder / "target", model_type, **{**_SHAPE, **shape})
    if model_type == "gemma3_text":
        outweigh_the_embedding(target / "model.safetensors")
    cfg = make_config(folder, str(target), head, updates)
    for stage in (prepare, precompute, train):
        stage.run(cfg)
    context = open_context(cfg)
    trained = load_trained_head(cfg, context)
    store = open_store(cfg, trained.head.captures)
    return Case(cfg, context, store, trained.head, store.indices("train"))
