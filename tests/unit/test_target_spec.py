"""config.json to TargetSpec: RoPE in both schemas, defaults of old files, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtptrain.errors import UserError
from mtptrain.target.spec import FAMILIES, read_spec, spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 2048, "factor": 2.0}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, {"rope_theta": 10000.0, "rope_type": "default"}),
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "dynamic", "factor": 2.0},
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}}, {"rope_theta": 1e6, "rope_type": "yarn", **YARN}),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope", **LONG}}, {"rope_theta": 1e4, "rope_type": "longrope", **LONG}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}, {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, {"rope_theta": 1e5, "rope_type": "default"}),
    ],
)
def test_fault_03_rope_survives_both_schemas(written: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = spec_from_config({**LLAMA, **written})
    assert spec.rope == expected
    assert spec.last_layer_rope is None
    assert spec.max_position_embeddings == 4096


def test_fault_03_partial_rotary_factor_is_part_of_the_rope() -> None:
    spec = spec_from_config({**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5, "rope_theta": 1e4, "pad_token_id": 0})
    assert spec.rope["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("new_schema", [False, True])
def test_fault_03_rope_of_each_layer_type(new_schema: bool) -> None:
    """Gemma 3, pattern of 3 in 4 layers: layer 2 is full, layer 3, the last, slides."""
    local, full = {"rope_theta": 1e4, "rope_type": "default"}, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": local}}
    config = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3, "head_dim": 16}
    spec = spec_from_config({**config, **(new if new_schema else old)})
    assert spec.rope == full
    assert spec.last_layer_rope == local
    assert spec.sliding_window == 512
    ends_full = spec_from_config({**config, **(new if new_schema else old), "sliding_window_pattern": 2})
    assert ends_full.last_layer_rope is None
    assert ends_full.sliding_window is None


def test_reading_does_not_change_the_config() -> None:
    config = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}}
    before = json.dumps(config)
    spec_from_config(config)
    assert json.dumps(config) == before


def test_sizes_and_defaults_of_a_sparse_old_config() -> None:
    spec = spec_from_config({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"eos_token_id": [7, 2]})
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.vocab_size) == (64, 128, 4, 320)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 4, 16)
    assert (spec.embed_scale, spec.logit_scale, spec.logit_softcap, spec.rms_norm_offset) == (1.0, 1.0, None, 0.0)
    assert spec.hidden_act == "silu"
    assert not spec.tie_word_embeddings
    assert spec.eos_token_ids == [7, 2]


def test_scales_of_gemma_granite_and_cohere() -> None:
    gemma = spec_from_config({**LLAMA, "model_type": "gemma", "hidden_act": "gelu"})
    assert (gemma.embed_scale, gemma.rms_norm_offset, gemma.hidden_act) == (8.0, 1.0, "gelu_pytorch_tanh")
    assert gemma.tie_word_embeddings
    gemma2 = spec_from_config({**LLAMA, "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 64})
    assert (gemma2.logit_softcap, gemma2.attention_softcap, gemma2.attention_scale) == (30.0, 50.0, 0.125)
    granite = spec_from_config({**LLAMA, "model_type": "granite", "logits_scaling": 8.0, "attention_multiplier": 0.25})
    assert granite.logit_scale == 0.125
    assert granite.attention_scale is None
    assert spec_from_config({**LLAMA, "model_type": "cohere"}).logit_scale == 0.0625


def test_an_unknown_model_type_is_refused_with_the_list() -> None:
    with pytest.raises(UserError) as caught:
        spec_from_config({**LLAMA, "model_type": "brandnew", "auto_map": {"AutoModelForCausalLM": "m.B"}})
    message = str(caught.value)
    assert "'brandnew'" in message
    assert "own code" in message
    assert all(name in message for name in FAMILIES)
    assert "\n" not in message


def test_a_missing_key_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lacks vocab_size"):
        spec_from_config({key: value for key, value in LLAMA.items() if key != "vocab_size"})
    with pytest.raises(UserError, match=r"^[^\n]*not a valid llama config[^\n]*multiple of the number of attention heads[^\n]*$"):
        spec_from_config({**LLAMA, "hidden_size": 65})
    with pytest.raises(UserError, match=r"config\.json is missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_spec(tmp_path)
