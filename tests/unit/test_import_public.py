"""Public layouts, written here by hand, read as heads of ours: same tensors, same config, same states. All else is refused."""

import copy
import json
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtptrain.config import HeadKind, OutputProjection, VllmLayout
from mtptrain.errors import UserError
from mtptrain.exporters.hf import to_hf
from mtptrain.exporters.public import captures_in, files_of, import_head
from mtptrain.exporters.vllm import to_vllm
from mtptrain.heads.unroll import Unroll
from mtptrain.target.ends import TargetEnds
from mtptrain.target.spec import TargetSpec
from tests.unit.heads import EPS, HIDDEN, THETA, VOCAB, bound, small_embed, small_head, small_spec

LAYERS = 8
USUAL = ["after_1", "after_3", "after_4"]
"""The streams entering layers 2, 4 and 5 of 8."""
IDS = "eagle_aux_hidden_state_layer_ids"
DRAFT_IDS = torch.tensor([0, 2, 3, 7, 11, 12, 20, 29, 30])
LAYER = [*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}
Tensors = dict[str, Tensor]


def target(**changes: Any) -> TargetSpec:
    return small_spec(**({"num_layers": LAYERS} | changes))


def ends_of(spec: TargetSpec, dtype: torch.dtype = torch.float32) -> TargetEnds:
    return TargetEnds(spec, small_embed().to(dtype), torch.ones(HIDDEN).to(dtype), small_embed(7).to(dtype))


def write(folder: Path, config: Any, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def eagle_names(head: Any, fc: str = "fc", layer: str = "layers.0") -> Tensors:
    own = head.state_dict()
    tensors = {f"{layer}.{name}.weight": own[f"layer.{name}.weight"] for name in LAYER} | {f"{fc}.weight": own["fc.weight"]}
    return tensors | ({f"{fc}.bias": own["fc.bias"]} if "fc.bias" in own else {})


def eagle3_names(head: Any, layer: str = "midlayer") -> Tensors:
    own = head.state_dict()
    tensors = {f"{layer}.{name}.weight": own[f"layer.{name}.weight"] for name in LAYER}
    tensors |= {name: own[name] for name in ("fc.weight", "norm.weight", "lm_head.weight", "input_norm.weight") if name in own}
    tensors |= {f"fc_norm.{i}.weight": own[f"fc_norms.{i}.weight"] for i in range(3) if f"fc_norms.{i}.weight" in own}
    tensors |= {f"{layer}.input_layernorm.weight": own["embed_norm.weight"], f"{layer}.hidden_norm.weight": own["hidden_norm.weight"]}
    if "draft_ids" in own:
        ids = own["draft_ids"]
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)}
    return tensors


def eagle(**head: Any) -> Any:
    return small_head(target(), kind=HeadKind.eagle, **head)


def eagle3(draft_ids: Tensor | None = DRAFT_IDS, **head: Any) -> Any:
    return small_head(target(), draft_ids=draft_ids, kind=HeadKind.eagle3, **head)


def eagle3_config(**changes: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFT_IDS)} | changes


def speculators_config(**changes: Any) -> dict[str, Any]:
    layer = {key: value for key, value in LLAMA.items() if key not in ("architectures", "num_hidden_layers")} | {"num_hidden_layers": 1}
    config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return config | {"draft_vocab_size": len(DRAFT_IDS), IDS: [2, 4, 5], "speculators_config": {"algorithm": "eagle3"}} | changes


def states(head: Any) -> list[Tensor]:
    """The head's states over a document, three steps."""
    generator = torch.Generator().manual_seed(3)
    rows, tokens = torch.arange(6), torch.randint(VOCAB, (9,), generator=generator)
    streams = {name: torch.randn(6, HIDDEN, generator=generator) for name in ("final", *USUAL, "after_0", "after_7")}
    unroll = Unroll(bound(head))
    unroll.extend(tokens[1:7], streams, rows, torch.zeros_like(rows))
    return [unroll.start(rows), unroll.advance(rows, tokens[2:8]), unroll.advance(rows, tokens[3:9])]


