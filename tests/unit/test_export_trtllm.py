"""The TensorRT-LLM folder: names, shapes, dtypes, config, round trip, a forward by its names that drafts as the head does, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from mtptrain.config import Engine, HeadConfig, HeadKind, OutputProjection
from mtptrain.errors import UserError
from mtptrain.exporters.eagle_names import eagle3_parameters
from mtptrain.exporters.engines import refuse, to_engine
from mtptrain.exporters.trtllm import to_trtllm
from mtptrain.heads.build import head_shape
from tests.unit.eagle_exports import (
    IDS,
    LLAMA3_SPEC,
    SPEC,
    STEPS,
    Steps,
    agree,
    edited,
    entering,
    gaps,
    own_steps,
    tokens_and_states,
    written,
)
from tests.unit.heads import HIDDEN, VOCAB, bound, small_embed, small_head, small_spec
from tests.unit.trtllm_contract import NAMES, TrtllmEagle3, default_layers

HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before fc": {"norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "four streams": {"aux_captures": ["after_0", "after_2", "after_3", "after_7"]},
    "reduced vocabulary": {"draft_ids": IDS},
    "the target's rows": {"draft_ids": IDS, "lm_head": OutputProjection.target},
    "the target's projection": {"lm_head": OutputProjection.target},
}


def eagle3(spec: Any = SPEC, **options: Any) -> Any:
    return small_head(spec, kind=HeadKind.eagle3, **options)


def drafted(folder: Path, **reading: Any) -> Steps:
    """The server is told the layers that eagle_config names."""
    token_T, states = tokens_and_states()
    engine = TrtllmEagle3(folder, small_embed(), small_embed(), **reading)
    layers = engine.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return engine.draft(token_T, engine.fuse(entering(states), layers), STEPS)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", HEADS)
def test_it_drafts_by_the_engines_names_as_the_head_does(tmp_path: Path, name: str) -> None:
    drafter = bound(eagle3(**HEADS[name]))
    agree(own_steps(drafter, *tokens_and_states()), drafted(written(tmp_path / "e", Engine.trtllm, drafter)))


@pytest.mark.parametrize("schema", ["rope_parameters", "rope_scaling"])
def test_scaled_rope_is_the_targets_in_either_schema(tmp_path: Path, schema: str) -> None:
    drafter = bound(eagle3(LLAMA3_SPEC))
    folder = written(tmp_path / "e", Engine.trtllm, drafter, LLAMA3_SPEC)
    agree(own_steps(drafter, *tokens_and_states()), drafted(folder, rope_schema=schema))
    assert AutoConfig.from_pretrained(folder).rope_parameters == LLAMA3_SPEC.rope


def test_fault_01_layer_ids_are_of_the_layer_that_a_stream_leaves(tmp_path: Path) -> None:
    """The usual streams are what the engine captures unasked; the same ids read as those of layers that streams enter are others."""
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert config_of(folder)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == default_layers(SPEC.num_layers) == [1, 3, 4]
    assert min(gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, layer_ids="entering"))) > 1e-2


def test_fault_01_other_streams_are_the_servers_to_capture(tmp_path: Path) -> None:
    """The folder names them, but the engine does not read them there: unasked it captures others."""
    token_T, states = tokens_and_states()
    drafter = bound(eagle3(aux_captures=["after_0", "after_3", "after_7"]))
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert config_of(folder)["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 7]
    engine = TrtllmEagle3(folder, small_embed(), small_embed())
    ours = own_steps(drafter, token_T, states)
    agree(ours, drafted(folder))
    assert gaps(ours, engine.draft(token_T, engine.fuse(entering(states), default_layers(SPEC.num_layers)), STEPS))[0] > 1e-2


def test_fault_02_streams_are_not_normed(tmp_path: Path) -> None:
    token_T, states = tokens_and_states()
    drafter = bound(eagle3())
    engine = TrtllmEagle3(written(tmp_path / "e", Engine.trtllm, drafter), small_embed(), small_embed())
    normed = {i: torch.nn.functional.rms_norm(stream, (HIDDEN,)) for i, stream in entering(states).items()}
    ours, layers = own_steps(drafter, token_T, states), default_layers(SPEC.num_layers)
    agree(ours, engine.draft(token_T, engine.fuse(entering(states), layers), STEPS))
    assert gaps(ours, engine.draft(token_T, engine.fuse(normed, layers), STEPS))[0] > 1e-2


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_fault_03_a_dropped_rope_scaling_changes_the_result(tmp_path: Path, key: str) -> None:
    drafter = bound(eagle3(LLAMA3_SPEC))
    folder = written(tmp_path / "e", Engine.trtllm, drafter, LLAMA3_SPEC)
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rope_scaling": None}[key]
    theirs = drafted(edited(folder, lambda config: config.update({key: plain})), rope_schema=key)
    assert gaps(own_steps(drafter, *tokens_and_states()), theirs)[0] > 1e-3


def test_fault_03_another_rope_base_changes_the_result(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, theta_factor=10.0))[0] > 1e-2


def test_fault_03_max_position_embeddings_is_never_below_the_targets(tmp_path: Path) -> None:
    """A head that knows fewer positions than the target is served at all of the target's; a rotary table of fewer ends too early."""
    head = eagle3()
    head.config.layer.max_position_embeddings = 4
    drafter = bound(head)
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert config_of(folder)["max_position_embeddings"] == SPEC.max_position_embeddings == 128
    agree(own_steps(drafter, *tokens_and_states()), drafted(folder))
    with pytest.raises(IndexError):
        drafted(edited(folder, lambda config: config.update(max_position_embeddings=4)))


