"""The stock vLLM folder: names, shapes, dtypes, config, round trip, and a forward by the engine's names that equals the head's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtptrain.config import NormsConfig, VllmLayout
from mtptrain.errors import UserError
from mtptrain.exporters.conventions import conventions
from mtptrain.exporters.vllm import from_vllm, to_vllm
from mtptrain.exporters.vllm_stock import from_stock, to_stock
from mtptrain.heads.mtp import MtpHead
from mtptrain.heads.unroll import Unroll
from tests.unit.heads import HIDDEN, bound, small_batch, small_embed, small_head, small_spec
from tests.unit.vllm_contract import NAMES, StockDraft


def exported(folder: Path, head: MtpHead, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    config, tensors = to_stock(head, small_spec(), dtype)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def head_states(head: MtpHead) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings, target states and the head's states of all rows of one document."""
    embed, batch = small_embed(), small_batch([9], [[(2, 9)]], 1)
    rows = torch.arange(8)
    unroll = Unroll(bound(head, embed))
    unroll.extend(batch.token_T[1:], {"final": batch.final_TH[:-1]}, rows, torch.zeros_like(rows))
    return embed[batch.token_T[1:]], batch.final_TH[:-1], unroll.start(rows).detach()


def test_forward_by_the_engines_names_equals_the_heads(tmp_path: Path) -> None:
    head = small_head(small_spec())
    embed, hidden, ours = head_states(head)
    theirs = StockDraft(exported(tmp_path / "e", head)).forward(embed, hidden)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("wrong", [{"order": "hidden_embed"}, {"zero_first": True}, {"theta_factor": 10.0}])
def test_fault_03_a_wrong_convention_changes_the_result(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Concat order, zeroed embedding at position 0, another RoPE base: each is visible, so the equality above means something."""
    head = small_head(small_spec())
    embed, hidden, ours = head_states(head)
    theirs = StockDraft(exported(tmp_path / "e", head), **wrong).forward(embed, hidden)
    assert float((ours.double() - theirs).abs().max()) > 1e-2


def test_names_shapes_and_dtypes(tmp_path: Path) -> None:
    tensors = load_file(exported(tmp_path / "e", small_head(small_spec()), torch.bfloat16) / "model.safetensors")
    assert set(tensors) == NAMES
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert tensors["layers.0.self_attn.qkv_proj.weight"].shape == ((4 + 2 + 2) * 4, HIDDEN)


def test_fault_06_fault_20_no_embeddings_and_no_lm_head_in_the_file() -> None:
    _, tensors = to_stock(small_head(small_spec(tie_word_embeddings=True)), small_spec(tie_word_embeddings=True), torch.bfloat16)
    assert not [n for n in tensors if "embed" in n or "lm_head" in n]


def test_round_trip_is_exact() -> None:
    head = small_head(small_spec())
    config, tensors = to_stock(head, small_spec(), torch.float32)
    own = from_stock(config, tensors)
    assert set(own) == {n for n, _ in head.named_parameters()}
    for name, parameter in head.named_parameters():
        assert torch.equal(own[name], parameter)


def test_config_selects_the_class_with_plain_attention_and_keeps_the_targets_length() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    spec = small_spec(max_position_embeddings=131072, rope=rope)
    config, _ = to_stock(small_head(spec), spec, torch.bfloat16)
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"], config["kv_lora_rank"]) == (1, 1, 0)
    assert config["max_position_embeddings"] == 131072
    assert config["rope_parameters"] == rope
    assert (config["rope_theta"], config["rope_scaling"]) == (5e5, {k: v for k, v in rope.items() if k != "rope_theta"})
    plain, _ = to_stock(small_head(small_spec()), small_spec(), torch.bfloat16)
    assert plain["rope_scaling"] is None


@pytest.mark.parametrize("norm", ["embed", "hidden", "input", "post_attention", "output"])
def test_a_head_with_a_norm_off_is_refused(norm: str) -> None:
    head = small_head(small_spec(), norms=NormsConfig(**{norm: False}))
    with pytest.raises(UserError, match=rf"head\.norms\.{norm}=false"):
        to_vllm(head, small_spec(), VllmLayout.stock)


@pytest.mark.parametrize(
    ("target", "head", "reason"),
    [
        ({}, {"attention_bias": True}, "attention_bias"),
        ({}, {"qk_norm": True}, "qk_norm"),
        ({}, {"sliding_window": 8}, "sliding_window=8"),
        ({"head_dim": 8}, {}, "head_dim=8"),
        ({"embed_scale": 4.0}, {}, "embed_scale=4"),
        ({"quantization": "compressed-tensors"}, {}, "quantised by compressed-tensors"),
        ({"logit_softcap": 30.0}, {}, "logit_softcap=30"),
    ],
)
def test_what_the_class_cannot_express_is_refused_in_one_line(target: dict[str, Any], head: dict[str, Any], reason: str) -> None:
    spec = small_spec(**target)
    with pytest.raises(UserError, match=reason) as caught:
        to_vllm(small_head(spec, **head), spec, VllmLayout.stock)
    assert "\n" not in str(caught.value)


def test_every_convention_is_stated() -> None:
    stated = conventions(small_head(small_spec()).config, small_spec(), "vllm", "stock")
    for key in (
        "layer_ids",
        "hidden_input",
        "concat_order",
        "position_0_embedding_zeroed",
        "norm_before_residual",
        "recycled_hidden",
        "d2t",
        "fc_bias",
        "qkv",
        "rms_norm",
        "rope_parameters",
        "max_position_embeddings",
        "tied_embeddings_of_target",
    ):
        assert key in stated
    assert stated["concat_order"] == ["embedding", "hidden"]
    assert stated["recycled_hidden"] == "post_norm"


@pytest.mark.parametrize("layout", [VllmLayout.stock, VllmLayout.plugin])
def test_either_layout_reads_back_as_it_was_written(tmp_path: Path, layout: VllmLayout) -> None:
    head = small_head(small_spec())
    export = to_vllm(head, small_spec(), layout, torch.float32)
    export.write(tmp_path)
    own = from_vllm(tmp_path, head)
    assert set(own) == {n for n, _ in head.named_parameters()}
    assert all(torch.equal(own[name], parameter) for name, parameter in head.named_parameters())


def test_auto_takes_the_plugin_only_where_the_stock_class_cannot_express_the_head() -> None:
    assert to_vllm(small_head(small_spec()), small_spec(), VllmLayout.auto).layout == "stock"
    gemma = small_spec(embed_scale=4.0)
    assert to_vllm(small_head(gemma), gemma, VllmLayout.auto).layout == "plugin"


def test_the_plugins_config_says_what_a_llama_config_cannot() -> None:
    spec = small_spec(embed_scale=4.0, logit_softcap=30.0, logit_scale=0.5)
    head = small_head(spec, norms=NormsConfig(hidden=False), qk_norm=True, sliding_window=8, attention_bias=True)
    config = to_vllm(head, spec, VllmLayout.plugin).config
    assert config["architectures"] == ["EagleMtpHead"]
    assert config["attention_bias"]
    said = config["mtptrain_head"]
    assert (said["embed_scale"], said["logit_scale"], said["logit_softcap"], said["sliding_window"]) == (4.0, 0.5, 30.0, 8)
    assert said["qk_norm"]
    assert [name for name in said if name.endswith("_norm") and not said[name]] == ["hidden_norm"]
