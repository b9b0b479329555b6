"""EAGLE folders for vLLM: names, config keys, ids of layers and tokens, round trip, refusals. What vLLM computes: tests/engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtptrain.config import Engine, HeadConfig, HeadKind, OutputProjection, VllmLayout
from mtptrain.errors import UserError
from mtptrain.exporters.conventions import conventions
from mtptrain.exporters.engines import refuse
from mtptrain.exporters.hf import from_hf, to_hf
from mtptrain.exporters.vllm import from_vllm, pick_layout, to_vllm
from mtptrain.exporters.vllm_eagle import entering
from mtptrain.heads.build import head_record, head_shape
from mtptrain.heads.head import DraftHead
from tests.unit.heads import HIDDEN, VOCAB, bound, small_embed, small_head, small_spec
from tests.unit.test_eagle_heads import AUX, HEADS, IDS, SPEC, made

STOCK, SPECULATORS = VllmLayout.stock, VllmLayout.speculators
_LAYER = {f"self_attn.{x}_proj.weight" for x in "qkvo"} | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
_LAYER |= {"post_attention_layernorm.weight"}


def exported(folder: Path, head: DraftHead, layout: VllmLayout = STOCK, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The folder's config; its tensors are in model.safetensors."""
    export = to_vllm(head, SPEC, layout, dtype, bound(head).lm_head.weight_VH, k=3, target="org/target")
    export.write(folder)
    return export.config


def test_an_eagle_folder_has_no_norm_but_one(tmp_path: Path) -> None:
    config = exported(tmp_path, made("eagle"))
    assert set(load_file(tmp_path / "model.safetensors")) == {"fc.weight", *(f"layers.0.{name}" for name in _LAYER)}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 1
    assert (config["rope_theta"], config["rope_parameters"]) == (SPEC.rope["rope_theta"], SPEC.rope)


def test_an_eagle3_folder_names_layers_by_what_they_enter(tmp_path: Path) -> None:
    config = exported(tmp_path, made("eagle3, reduced vocabulary"), dtype=torch.bfloat16)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # after_0, after_2, after_3
    assert config["num_aux_hidden_states"] == 3
    assert (config["draft_vocab_size"], config["vocab_size"], config["target_hidden_size"]) == (len(IDS), VOCAB, HIDDEN)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t"}
    assert set(tensors) == {*(f"midlayer.{name}" for name in _LAYER), *extra}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 2 * HIDDEN)
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert {name: t.dtype for name, t in tensors.items() if t.dtype != torch.bfloat16} == {"d2t": torch.int64}


def test_fault_05_the_map_holds_offsets(tmp_path: Path) -> None:
    exported(tmp_path, made("eagle3, reduced vocabulary"))
    d2t = load_file(tmp_path / "model.safetensors")["d2t"]
    assert torch.equal(torch.arange(len(IDS)) + d2t, IDS)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("eagle3", (False, False, False, False)),
        ("eagle3, norm before residual", (True, False, False, False)),
        ("eagle3, norm before fc", (False, True, False, False)),
        ("eagle3.1", (False, False, True, True)),
        ("eagle3, every option", (True, True, True, True)),
    ],
)
@pytest.mark.parametrize("layout", [STOCK, SPECULATORS])
def test_fault_07_every_option_is_stated(tmp_path: Path, name: str, flags: tuple[bool, ...], layout: VllmLayout) -> None:
    """In the speculators format norm_before_residual is true where it is not written."""
    config = exported(tmp_path, made(name), layout)
    assert tuple(config[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")) == flags
    names = set(load_file(tmp_path / "model.safetensors"))
    assert ("input_norm.weight" in names) == flags[1]
    assert ({f"fc_norm.{i}.weight" for i in range(3)} <= names) == flags[2]


def test_fault_06_the_targets_rows_are_not_rounded() -> None:
    """The head's weights are in the export's dtype, rows of the target in one that holds them."""
    head = made("eagle3, the target's rows")
    for rows, dtype in ((small_embed()[IDS], torch.float32), (small_embed()[IDS].bfloat16().float(), torch.bfloat16)):
        tensors = to_vllm(head, SPEC, STOCK, torch.bfloat16, rows).tensors
        assert tensors["lm_head.weight"].dtype == dtype
        assert torch.equal(tensors["lm_head.weight"].float(), rows)
        assert tensors["fc.weight"].dtype == torch.bfloat16


def test_fault_06_an_output_projection_that_is_the_targets_is_left_out_unless_it_is_reduced(tmp_path: Path) -> None:
    head = made("eagle3, the target's rows")
    exported(tmp_path, head)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], small_embed()[IDS])
    whole: DraftHead = small_head(SPEC, kind=HeadKind.eagle3, aux_captures=AUX, lm_head=OutputProjection.target)
    folder = tmp_path / "whole"
    folder.mkdir()
    exported(folder, whole)
    names = set(load_file(folder / "model.safetensors"))
    assert not [n for n in names if "lm_head" in n or "embed" in n or n == "d2t"]