def same(folder: Path, head: Any, spec: TargetSpec | None = None) -> None:
    """The folder holds `head`: config, tensors and what it computes, bit by bit."""
    spec = spec or target()
    got = import_head(folder, ends_of(spec))
    assert type(got) is type(head)
    assert got.config == head.config
    own, theirs = head.state_dict(), got.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert {p.dtype for p in got.parameters()} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(states(head), states(got), strict=True))
    assert captures_in(folder, spec) == list(dict.fromkeys(("final", *head.captures)))


def refused(folder: Path, spec: TargetSpec | None = None) -> str:
    """What import says; captures_in never lets anything but a UserError out either."""
    spec = spec or target()
    with pytest.raises(UserError) as caught:
        import_head(folder, ends_of(spec))
    message = str(caught.value)
    assert said_by(lambda: captures_in(folder, spec)) in ("", message)
    assert message.startswith(f"head.checkpoint={folder}: ")
    assert "\n" not in message
    return message


def said_by(call: Callable[[], Any]) -> str:
    """The UserError's line, or nothing."""
    try:
        call()
    except UserError as e:
        return str(e)
    return ""


def rewritten(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    return write(folder, json.loads((folder / "config.json").read_text()), tensors)


# SafeAILab and HASS, EAGLE-1


@pytest.mark.parametrize("bias", [False, True])
def test_eagle_1_has_a_bias_where_its_tensor_is(tmp_path: Path, bias: bool) -> None:
    head = eagle(fc_bias=bias)
    same(write(tmp_path / "c", LLAMA, eagle_names(head) | {"embed_tokens.weight": small_embed()}), head)
    assert captures_in(tmp_path / "c", target()) == ["final"]


def test_eagle_1_whose_config_promises_a_bias_must_have_it(tmp_path: Path) -> None:
    assert "fc.bias is missing" in refused(write(tmp_path / "c", LLAMA | {"bias": True}, eagle_names(eagle())))
    assert "bias='yes' is not true or false" in refused(write(tmp_path / "c", LLAMA | {"bias": "yes"}, eagle_names(eagle())))


def test_eagle_1_copies_of_the_targets_matrices_are_dropped(tmp_path: Path) -> None:
    head = eagle()
    extra = {
        "embed_tokens.weight": small_embed(),
        "lm_head.weight": small_embed(7),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    same(write(tmp_path / "c", LLAMA, eagle_names(head) | extra), head)
    extra["lm_head.weight"] = small_embed(8)
    assert "lm_head.weight is not the target's" in refused(write(tmp_path / "c", LLAMA, eagle_names(head) | extra))


@pytest.mark.parametrize("name", ["layers.0.input_layernorm.weight", "norm.weight", "enorm.weight"])
def test_eagle_1_has_no_input_and_no_final_norm(tmp_path: Path, name: str) -> None:
    message = refused(write(tmp_path / "c", LLAMA, eagle_names(eagle()) | {name: torch.ones(HIDDEN)}))
    assert f"'{name}' would change what the head computes" in message


def test_eagle_1_in_the_speculators_format(tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True, "transformer_layer_config": LLAMA}
    head = eagle(fc_bias=True)
    tensors = eagle_names(head, "fusion_fc", "transformer")
    same(write(tmp_path / "c", config, tensors), head)
    normed = tensors | {"embedding_layernorm.weight": torch.ones(HIDDEN)}
    assert "embedding_layernorm" in refused(write(tmp_path / "c", config, normed))
    assert "layernorms=true" in refused(write(tmp_path / "c", config | {"layernorms": True}, tensors))
    assert "transformer_layer_config" in refused(write(tmp_path / "c", config | {"transformer_layer_config": None}, tensors))


# EAGLE-3


def test_eagle_3_as_safeailab_writes_it(tmp_path: Path) -> None:
    head = eagle3()
    same(write(tmp_path / "c", eagle3_config(architectures=["LlamaForCausalLM"]), eagle3_names(head)), head)
    assert head.config.captures == USUAL
    assert not head.config.norm_before_residual


@pytest.mark.parametrize("prefix", ["", "model."])
def test_eagle_3_from_a_pickle_and_with_a_prefix(tmp_path: Path, prefix: str) -> None:
    head = eagle3()
    folder = write(tmp_path / "c", eagle3_config(), {})
    (folder / "model.safetensors").unlink()
    torch.save({prefix + name: t for name, t in eagle3_names(head).items()}, folder / "pytorch_model.bin")
    same(folder, head)


def test_eagle_3_sharded(tmp_path: Path) -> None:
    head = eagle3()
    folder, tensors = write(tmp_path / "c", eagle3_config(), {}), eagle3_names(head)
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name].contiguous() for name in tensors if weight_map[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    same(folder, head)
    (tmp_path / "model-0.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": weight_map | {"fc.weight": "../model-0.safetensors"}}))
    assert "'../model-0.safetensors', which is not a file" in refused(folder)
    swapped = {"model-0.safetensors": "model-1.safetensors", "model-1.safetensors": "model-0.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map | {"fc.weight": swapped[weight_map["fc.weight"]]}}))
    assert "lacks fc.weight" in refused(folder)
    index.write_text("[]")
    assert "index.json is damaged" in refused(folder)


@pytest.mark.parametrize("nested", [False, True])
def test_eagle_3_1_of_vllm_specforge_and_tensorrt_llm(tmp_path: Path, nested: bool) -> None:
    head = eagle3(
        norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=True, aux_captures=["after_0", "after_3", "after_7"]
    )
    flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), True)
    config = eagle3_config(**{IDS: [1, 4, 8]}, num_aux_hidden_states=3, target_hidden_size=HIDDEN)
    if nested:
        flags["return_hidden_post_norm"] = flags.pop("norm_output")
        config["eagle_config"] = flags | {"use_aux_hidden_state": True}
    else:
        config |= flags
    tensors = eagle3_names(head)
    tensors["d2t"] = tensors["d2t"].int()
    same(write(tmp_path / "c", config, tensors), head)


