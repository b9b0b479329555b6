"""EAGLE folders with each convention broken on purpose: a real vLLM drafts something else, and the certificate says so."""

from typing import Any

import pytest
import torch

from mtptrain.config import Config, HeadConfig, HeadKind, ValidateConfig, VllmLayout
from mtptrain.engines.process import require_engine
from mtptrain.exporters.vllm import from_vllm
from mtptrain.stages.engine_trial import NONE, run_trials
from tests.engine.case import make_case
from tests.engine.faults import Fault, Folder, Runs, Tensors, flag, norms_that_matter, ones, with_broken_copies

pytestmark = pytest.mark.engine


def absolute_ids(config: Folder, tensors: Tensors) -> None:
    """What llama.cpp's file has, where vLLM adds the row's number; ids past the vocabulary would end the engine."""
    tensors["d2t"] = ((tensors["d2t"] + 2 * torch.arange(len(tensors["d2t"]))) % config["vocab_size"]) - torch.arange(len(tensors["d2t"]))


def no_map(config: Folder, tensors: Tensors) -> None:
    """vLLM then takes the first ids, silently."""
    del tensors["d2t"]


def next_layers(config: Folder, tensors: Tensors) -> None:
    """Ids of the layers that are left, where vLLM names those that are entered."""
    config["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]


def halves(name: str) -> Fault:
    def swap(config: Folder, tensors: Tensors) -> None:
        low, high = tensors[name].chunk(2, dim=1)
        tensors[name] = torch.cat((high, low), dim=1)

    return swap


def attention_halves(config: Folder, tensors: Tensors) -> None:
    for x in "qkv":
        halves(f"midlayer.self_attn.{x}_proj.weight")(config, tensors)


def rope_base(config: Folder, tensors: Tensors) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


EAGLE3: dict[str, Fault] = {
    "fault_05_absolute_ids": absolute_ids,
    "fault_05_no_map": no_map,
    "fault_01_layer_ids_one_off": next_layers,
    "fault_07_norm_before_residual": flag("norm_before_residual", True),
    "fault_03_recycled_state_normed": flag("norm_output", True),
    "fault_03_concat_order": attention_halves,
    "fault_03_rope_base": rope_base,
    "fault_03_hidden_norm_lost": ones("midlayer.hidden_norm.weight"),
    "fault_03_embedding_norm_lost": ones("midlayer.input_layernorm.weight"),
    "fault_03_output_norm_lost": ones("norm.weight"),
}
EAGLE: dict[str, Fault] = {
    "fault_03_concat_order": halves("fc.weight"),
    "fault_03_rope_base": rope_base,
    "fault_03_post_attention_norm_lost": ones("layers.0.post_attention_layernorm.weight"),
}
HEADS = {"eagle": (HeadConfig(kind=HeadKind.eagle), EAGLE), "eagle3": (HeadConfig(kind=HeadKind.eagle3, draft_vocabulary=120), EAGLE3)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """For each head one engine process: the right folder and all broken ones over the same prompts."""
    found = {}
    for name, (head, faults) in HEADS.items():
        folder = tmp_path_factory.mktemp(name)
        case = make_case(folder, "llama", head, num_hidden_layers=5)
        norms_that_matter(case)
        drafts: dict[str, dict[str, Any] | None] = {NONE: None, **with_broken_copies(case, folder, VllmLayout.stock, faults)}
        case.head.load_state_dict(from_vllm(folder / "stock", case.head))
        engine = require_engine(Config(), "this test")
        found[name] = Runs(case, run_trials(case.cfg, case.context, engine, drafts, case.store, case.documents))
    return found


@pytest.mark.parametrize("head", HEADS)
def test_the_unbroken_folder_agrees(runs: dict[str, Runs], head: str) -> None:
    assert runs[head].agreement("stock") == 1.0


@pytest.mark.parametrize(("head", "name"), [(head, name) for head, (_, faults) in HEADS.items() for name in faults])
def test_the_certificate_catches(runs: dict[str, Runs], head: str, name: str) -> None:
    assert runs[head].agreement(name) < 1 - ValidateConfig().max_disagreement
