"""Every model type mtptrain reads, against transformers' own forward of a tiny random model of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from mtptrain.target.ends import TargetEnds, load_ends
from mtptrain.target.model import capture_packed, load_model
from mtptrain.target.spec import FAMILIES, TargetSpec
from tests.unit.tiny import FAMILY_KEYS, tiny_family

CPU = torch.device("cpu")
LENGTHS = (5, 21, 1, 13)
"""Longer and shorter than the sliding windows of 8."""


@dataclass
class Case:
    model: PreTrainedModel
    ends: TargetEnds
    stored: dict[str, Tensor]
    documents: list[list[int]]
    hidden: list[tuple[Tensor, ...]]
    """transformers' hidden_states of each document alone, by its own attention and masks."""
    logits: list[Tensor]

    @property
    def spec(self) -> TargetSpec:
        return self.ends.spec


@pytest.fixture(scope="module", params=sorted(FAMILY_KEYS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tiny_family(tmp_path_factory.mktemp("target") / "model", request.param)
    model = load_model(folder, torch.float32, CPU, trust_remote_code=False)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 320, (length,), generator=generator).tolist() for length in LENGTHS]
    with torch.no_grad():
        outputs = [model(input_ids=torch.tensor([document]), output_hidden_states=True, use_cache=False) for document in documents]
    return Case(
        model=model,
        ends=load_ends(folder, torch.float32, CPU),
        stored=load_file(folder / "model.safetensors"),
        documents=documents,
        hidden=[tuple(state[0] for state in output.hidden_states) for output in outputs],
        logits=[output.logits[0] for output in outputs],
    )


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_every_family_is_tested() -> None:
    assert set(FAMILY_KEYS) == set(FAMILIES)


def test_packed_forward_equals_one_document_forwards(case: Case) -> None:
    layers = case.spec.num_layers
    names = ["final", *(f"after_{i}" for i in range(layers))]
    states = capture_packed(case.model, case.documents, names)
    for i in range(layers - 1):
        assert relative(states[f"after_{i}"], torch.cat([hidden[i + 1] for hidden in case.hidden])) < 1e-5
    assert relative(states["final"], torch.cat([hidden[-1] for hidden in case.hidden])) < 1e-5


def test_windows_matter_where_the_target_has_them(case: Case) -> None:
    """A check of the check above: with full attention the long document would differ."""
    if "sliding_window" not in FAMILY_KEYS[case.spec.model_type]:
        assert case.spec.sliding_window is None
        return
    config = case.model.config
    full = case.model.model.layers
    before = [getattr(layer.self_attn, "sliding_window", None) for layer in full]
    window, config.sliding_window = config.sliding_window, None
    for layer in full:
        layer.self_attn.sliding_window = None
    unlimited = capture_packed(case.model, [case.documents[1]], ["final"])["final"]
    config.sliding_window = window
    for layer, value in zip(full, before, strict=True):
        layer.self_attn.sliding_window = value
    assert window == 8
    assert relative(unlimited, case.hidden[1][-1]) > 1e-3


def test_final_is_the_spec_s_norm_of_the_last_layer(case: Case) -> None:
    spec = case.spec
    states = capture_packed(case.model, case.documents, ["final", f"after_{spec.num_layers - 1}"])
    x = states[f"after_{spec.num_layers - 1}"].double()
    if spec.norm_type == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * (spec.rms_norm_offset + case.ends.final_norm_H.double())
    assert relative(states["final"], normed) < 1e-5


def test_ends_give_the_target_s_logits_and_embeddings(case: Case) -> None:
    spec = case.spec
    final = torch.cat([hidden[-1] for hidden in case.hidden]).double()
    logits = final @ case.ends.lm_head_VH.double().T * spec.logit_scale
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    assert relative(torch.cat(case.logits), logits) < 1e-5
    embedded = case.ends.embed_VH[torch.tensor(case.documents[1])].double() * spec.embed_scale
    assert relative(case.hidden[1][0], embedded) < 1e-6


def test_spec_tells_which_projections_have_biases_and_norms(case: Case) -> None:
    spec, family = case.spec, FAMILIES[case.spec.model_type]
    if family.mla or family.fused:
        return
    layer = f"model.layers.{spec.num_layers - 1}.self_attn."
    assert spec.attention_bias == (f"{layer}q_proj.bias" in case.stored)
    assert spec.attention_out_bias == (f"{layer}o_proj.bias" in case.stored)
    assert spec.qk_norm == (f"{layer}q_norm.weight" in case.stored)
    assert case.stored[f"{layer}q_proj.weight"].shape == (spec.num_heads * spec.head_dim, spec.hidden_size)
    assert case.stored[f"{layer}k_proj.weight"].shape == (spec.num_kv_heads * spec.head_dim, spec.hidden_size)


def test_spec_tells_scale_and_window_of_the_last_layer(case: Case) -> None:
    spec = case.spec
    if FAMILIES[spec.model_type].mla:
        return
    attention = case.model.model.layers[-1].self_attn
    assert attention.scaling == pytest.approx(spec.attention_scale or spec.head_dim**-0.5)
    expected = {"olmo3": 8, "gemma2": 8, "gemma3_text": 8, "cohere2": 8, "mistral": 8, "phi3": 8, "mixtral": 8}
    expected |= {"qwen2": 8, "qwen3": 8, "qwen2_moe": 8, "qwen3_moe": 8}
    assert spec.sliding_window == expected.get(spec.model_type)