def test_a_switch_said_twice_must_agree(tmp_path: Path) -> None:
    config = eagle3_config(norm_output=True, eagle_config={"norm_output": False})
    assert "norm_output=true and eagle_config.norm_output=false" in refused(write(tmp_path / "c", config, eagle3_names(eagle3())))


@pytest.mark.parametrize(("said", "read"), [({}, True), ({"norm_before_residual": False}, False), ({"norm_before_residual": True}, True)])
def test_speculators_norm_before_residual_is_true_where_it_is_not_written(tmp_path: Path, said: dict[str, Any], read: bool) -> None:
    head = eagle3(norm_before_residual=read)
    same(write(tmp_path / "c", speculators_config(**said), eagle3_names(head, "layers.0")), head)


def test_the_other_default_in_a_raw_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(**{IDS: [2, 4, 5]}), eagle3_names(eagle3(), "layers.0"))
    same(folder, eagle3(norm_before_residual=False))


def test_speculators_with_all_norms(tmp_path: Path) -> None:
    flags = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), True)
    head = eagle3(norm_before_residual=True, **flags)
    same(write(tmp_path / "c", speculators_config(**flags), eagle3_names(head, "layers.0")), head)


def test_speculators_of_another_algorithm_or_layer_are_refused(tmp_path: Path) -> None:
    tensors = eagle3_names(eagle3(), "layers.0")
    assert "'peagle'" in refused(write(tmp_path / "c", speculators_config(speculators_model_type="peagle"), tensors))
    qwen = LLAMA | {"model_type": "qwen3"}
    assert "model_type='qwen3'" in refused(write(tmp_path / "c", speculators_config(transformer_layer_config=qwen), tensors))


# vocabularies and output projections


def test_a_permuted_draft_vocabulary_is_sorted_with_its_rows(tmp_path: Path) -> None:
    head = eagle3()
    tensors = eagle3_names(head)
    order = torch.tensor([4, 0, 8, 2, 7, 1, 3, 6, 5])
    tensors |= {"d2t": DRAFT_IDS[order] - torch.arange(len(order)), "lm_head.weight": tensors["lm_head.weight"][order]}
    same(write(tmp_path / "c", eagle3_config(), tensors), head)