def test_fault_04_recycled_steps_move_on_by_one_position(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    first, *later = gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, position="stays"))
    assert first < 5e-5
    assert later[0] > 1e-2


def test_fault_05_d2t_is_offsets(tmp_path: Path) -> None:
    """int32 target id minus row; read as ids, other tokens are drafted and embedded."""
    drafter = bound(eagle3(draft_ids=IDS))
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    d2t = load_file(folder / "model.safetensors")["d2t"]
    assert d2t.dtype == torch.int32
    assert torch.equal(d2t.long(), IDS - torch.arange(len(IDS)))
    ours, theirs = own_steps(drafter, *tokens_and_states()), drafted(folder, d2t="absolute")
    assert gaps(ours, theirs)[0] < 5e-5
    assert not torch.equal(ours[0][1], theirs[0][1])
    assert gaps(ours, theirs)[1] > 1e-2


@pytest.mark.parametrize("name", HEADS)
def test_fault_06_fault_20_no_embeddings_and_the_projection_that_drafts(tmp_path: Path, name: str) -> None:
    """Of a head's own projection, and of the target's rows, the file holds the rows; the target's whole one is left out."""
    drafter = bound(eagle3(small_spec(num_layers=8, tie_word_embeddings=True), **HEADS[name]))
    tensors = load_file(written(tmp_path / "e", Engine.trtllm, drafter) / "model.safetensors")
    assert not [n for n in tensors if "embed" in n]
    assert ("lm_head.weight" in tensors) == (name != "the target's projection")
    if "lm_head.weight" in tensors:
        assert torch.equal(tensors["lm_head.weight"], drafter.lm_head.weight_VH)


def test_fault_06_without_its_own_projection_other_tokens_are_drafted(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    assert not torch.equal(own_steps(drafter, *tokens_and_states())[0][1], drafted(folder)[0][1])


def test_fault_07_the_residual_is_not_normed(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, residual="normed"))[0] > 1e-2


@pytest.mark.parametrize(("norm_output", "wrong"), [(False, "post_norm"), (True, "pre_norm")])
def test_fault_07_the_recycled_state_is_normed_as_configured(tmp_path: Path, norm_output: bool, wrong: str) -> None:
    drafter = bound(eagle3(norm_output=norm_output))
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    first, *later = gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, recycled=wrong))
    assert first < 5e-5
    assert later[0] > 1e-2


