"""Each convention broken on purpose in an exported folder: a real vLLM drafts something else, and the certificate says so."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from mtptrain.config import Config, HeadConfig, ValidateConfig, VllmLayout
from mtptrain.engines.process import require_engine
from mtptrain.exporters.vllm import from_vllm
from mtptrain.heads.unroll import Unroll
from mtptrain.stages.engine_trial import NONE, certify, run_trials
from mtptrain.target.model import capture_packed
from tests.engine.case import make_case
from tests.engine.faults import Folder, Runs, Tensors, norms_that_matter, ones, with_broken_copies

pytestmark = pytest.mark.engine


def swap_halves(config: Folder, tensors: Tensors) -> None:
    low, high = tensors["fc.weight"].chunk(2, dim=1)
    tensors["fc.weight"] = torch.cat((high, low), dim=1).contiguous()


def rope_base(config: Folder, tensors: Tensors) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def own_embeddings(config: Folder, tensors: Tensors) -> None:
    tensors["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"]).to(tensors["fc.weight"].dtype)


def own_lm_head(config: Folder, tensors: Tensors) -> None:
    tensors["lm_head.weight"] = torch.randn(config["vocab_size"], config["hidden_size"]).to(tensors["fc.weight"].dtype)


def plugin_without(norm: str) -> Callable[[Folder, Tensors], None]:
    def break_it(config: Folder, tensors: Tensors) -> None:
        config["mtptrain_head"][f"{norm}_norm"] = False
        names = {"embed": "enorm", "hidden": "hnorm", "output": "norm", "input": "layers.0.input_layernorm"}
        del tensors[names[norm] + ".weight"]

    return break_it


def plugin_scale(config: Folder, tensors: Tensors) -> None:
    config["mtptrain_head"]["embed_scale"] = 8.0
    config["mtptrain_head"]["embed_norm"] = False
    del tensors["enorm.weight"]


STOCK: dict[str, Callable[[Folder, Tensors], None]] = {
    "fault_03_embedding_norm_lost": ones("enorm.weight"),
    "fault_03_hidden_norm_lost": ones("hnorm.weight"),
    "fault_03_output_norm_lost": ones("norm.weight"),
    "fault_03_concat_order": swap_halves,
    "fault_03_rope_base": rope_base,
    "fault_06_own_embeddings": own_embeddings,
    "fault_06_own_lm_head": own_lm_head,
}
PLUGIN: dict[str, Callable[[Folder, Tensors], None]] = {
    "fault_03_no_hidden_norm": plugin_without("hidden"),
    "fault_03_no_output_norm": plugin_without("output"),
    "fault_03_no_input_norm": plugin_without("input"),
    "fault_03_scaled_embedding": plugin_scale,
}


def short_context(config: Folder, tensors: Tensors) -> None:
    config["max_position_embeddings"] = 32


STOCK["fault_03_max_position_embeddings"] = short_context


class PositionNotAdvanced(Unroll):
    """Every step of a draft at the row's own RoPE position."""

    def advance(self, keep_A: torch.Tensor, token_A: torch.Tensor) -> torch.Tensor:
        self._step = -1
        return super().advance(keep_A, token_A)


class FirstEmbeddingZeroed(Unroll):
    """As DeepSeek's MTP class in vLLM does."""

    def extend(self, token_S: torch.Tensor, states: Mapping[str, torch.Tensor], position_S: torch.Tensor, document_S: torch.Tensor) -> None:
        whole = self._drafter
        embed_VH = torch.cat((whole.embed_VH, torch.zeros_like(whole.embed_VH[:1])))
        self._drafter = dataclasses.replace(whole, embed_VH=embed_VH)
        super().extend(token_S.masked_fill(position_S == 0, len(embed_VH) - 1), states, position_S, document_S)
        self._drafter = whole


def before_the_final_norm(model: Any, tokens: list[list[int]], names: list[str]) -> Tensors:
    last = f"after_{model.config.num_hidden_layers - 1}"
    return {"final": capture_packed(model, tokens, [last])[last]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One engine process: the right folders and all broken ones over the same prompts."""
    folder = tmp_path_factory.mktemp("faults")
    case = make_case(folder, "llama", HeadConfig(), updates=80)
    norms_that_matter(case)
    drafts: dict[str, dict[str, Any] | None] = {NONE: None}
    for layout, faults in ((VllmLayout.stock, STOCK), (VllmLayout.plugin, PLUGIN)):
        drafts |= with_broken_copies(case, folder, layout, faults)
    case.head.load_state_dict(from_vllm(folder / "stock", case.head))
    return Runs(case, run_trials(case.cfg, case.context, require_engine(Config(), "this test"), drafts, case.store, case.documents))


@pytest.mark.parametrize("layout", ["stock", "plugin"])
def test_the_unbroken_folder_agrees(runs: Runs, layout: str) -> None:
    assert runs.agreement(layout) == 1.0


@pytest.mark.parametrize("name", [*STOCK, *PLUGIN])
def test_the_certificate_catches(runs: Runs, name: str) -> None:
    assert runs.agreement(name) < 1 - ValidateConfig().max_disagreement


@pytest.mark.parametrize(
    ("name", "limit", "where", "broken"),
    [
        ("fault_02_state_before_the_final_norm", 0.98, "mtptrain.stages.engine_trial.capture_packed", before_the_final_norm),
        ("fault_04_rope_position_not_advanced", 0.98, "mtptrain.decoding.replay.Unroll", PositionNotAdvanced),
        ("fault_03_embedding_at_position_0_zeroed", 1.0, "mtptrain.decoding.replay.Unroll", FirstEmbeddingZeroed),
    ],
)
def test_the_certificate_catches_a_convention_of_the_class(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, name: str, limit: float, where: str, broken: Any
) -> None:
    """What no folder can express is broken on the reference's side: the comparison is the same from either."""
    monkeypatch.setattr(where, broken)
    assert runs.agreement("stock") < limit


def test_a_broken_folder_still_gives_the_targets_own_output(runs: Runs) -> None:
    """Greedy verification keeps the output whatever the draft is: only the drafts show the fault."""
    c = runs.case
    found = certify(c.cfg, c.context, c.head, c.store, c.documents, runs.runs[NONE], runs.runs["fault_03_concat_order"])
    assert found.outputs.raw == 1.0