@pytest.mark.parametrize("size", [VOCAB, None])
@pytest.mark.parametrize("d2t", [False, True])
def test_a_whole_vocabulary_keeps_its_own_projection_even_an_equal_one(tmp_path: Path, size: int | None, d2t: bool) -> None:
    head = eagle3(None)
    head.lm_head.weight.data = small_embed(7)
    extra = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)} if d2t else {}
    same(write(tmp_path / "c", eagle3_config(draft_vocab_size=size), eagle3_names(head) | extra), head)
    assert head.config.own_lm_head
    assert head.draft_ids is None


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_without_a_projection_the_targets_rows_draft(tmp_path: Path, draft_ids: Tensor | None) -> None:
    head = eagle3(draft_ids, lm_head=OutputProjection.target)
    size = VOCAB if draft_ids is None else len(draft_ids)
    folder = write(tmp_path / "c", eagle3_config(draft_vocab_size=size), eagle3_names(head))
    same(folder, head)
    write(folder, eagle3_config(draft_vocab_size=size, tie_word_embeddings=True), eagle3_names(head))
    assert "drafts with the embeddings" in refused(folder)
    same(folder, head, target(tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 2, 3, 7, 11, 12, 20, 29, 31], "d2t maps to id 31, outside the target's 31"),
        ([-1, 2, 3, 7, 11, 12, 20, 29, 30], "d2t maps to id -1"),
        ([0, 2, 3, 7, 7, 12, 20, 29, 30], "d2t maps twice to id 7"),
        ([0, 2, 3, 7, 11, 12, 20, 28, 30], "t2d and d2t name different ids"),
    ],
)
def test_a_draft_vocabulary_that_is_none_is_refused(tmp_path: Path, ids: list[int], message: str) -> None:
    tensors = eagle3_names(eagle3()) | {"d2t": torch.tensor(ids) - torch.arange(len(ids))}
    assert message in refused(write(tmp_path / "c", eagle3_config(), tensors))


def test_a_reduced_vocabulary_needs_its_ids_as_integers(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    rewritten(folder, lambda t: t.update(d2t=t["d2t"].float()))
    assert "d2t is not a plain tensor of int64, int32" in refused(folder)
    rewritten(folder, lambda t: t.pop("d2t"))
    assert "d2t is missing" in refused(folder)


@pytest.mark.parametrize("file", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_embeddings_is_compared_in_either_dtype(tmp_path: Path, file: torch.dtype, compute: torch.dtype) -> None:
    """A target in float16 that mtptrain computes with in bfloat16, and a copy in float16, are one matrix."""
    for wrong in (False, True):
        embed = small_embed() * (1.5 if wrong else 1.0)
        folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()) | {"embed_tokens.weight": embed.to(file)})
        stored = ends_of(target(), torch.float16 if file is torch.float16 else torch.float32)
        ends = TargetEnds(stored.spec, stored.embed_VH.to(compute), stored.final_norm_H, stored.lm_head_VH)
        if not wrong:
            import_head(folder, ends)
            continue
        with pytest.raises(UserError, match=r"embed_tokens\.weight is not the target's; mtptrain's heads use the target's embeddings"):
            import_head(folder, ends)


# which layers