@pytest.mark.parametrize("name", [n for n in HEADS if n != "eagle, fc bias"])
@pytest.mark.parametrize("layout", [STOCK, SPECULATORS])
def test_round_trip_is_exact(tmp_path: Path, name: str, layout: VllmLayout) -> None:
    head = made(name)
    if layout is SPECULATORS and head.captures == ("final",):
        return
    exported(tmp_path, head, layout)
    own, before = from_vllm(tmp_path, head), head.state_dict()
    assert set(own) == set(before)
    assert all(torch.equal(own[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("name", HEADS)
def test_our_own_format_gives_the_head_back(tmp_path: Path, name: str) -> None:
    head = made(name)
    to_hf(head, SPEC, torch.float32).write(tmp_path)
    again = from_hf(tmp_path)
    assert head_record(again) == head_record(head)
    assert all(torch.equal(again.state_dict()[key], tensor) for key, tensor in head.state_dict().items())


def test_the_speculators_format_has_what_vllm_asks_of_it(tmp_path: Path) -> None:
    config = exported(tmp_path, made("eagle3, reduced vocabulary"), SPECULATORS)
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["transformer_layer_config"]["rope_parameters"] == SPEC.rope
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    tensors = load_file(tmp_path / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in tensors
    assert torch.equal(tensors["t2d"].nonzero().squeeze(-1), IDS)


@pytest.mark.parametrize(
    ("head", "target", "layout", "message"),
    [
        (HeadConfig(kind=HeadKind.eagle, fc_bias=True), {}, STOCK, r"head\.fc_bias=true"),
        (HeadConfig(kind=HeadKind.eagle), {"embed_scale": 4.0}, STOCK, r"embed_scale=4"),
        (
            HeadConfig(kind=HeadKind.eagle, sliding_window=0),
            {"sliding_window": 8},
            STOCK,
            r"head\.sliding_window=0: .* window, 8",
        ),
        (HeadConfig(kind=HeadKind.eagle3, sliding_window=8), {}, STOCK, r"head\.sliding_window=8: .* window, 0"),
        (HeadConfig(kind=HeadKind.eagle3), {"embed_scale": 4.0}, VllmLayout.auto, r"embed_scale=4"),
        (HeadConfig(kind=HeadKind.eagle3), {}, VllmLayout.plugin, r"layout=plugin: the plugin serves mtp heads"),
        (HeadConfig(), {}, SPECULATORS, r"layout=speculators: vLLM reads eagle3 heads alone"),
        (HeadConfig(kind=HeadKind.eagle), {}, SPECULATORS, r"layout=speculators: vLLM reads eagle3 heads alone"),
    ],
)
def test_what_vllm_cannot_express_is_refused_in_one_line(
    head: HeadConfig, target: dict[str, Any], layout: VllmLayout, message: str
) -> None:
    spec = small_spec(num_layers=5, **target)
    with pytest.raises(UserError, match=message) as caught:
        pick_layout(layout, head_shape(head, spec), spec)
    assert "\n" not in str(caught.value)


def test_an_eagle_layer_has_the_targets_window_unless_told_otherwise() -> None:
    """vLLM's Attention takes the target's where a layer names none."""
    spec = small_spec(num_layers=5, sliding_window=8)
    for kind in (HeadKind.eagle, HeadKind.eagle3):
        assert head_shape(HeadConfig(kind=kind), spec).layer.sliding_window == 8
        assert pick_layout(STOCK, head_shape(HeadConfig(kind=kind), spec), spec) is STOCK
        assert head_shape(HeadConfig(kind=kind, sliding_window=0), spec).layer.sliding_window == 0


def test_our_own_format_takes_any_head() -> None:
    for name in HEADS:
        refuse(Engine.hf, made(name).config, SPEC)


def test_every_convention_of_a_head_is_stated() -> None:
    eagle3 = conventions(made("eagle3, reduced vocabulary").config, SPEC, "vllm", "stock")
    assert eagle3["layer_ids"] == {"entering": entering(["after_0", "after_2", "after_3"]), "after": [0, 2, 3]}
    assert (eagle3["d2t"], eagle3["recycled_hidden"], eagle3["norm_before_residual"]) == ("offset", "pre_norm", False)
    assert eagle3["lm_head_in_file"]
    assert eagle3["rope_layout"] == "half_rotation"
    newer = conventions(made("eagle3.1").config, SPEC, "gguf", "gguf")
    assert newer["rope_layout"] == "neighbouring channels"
    assert (newer["recycled_hidden"], newer["fc_norm"], newer["d2t"]) == ("post_norm", True, None)
    assert conventions(made("eagle3, reduced vocabulary").config, SPEC, "gguf", "gguf")["d2t"] == "absolute"
    assert set(conventions(made("eagle").config, SPEC, "vllm", "stock")) <= set(eagle3)