@pytest.mark.parametrize("key", ["norm_output", "return_hidden_post_norm"])
def test_releases_before_and_since_norm_output_recycle_the_normed_state(tmp_path: Path, key: str) -> None:
    """Either key is enough; with neither the state is not normed."""
    drafter = bound(eagle3(norm_output=True))
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    ours = own_steps(drafter, *tokens_and_states())
    agree(ours, drafted(edited(folder, lambda config: (config if key == "norm_output" else config["eagle_config"]).pop(key))))
    both = edited(folder, lambda config: (config.pop("norm_output", None), config["eagle_config"].pop("return_hidden_post_norm", None)))
    assert gaps(ours, drafted(both))[1] > 1e-2


@pytest.mark.parametrize("key", ["fc_norm", "norm_before_fc"])
def test_fault_07_a_dropped_norm_changes_the_result(tmp_path: Path, key: str) -> None:
    drafter = bound(eagle3(**{key: True}))
    folder = written(tmp_path / "e", Engine.trtllm, drafter)

    def drop(config: dict[str, Any]) -> None:
        del (config if key == "fc_norm" else config["eagle_config"])[key]

    assert gaps(own_steps(drafter, *tokens_and_states()), drafted(edited(folder, drop)))[0] > 1e-2


@pytest.mark.parametrize("wrong", ["concat", "streams"])
def test_another_order_of_what_is_concatenated_changes_the_result(tmp_path: Path, wrong: str) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.trtllm, drafter)
    assert gaps(own_steps(drafter, *tokens_and_states()), drafted(folder, **{wrong: "turned round"}))[0] > 1e-2


@pytest.mark.parametrize("name", HEADS)
def test_names_shapes_and_dtypes(tmp_path: Path, name: str) -> None:
    options = HEADS[name]
    tensors = load_file(written(tmp_path / "e", Engine.trtllm, bound(eagle3(**options)), dtype=torch.bfloat16) / "model.safetensors")
    count = len(options.get("aux_captures", range(3)))
    extra = {f"fc_norm.{i}.weight" for i in range(count)} if options.get("fc_norm") else set()
    extra |= {"input_norm.weight"} if options.get("norm_before_fc") else set()
    extra |= {"d2t"} if "draft_ids" in options else set()
    extra |= set() if name == "the target's projection" else {"lm_head.weight"}
    assert set(tensors) == NAMES | extra
    exact = {"lm_head.weight"} if name == "the target's rows" else set()  # float32 there: they are not rounded
    assert {t.dtype for n, t in tensors.items() if n not in {"d2t", *exact}} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (HIDDEN, count * HIDDEN)
    assert tensors["midlayer.self_attn.v_proj.weight"].shape == (2 * 4, 2 * HIDDEN)
    if options.get("norm_before_fc"):
        assert tensors["input_norm.weight"].shape == (count * HIDDEN,)
    if name != "the target's projection":
        assert tensors["lm_head.weight"].shape == (len(IDS) if "draft_ids" in options else VOCAB, HIDDEN)