@pytest.mark.parametrize(
    ("config", "captures"),
    [
        ({}, USUAL),
        ({IDS: []}, USUAL),
        ({"eagle_config": {IDS: []}}, USUAL),
        ({IDS: [1, 4, 8]}, ["after_0", "after_3", "after_7"]),
        ({IDS: [1, 4, 8], "eagle_config": {IDS: [1, 3, 4]}}, ["after_0", "after_3", "after_7"]),
        ({IDS: [1, 4, 8], "target_layer_ids": [5, 6, 7]}, ["after_0", "after_3", "after_7"]),
        ({"eagle_config": {IDS: [1, 3, 4]}}, USUAL),
    ],
)
def test_top_level_ids_are_entering_and_nested_ones_after(tmp_path: Path, config: dict[str, Any], captures: list[str]) -> None:
    same(write(tmp_path / "c", eagle3_config(**config), eagle3_names(eagle3(aux_captures=captures))), eagle3(aux_captures=captures))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_config": {IDS: [2, 4, 5]}}, r"=[2, 4, 5] is after these layers for SGLang (entering [3, 5, 6]), entering them for others"),
        ({"eagle_config": {IDS: [0, 3, 7]}}, "entering them for others; write the layers that its streams enter as eagle_aux"),
        ({"target_hidden_layer_ids": [1, 3, 4]}, "by target_hidden_layer_ids, whose base is not known"),
        ({"eagle_config": {"layer_ids": [1, 3, 4]}}, "by layer_ids, whose base is not known"),
        ({IDS: [2, 4, 9]}, "[2, 4, 9]: mtptrain captures the streams entering layers 1 to 8"),
        ({IDS: [0, 4, 5]}, "[0, 4, 5]: mtptrain captures"),
        ({IDS: [4, 2, 5]}, "[4, 2, 5] must ascend"),
        ({IDS: [2, 2, 5]}, "[2, 2, 5] must ascend"),
        ({IDS: [2, 5]}, "fc.weight is [16, 48], but config.json and target make it [16, 32]"),
        ({IDS: [2, 4.0, 5]}, "are not layer ids"),
        ({IDS: "2,4,5"}, "are not layer ids"),
        ({"eagle_config": []}, "eagle_config is not an object"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=false"),
    ],
)
def test_layers_that_are_not_clear_or_not_there_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path / "c", eagle3_config(**config), eagle3_names(eagle3())))


def test_the_usual_layers_need_a_target_that_has_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    assert "need a target of 7 layers, not 6" in refused(folder, target(num_layers=6))
    assert captures_in(folder, target(num_layers=7)) == ["final", "after_1", "after_2", "after_3"]


# the layer


