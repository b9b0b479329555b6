"""Every stage, from prompts to an exported head, on stand-ins of the architectures that recipes name: the same classes, shrunk."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtptrain import usage
from mtptrain.cli import compose
from mtptrain.stages import export, precompute, prepare, train, validate
from mtptrain.target.tiny import make_tiny_target
from tests.unit.tiny import FAMILY_KEYS

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
STAND_INS: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("mixtral", FAMILY_KEYS["mixtral"], "mtp"),
    "experts and q/k norm": ("qwen3_moe", FAMILY_KEYS["qwen3_moe"], "lookup"),
    "latent attention and experts": ("deepseek_v2", FAMILY_KEYS["deepseek_v2"], "mtp"),
    "the same, lookup": ("deepseek_v2", FAMILY_KEYS["deepseek_v2"], "lookup"),
    "q/k norm": ("qwen3", {}, "lookup"),
    "biases, tied": ("qwen2", {"tie_word_embeddings": True}, "mtp"),
    "sliding window": ("gemma3_text", FAMILY_KEYS["gemma3_text"], "mtp"),
    "llama3 RoPE": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 128}}, "lookup"),
    "yarn RoPE": ("llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 256}}, "mtp"),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_whole_pipeline_on(name: str, tmp_path: Path) -> None:
    model_type, keys, head = STAND_INS[name]
    target = make_tiny_target(tmp_path / "target", model_type, **keys)
    (cfg,) = compose(
        [
            "+recipe=tiny",
            f"head={head}",
            f"target.path={target}",
            f"root={tmp_path}",
            "train.max_updates=6",
            "data.limit=24",
            "validate.documents=6",
        ]
    )
    cfg.target.shape = {}
    prepare.run(cfg, for_training=True)
    for stage in (precompute, train, validate, export):
        stage.run(cfg)
    report = json.loads((cfg.report_dir / "report.json").read_text())
    assert report["certificate"]["drafted_token_agreement"] == 1.0, report["certificate"]
    (exported,) = cfg.export_dir.glob("vllm*")
    assert (exported / "model.safetensors").exists()


@pytest.mark.parametrize("recipe", sorted(usage.recipe_files()))
def test_a_recipe_names_an_architecture_that_a_stand_in_has(recipe: str) -> None:
    (cfg,) = compose([f"+recipe={recipe}"])
    types = {model_type for model_type, _, _ in STAND_INS.values()}
    assert cfg.target.shape["model_type"] in types