@pytest.mark.parametrize("name", HEADS)
def test_config(tmp_path: Path, name: str) -> None:
    options = HEADS[name]
    config = config_of(written(tmp_path / "e", Engine.trtllm, bound(eagle3(**options)), dtype=torch.bfloat16))
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (config["num_hidden_layers"], config["vocab_size"], config["target_hidden_size"]) == (1, VOCAB, HIDDEN)
    assert config["draft_vocab_size"] == (len(IDS) if "draft_ids" in options else VOCAB)
    assert config["fc_norm"] is options.get("fc_norm", False)
    assert config["norm_output"] is config["eagle_config"]["return_hidden_post_norm"] is options.get("norm_output", False)
    assert config["eagle_config"]["norm_before_fc"] is options.get("norm_before_fc", False)
    assert config["tie_word_embeddings"] is config["attention_bias"] is False
    assert (config["rope_theta"], config["rope_scaling"], config["rope_parameters"]) == (100.0, None, SPEC.rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
def test_round_trip_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    head = eagle3(**HEADS[name])
    own = eagle3_parameters(load_file(written(tmp_path / "e", Engine.trtllm, bound(head), dtype=dtype) / "model.safetensors"), head)
    state = head.state_dict()
    assert set(own) == set(state)
    assert all(torch.equal(own[n], t.to(dtype if t.is_floating_point() else t.dtype)) for n, t in state.items())


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"kind": HeadKind.mtp}, r"head\.kind=mtp"),
    ({}, {"kind": HeadKind.eagle}, r"head\.kind=eagle:"),
    ({"embed_scale": 4.0}, {"kind": HeadKind.eagle3}, "embed_scale=4"),
    ({"logit_scale": 0.5}, {"kind": HeadKind.eagle3, "lm_head": OutputProjection.target}, r"logit_scale=0\.5"),
    ({"logit_softcap": 30.0}, {"kind": HeadKind.eagle3, "lm_head": OutputProjection.target}, "logit_softcap=30"),
    ({}, {"kind": HeadKind.eagle3, "norm_before_residual": True}, r"head\.norm_before_residual=true: the class adds the un-normed state"),
    ({}, {"kind": HeadKind.eagle3, "norm_before_fc": True, "fc_norm": True}, r"head\.norm_before_fc=true"),
    ({"rope": YARN | {"rope_type": "dynamic"}}, {"kind": HeadKind.eagle3}, "rope_type=dynamic"),
    (
        {"rope": YARN | {"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2]}},
        {"kind": HeadKind.eagle3},
        "rope_type=longrope",
    ),
    ({"rope": YARN | {"attention_factor": 1.2}}, {"kind": HeadKind.eagle3}, r"rope attention_factor=1\.2"),
    ({"rope": SPEC.rope | {"partial_rotary_factor": 0.5}}, {"kind": HeadKind.eagle3}, r"partial_rotary_factor=0\.5"),
]


@pytest.mark.parametrize(("target", "head", "reason"), REFUSED)
def test_what_the_class_cannot_express_is_refused_in_one_line(target: dict[str, Any], head: dict[str, Any], reason: str) -> None:
    spec = small_spec(**({"num_layers": 8} | target))
    said = rf"export\.engines=trtllm: TensorRT-LLM cannot express this head \({reason}.*leave trtllm out"
    with pytest.raises(UserError, match=said) as caught:
        refuse(Engine.trtllm, head_shape(HeadConfig(**head), spec), spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"attention_bias": True}, "attention_bias"), ({"qk_norm": True}, "qk_norm"), ({"sliding_window": 8}, "sliding_window=8")],
)
def test_parts_that_a_llama_layer_has_not_are_refused(change: dict[str, Any], reason: str) -> None:
    shape = head_shape(HeadConfig(kind=HeadKind.eagle3), SPEC)
    with pytest.raises(UserError, match=reason):
        refuse(Engine.trtllm, replace(shape, layer=replace(shape.layer, **change)), SPEC)


def test_beside_fc_norm_the_class_leaves_out_norm_before_fc(tmp_path: Path) -> None:
    """Why that pair is refused: such a head, written all the same, would be run by fc_norm alone."""
    drafter = bound(eagle3(fc_norm=True, norm_before_fc=True))
    to_trtllm(drafter.head, SPEC, torch.float32).write(tmp_path)
    assert gaps(own_steps(drafter, *tokens_and_states()), drafted(tmp_path))[0] > 1e-2


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ({"logit_scale": 0.5, "logit_softcap": 30.0}, {}),
        ({"rope": YARN}, {}),
        ({"rope": SPEC.rope | {"partial_rotary_factor": 1.0}}, {}),
        ({}, {"aux_captures": ["after_1", "after_4", "after_7"]}),
    ],
)
def test_what_the_class_can_express_is_not_refused(target: dict[str, Any], head: dict[str, Any]) -> None:
    spec = small_spec(**({"num_layers": 8} | target))
    refuse(Engine.trtllm, head_shape(HeadConfig(kind=HeadKind.eagle3, **head), spec), spec)


def test_a_refused_head_is_not_written() -> None:
    with pytest.raises(UserError, match="norm_before_residual"):
        to_engine(Engine.trtllm, bound(eagle3(norm_before_residual=True)), SPEC)