def test_rope_and_length_are_the_checkpoints_own_in_either_schema(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    tensors = eagle3_names(eagle3())
    old = eagle3_config(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, max_position_embeddings=512)
    new = eagle3_config(rope_theta=7.0, rope_scaling={"type": "llama3", **scaling}, rope_parameters=rope, max_position_embeddings=512)
    mixed = new | {"rope_theta": 5e5, "rope_parameters": {key: value for key, value in rope.items() if key != "rope_theta"}}
    for config in (old, new, mixed):
        got = import_head(write(tmp_path / "c", config, tensors), ends_of(target()))
        assert got.config.layer.rope == rope
        assert got.config.layer.max_position_embeddings == 512
    plain = {key: value for key, value in eagle3_config().items() if key not in ("rope_theta", "max_position_embeddings")}
    got = import_head(write(tmp_path / "c", plain, tensors), ends_of(target()))
    assert got.config.layer.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert got.config.layer.max_position_embeddings == 2048


def test_heads_of_another_size_than_the_targets(tmp_path: Path) -> None:
    spec = target(head_dim=8, num_heads=2, num_kv_heads=1, intermediate_size=40)
    head = small_head(spec, kind=HeadKind.eagle3, draft_ids=DRAFT_IDS)
    config = eagle3_config(head_dim=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=40)
    same(write(tmp_path / "c", config, eagle3_names(head)), head)


def test_half_precision_is_widened(tmp_path: Path) -> None:
    head = eagle3()
    head.load_state_dict({n: t.bfloat16().float() if t.is_floating_point() else t for n, t in head.state_dict().items()})
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in eagle3_names(head).items()}
    same(write(tmp_path / "c", eagle3_config(), tensors), head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the target's 16; this head was made for another target"),
        ({"vocab_size": 30}, "vocab_size is 30, the target's 31"),
        ({"target_hidden_size": 32}, "target_hidden_size is 32, the target's 16"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2, mtptrain's head has 1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', mtptrain's head has 'silu'"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"layer_types": ["sliding_attention"]}, "sliding attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "config.json has quantization_config; quantised checkpoints can't"),
        ({"attention_bias": True}, "attention_bias=True, mtptrain's head has False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"qkv_bias": True}, "qkv_bias=True"),
        ({"hidden_size": None}, "config.json has no hidden_size; fetch the checkpoint again"),
        ({"num_attention_heads": None}, "config.json has no num_attention_heads"),
        ({"intermediate_size": 25}, "midlayer.mlp.gate_proj.weight is [24, 16], but config.json and target make it [25, 16]"),
        ({"num_key_value_heads": 3}, "4 heads of 4 on 3 key heads"),
        ({"head_dim": 3}, "4 heads of 3"),
        ({"num_attention_heads": True}, "num_attention_heads=True is not a positive whole number"),
        ({"head_dim": -4}, "head_dim=-4 is not a positive"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 is not a positive number"),
        ({"rms_norm_eps": "small"}, "not a valid Llama config"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0 is not a positive number"),
        ({"rope_scaling": {"type": "zz"}}, "RoPE of {'rope_theta': 100.0, 'rope_type': 'zz'} can't be built"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "RoPE of"),
        ({"rope_scaling": 5}, "not a valid Llama config"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}},
            "not the same RoPE",
        ),
        ({"rope_scaling": "x", "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "not a valid Llama config"),
        ({"draft_vocab_size": 32}, "draft_vocab_size=32 is not within the target's 31 ids"),
        ({"draft_vocab_size": 8}, "lm_head.weight is [9, 16], but config.json and target make it [8, 16]"),
        ({"norm_output": 1}, "norm_output=1 is not true or false"),
        ({"fc_norm": True}, "fc_norm.0.weight is missing"),
        ({"norm_before_fc": True}, "input_norm.weight is missing"),
    ],
)
def test_a_config_of_another_head_or_target_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert message in refused(write(tmp_path / "c", eagle3_config(**change), eagle3_names(eagle3())))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("midlayer.self_attn.q_proj.bias", "no biases"),
        ("midlayer.self_attn.q_norm.weight", "without q and k norms"),
        ("layers.1.mlp.up_proj.weight", "have one layer"),
        ("midlayer.mlp.up_proj.weight_scale", "of a quantised checkpoint"),
        ("fc_norm.0.weight", "has no place for it"),
        ("mask_hidden", "has no place for it"),
        ("fc.bias", "no biases"),
    ],
)
def test_a_tensor_that_would_change_the_computation_is_named(tmp_path: Path, name: str, reason: str) -> None:
    message = refused(write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()) | {name: torch.ones(HIDDEN)}))
    assert f"'{name}' would change what the head computes" in message
    assert reason in message


@pytest.mark.parametrize("name", sorted(set(eagle3_names(eagle3())) - {"t2d", "lm_head.weight"}))
def test_every_weight_is_needed_in_its_shape(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    rewritten(folder, lambda t: t.update({name: torch.cat((t[name], t[name]))}))
    assert f"{name} is [" in refused(folder)
    rewritten(folder, lambda t: t.pop(name))
    assert f"{name} is missing" in refused(folder)


def test_weights_that_are_no_numbers_or_quantised_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    rewritten(folder, lambda t: t["fc.weight"].view(-1)[3:4].fill_(float("nan")))
    assert "fc.weight holds values that are not finite" in refused(folder)
    assert captures_in(folder, target()) == ["final", *USUAL]  # which reads no values
    rewritten(folder, lambda t: t.update({"fc.weight": t["fc.weight"].nan_to_num().to(torch.float8_e4m3fn)}))
    assert "fc.weight is not a plain tensor of float64, float32, float16, bfloat16; quantised" in refused(folder)


def test_a_target_that_scales_its_embeddings_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    assert "scales its embeddings by 4" in refused(folder, target(embed_scale=4.0))


# files


def test_files_that_are_not_there_or_no_head(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert "there is no config.json" in refused(folder)
    write(folder, eagle3_config(), {})
    (folder / "model.safetensors").unlink()
    assert "there are no weights" in refused(folder)
    write(folder, LLAMA, {"a.weight": torch.ones(1)})
    assert "its tensors (a.weight, ...) are of no layout that mtptrain reads" in refused(folder)
    write(folder, [], {"a.weight": torch.ones(1)})
    assert "config.json holds no object" in refused(folder)
    (folder / "config.json").write_text('{"a": ')
    assert "config.json is not valid JSON" in refused(folder)
    write(folder, LLAMA, {"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)})
    assert "one tensor under two names" in refused(folder)


def test_the_files_of_a_head_are_those_it_is_read_from(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", eagle3_config(), eagle3_names(eagle3()))
    for name in ("pytorch_model.bin", "trainer_state.json", "other.safetensors"):
        (folder / name).write_bytes(b"{}")
    assert [file.name for file in files_of(folder)] == ["config.json", "model.safetensors"]
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert [file.name for file in files_of(folder)] == ["config.json", "model.safetensors.index.json", "part.safetensors"]
    (folder / "model.safetensors.index.json").unlink()
    assert [file.name for file in files_of(folder)] == ["config.json", "pytorch_model.bin"]


class Touch:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", write(tmp_path / "c", eagle3_config(), {})
    (folder / "model.safetensors").unlink()
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()  # the payload works
    marker.unlink()
    file = folder / "pytorch_model.bin"
    torch.save(eagle3_names(eagle3()) | {"extra": Touch(marker)}, file)
    assert "pytorch_model.bin is damaged or holds more than tensors (UnpicklingError)" in refused(folder)
    file.write_bytes(pickle.dumps({"fc.weight": Touch(marker)}))
    assert "holds more than tensors" in refused(folder)
    assert not marker.exists()
    torch.save([torch.ones(1)], file)
    assert "holds no tensors by name" in refused(folder)
    torch.save(eagle3_names(eagle3()) | {"fc.weight": torch.ones(HIDDEN, 3 * HIDDEN).to_sparse()}, file)
    assert "fc.weight is not a plain tensor" in refused(folder)


# our own formats


@pytest.mark.parametrize("layout", [VllmLayout.stock, VllmLayout.speculators])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_what_our_exporter_writes_for_vllm(tmp_path: Path, layout: VllmLayout, draft_ids: Tensor | None) -> None:
    head = eagle3(draft_ids, aux_captures=["after_0", "after_3", "after_7"], norm_before_residual=True, fc_norm=True)
    to_vllm(head, target(), layout, torch.float32).write(tmp_path)
    same(tmp_path, head)


def test_what_our_exporter_writes_for_vllms_eagle_class(tmp_path: Path) -> None:
    head = eagle()
    to_vllm(head, target(), VllmLayout.stock, torch.float32).write(tmp_path)
    same(tmp_path, head)


@pytest.mark.parametrize(
    "head", [small_head(target()), eagle(fc_bias=True), eagle3(), eagle3(None, norm_output=True), eagle3(lm_head=OutputProjection.target)]
)
def test_our_own_export(tmp_path: Path, head: Any) -> None:
    to_hf(head, target(), torch.float32).write(tmp_path)
    same(tmp_path, head)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("kind",), "medusa", "describes no head ('medusa' is missing or unknown)"),
        (("layer", "num_heads"), "4", "describes no head"),
        (("layer", "num_heads"), 10**30, "describes no head"),
        (("layer", "num_kv_heads"), 3, "do not fit each other"),
        (("layer", "intermediate_size"), 10**9, "layer.mlp.gate_proj.weight is [24, 16]"),
        (("layer", "hidden_size"), 32, "hidden_size and vocab_size are 32 and 31, the target's 16 and 31"),
        (("layer", "rope"), {"rope_type": "zz"}, "describes no head"),
        (("layer", "attention_bias"), "no", "attention_bias='no' is no bool"),
        (("captures",), ["after_1", "after_3", "after_8"], "are not ascending ones of after_0 to after_7"),
        (("captures",), ["after_3", "after_1", "after_4"], "are not ascending"),
        (("captures",), "abc", "captures='abc' is no list"),
        (("norm_output",), 1, "norm_output=1 is no bool"),
        (("draft_vocab_size",), 5, "lm_head.weight is [9, 16]"),
        (("vocab_size",), 30, "do not fit each other"),
    ],
)
def test_our_own_export_with_another_record(tmp_path: Path, path: tuple[str, ...], value: Any, message: str) -> None:
    export = to_hf(eagle3(), target(), torch.float32)
    record = export.config = copy.deepcopy(export.config)
    for key in ("mtptrain_draft_head", *path[:-1]):
        record = record[key]
    record[path[-1]] = value
    export.write(tmp_path)
    assert message in refused(tmp_path)


def test_our_own_export_for_another_target_or_with_other_ids(tmp_path: Path) -> None:
    export = to_hf(eagle3(), target(), torch.float32)
    export.write(tmp_path)
    assert "the target's 16 and 30; this head was made for another target" in refused(tmp_path, target(vocab_size=30))
    assert "model_type of the head's target is 'llama', this target's 'qwen2'" in refused(tmp_path, target(model_type="qwen2"))
    export.tensors["draft_ids"] = DRAFT_IDS.flip(0)
    export.write(tmp_path)
    assert "draft_ids do not ascend within the target's 31 ids" in refused(tmp_path)


# damage of any kind


@contextmanager
def folder_with(config: bytes, **files: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config)
        for file, content in files.items():
            (folder / file.replace("__", ".")).write_bytes(content)
        yield folder


def only_user_errors(folder: Path) -> None:
    for call in (lambda: captures_in(folder, target()), lambda: import_head(folder, ends_of(target()))):
        assert "\n" not in said_by(call)


@pytest.fixture(scope="module", params=["raw", "speculators", "hf"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hf":
        to_hf(eagle3(), target(), torch.float32).write(folder)
        return folder
    config, names = (eagle3_config(), "midlayer") if request.param == "raw" else (speculators_config(), "layers.0")
    return write(folder, config, eagle3_names(eagle3(), names))


@pytest.fixture(scope="module")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("pickled") / "pytorch_model.bin"
    torch.save(eagle3_names(eagle3()), file)
    return file.read_bytes()


def damaged(data: st.DataObject, content: bytes, most: int) -> bytes:
    """Cut off, or up to four bytes changed among the first `most`."""
    if data.draw(st.booleans()):
        return content[: data.draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(most, len(content)) - 1))] = data.draw(st.integers(0, 255))
    return bytes(changed)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_safetensors_raise_nothing_but_user_errors(sound: Path, data: st.DataObject) -> None:
    content = (sound / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    with folder_with((sound / "config.json").read_bytes(), model__safetensors=damaged(data, content, header + 200)) as folder:
        only_user_errors(folder)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_pickles_raise_nothing_but_user_errors(pickled: bytes, data: st.DataObject) -> None:
    with folder_with(json.dumps(eagle3_config()).encode(), pytorch_model__bin=damaged(data, pickled, len(pickled))) as folder:
        only_user_errors(folder)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, 10**400, -1, 0, "llama3", "yarn"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=6
)
ROPE_KEYS = ("type", "rope_type", "factor", "rope_theta", "beta_fast", "short_factor", "long_factor", "original_max_position_embeddings")
TYPES = st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "default"])
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS | TYPES, max_size=5)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_value_in_config_json_raises_nothing_but_user_errors(sound: Path, data: st.DataObject) -> None:
    config = json.loads((sound / "config.json").read_text())
    added = ("rope_scaling", "rope_parameters", "eagle_config", "head_dim", "layer_types", "quantization_config", "draft_vocab_size", IDS)
    for _ in range(data.draw(st.integers(1, 2))):
        group: Any = config
        for name in ("transformer_layer_config", "mtptrain_draft_head", "layer"):
            if isinstance(group.get(name), dict) and data.draw(st.booleans()):
                group = group[name]
        group[data.draw(st.sampled_from(sorted({*group, *added, "rope"})))] = data.draw(VALUES | ROPES)
    content = (sound / "model.safetensors").read_bytes()
    with folder_with(json.dumps(config).encode(), model__safetensors=content) as folder:
        only_user_errors(folder)


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_a_config_json_of_any_bytes(content: bytes) -> None:
    with folder_with(content, model__safetensors=b"") as folder:
        only_user_errors(folder)
