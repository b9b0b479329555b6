"""The SGLang folder: names, shapes, dtypes, config, round trip, a forward by the engine's names that drafts as the head does, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mtptrain.config import Engine, HeadConfig, HeadKind, OutputProjection
from mtptrain.errors import UserError
from mtptrain.exporters.eagle_names import eagle3_parameters, eagle_parameters
from mtptrain.exporters.engines import refuse, to_engine
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
from tests.unit.sglang_contract import EAGLE3_NAMES, EAGLE_NAMES, SglangEagle, SglangEagle3

EAGLE = {"plain": {}, "fc bias": {"fc_bias": True}}
EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm before fc": {"norm_before_fc": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "every norm": {"norm_before_fc": True, "fc_norm": True, "norm_output": True},
    "four streams": {"aux_captures": ["after_0", "after_2", "after_3", "after_6"]},
    "reduced vocabulary": {"draft_ids": IDS},
    "the target's rows": {"draft_ids": IDS, "lm_head": OutputProjection.target},
    "the target's projection": {"lm_head": OutputProjection.target},
}


def eagle(**options: Any) -> Any:
    return small_head(SPEC, kind=HeadKind.eagle, **options)


def eagle3(spec: Any = SPEC, **options: Any) -> Any:
    return small_head(spec, kind=HeadKind.eagle3, **options)


def eagle_drafted(folder: Path, final_TH: Tensor, **reading: Any) -> Steps:
    token_T, _ = tokens_and_states()
    return SglangEagle(folder, small_embed(), small_embed(), **reading).draft(token_T, final_TH[:-1], STEPS)


def eagle3_drafted(folder: Path, **reading: Any) -> Steps:
    token_T, states = tokens_and_states()
    engine = SglangEagle3(folder, small_embed(), small_embed(), **reading)
    return engine.draft(token_T, engine.fuse(entering(states)), STEPS)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", EAGLE)
def test_eagle_drafts_by_the_engines_names_as_the_head_does(tmp_path: Path, name: str) -> None:
    token_T, states = tokens_and_states()
    drafter = bound(eagle(**EAGLE[name]))
    agree(own_steps(drafter, token_T, states), eagle_drafted(written(tmp_path / "e", Engine.sglang, drafter), states["final"]))


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_drafts_by_the_engines_names_as_the_head_does(tmp_path: Path, name: str) -> None:
    drafter = bound(eagle3(**EAGLE3[name]))
    agree(own_steps(drafter, *tokens_and_states()), eagle3_drafted(written(tmp_path / "e", Engine.sglang, drafter)))


@pytest.mark.parametrize("schema", ["rope_parameters", "rope_scaling"])
def test_scaled_rope_is_the_targets_in_either_schema(tmp_path: Path, schema: str) -> None:
    drafter = bound(eagle3(LLAMA3_SPEC))
    folder = written(tmp_path / "e", Engine.sglang, drafter, LLAMA3_SPEC)
    agree(own_steps(drafter, *tokens_and_states()), eagle3_drafted(folder, rope_schema=schema))
    assert AutoConfig.from_pretrained(folder).rope_parameters == LLAMA3_SPEC.rope


def test_fault_01_layer_ids_are_of_the_layer_that_a_stream_leaves(tmp_path: Path) -> None:
    """The ids of the usual streams are what the engine captures by itself, [2, N//2, N-3] entering; read as entering they are others."""
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    ids = config_of(folder)["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert ids == [1, 3, 4]
    assert [i + 1 for i in ids] == [2, SPEC.num_layers // 2, SPEC.num_layers - 3]
    assert min(gaps(own_steps(drafter, *tokens_and_states()), eagle3_drafted(folder, layer_ids="entering"))) > 1e-2


def test_fault_02_eagle_reads_the_state_after_the_final_norm(tmp_path: Path) -> None:
    token_T, states = tokens_and_states()
    weight_H = torch.linspace(0.5, 1.5, HIDDEN)
    before_norm_TH = states["final"]
    states["final"] = torch.nn.functional.rms_norm(before_norm_TH, (HIDDEN,), weight_H)
    drafter = bound(eagle())
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    ours = own_steps(drafter, token_T, states)
    agree(ours, eagle_drafted(folder, states["final"]))
    assert gaps(ours, eagle_drafted(folder, before_norm_TH))[0] > 1e-2


def test_fault_02_eagle3_reads_streams_that_are_not_normed(tmp_path: Path) -> None:
    token_T, states = tokens_and_states()
    drafter = bound(eagle3())
    engine = SglangEagle3(written(tmp_path / "e", Engine.sglang, drafter), small_embed(), small_embed())
    normed = {i: torch.nn.functional.rms_norm(stream, (HIDDEN,)) for i, stream in entering(states).items()}
    ours = own_steps(drafter, token_T, states)
    agree(ours, engine.draft(token_T, engine.fuse(entering(states)), STEPS))
    assert gaps(ours, engine.draft(token_T, engine.fuse(normed), STEPS))[0] > 1e-2


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_fault_03_a_dropped_rope_scaling_changes_the_result(tmp_path: Path, key: str) -> None:
    """A loader of either schema finds the scaling where it looks; without it there it turns otherwise."""
    drafter = bound(eagle3(LLAMA3_SPEC))
    folder = written(tmp_path / "e", Engine.sglang, drafter, LLAMA3_SPEC)
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rope_scaling": None}[key]
    theirs = eagle3_drafted(edited(folder, lambda config: config.update({key: plain})), rope_schema=key)
    assert gaps(own_steps(drafter, *tokens_and_states()), theirs)[0] > 1e-3


def test_fault_03_another_rope_base_changes_the_result(tmp_path: Path) -> None:
    token_T, states = tokens_and_states()
    for_eagle, for_eagle3 = bound(eagle()), bound(eagle3())
    folders = [written(tmp_path / name, Engine.sglang, d) for name, d in (("eagle", for_eagle), ("eagle3", for_eagle3))]
    assert gaps(own_steps(for_eagle, token_T, states), eagle_drafted(folders[0], states["final"], theta_factor=10.0))[0] > 1e-2
    assert gaps(own_steps(for_eagle3, token_T, states), eagle3_drafted(folders[1], theta_factor=10.0))[0] > 1e-2


def test_fault_03_max_position_embeddings_is_never_below_the_targets(tmp_path: Path) -> None:
    """A head that knows fewer positions than the target is served at all of the target's; a rotary table of fewer ends too early."""
    head = eagle3()
    head.config.layer.max_position_embeddings = 4
    drafter = bound(head)
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    assert config_of(folder)["max_position_embeddings"] == SPEC.max_position_embeddings == 128
    agree(own_steps(drafter, *tokens_and_states()), eagle3_drafted(folder))
    with pytest.raises(IndexError):
        eagle3_drafted(edited(folder, lambda config: config.update(max_position_embeddings=4)))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_fault_04_recycled_steps_move_on_by_one_position(tmp_path: Path, kind: str) -> None:
    token_T, states = tokens_and_states()
    drafter = bound(eagle() if kind == "eagle" else eagle3())
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    theirs = eagle_drafted(folder, states["final"], position="stays") if kind == "eagle" else eagle3_drafted(folder, position="stays")
    first, *later = gaps(own_steps(drafter, token_T, states), theirs)
    assert first < 5e-5
    assert later[0] > 1e-2


def test_fault_05_d2t_is_offsets(tmp_path: Path) -> None:
    """int64 target id minus row; read as ids, or left out, other tokens are drafted and embedded."""
    drafter = bound(eagle3(draft_ids=IDS))
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"], IDS - torch.arange(len(IDS)))
    ours = own_steps(drafter, *tokens_and_states())
    absolute = eagle3_drafted(folder, d2t="absolute")
    save_file({name: t for name, t in tensors.items() if name != "d2t"}, folder / "model.safetensors")
    for theirs in (absolute, eagle3_drafted(folder)):
        assert gaps(ours, theirs)[0] < 5e-5
        assert not torch.equal(ours[0][1], theirs[0][1])
        assert gaps(ours, theirs)[1] > 1e-2


@pytest.mark.parametrize("name", EAGLE3)
def test_fault_06_fault_20_no_embeddings_and_the_projection_that_drafts(tmp_path: Path, name: str) -> None:
    """Of a head's own projection, and of the target's rows, the file holds the rows; the target's whole one is asked for by a null."""
    drafter = bound(eagle3(small_spec(num_layers=8, tie_word_embeddings=True), **EAGLE3[name]))
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    tensors, config = load_file(folder / "model.safetensors"), config_of(folder)
    assert not [n for n in tensors if "embed" in n]
    assert config["tie_word_embeddings"] is False
    if name == "the target's projection":
        assert "lm_head.weight" not in tensors
        assert config["draft_vocab_size"] is None
    else:
        assert torch.equal(tensors["lm_head.weight"], drafter.lm_head.weight_VH)
        assert config["draft_vocab_size"] == len(tensors["lm_head.weight"])


def test_fault_06_another_projection_drafts_other_tokens(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = edited(written(tmp_path / "e", Engine.sglang, drafter), lambda config: config.update(draft_vocab_size=None))
    assert not torch.equal(own_steps(drafter, *tokens_and_states())[0][1], eagle3_drafted(folder)[0][1])


def test_fault_07_the_residual_is_not_normed(tmp_path: Path) -> None:
    drafter = bound(eagle3())
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    assert gaps(own_steps(drafter, *tokens_and_states()), eagle3_drafted(folder, residual="normed"))[0] > 1e-2


@pytest.mark.parametrize(("norm_output", "wrong"), [(False, "post_norm"), (True, "pre_norm")])
def test_fault_07_the_recycled_state_is_normed_as_configured(tmp_path: Path, norm_output: bool, wrong: str) -> None:
    drafter = bound(eagle3(norm_output=norm_output))
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    first, *later = gaps(own_steps(drafter, *tokens_and_states()), eagle3_drafted(folder, recycled=wrong))
    assert first < 5e-5
    assert later[0] > 1e-2


@pytest.mark.parametrize("key", ["fc_norm", "norm_before_fc", "norm_output"])
def test_fault_07_a_dropped_norm_changes_the_result(tmp_path: Path, key: str) -> None:
    """Its tensors are then passed over without a word."""
    drafter = bound(eagle3(**{key: True}))
    folder = written(tmp_path / "e", Engine.sglang, drafter)

    def drop(config: dict[str, Any]) -> None:
        del config[key]
        config["eagle_config"].pop(key, None)

    found = gaps(own_steps(drafter, *tokens_and_states()), eagle3_drafted(edited(folder, drop)))
    assert found[1 if key == "norm_output" else 0] > 1e-2


@pytest.mark.parametrize(("kind", "wrong"), [("eagle", "concat"), ("eagle3", "concat"), ("eagle3", "streams")])
def test_another_order_of_what_is_concatenated_changes_the_result(tmp_path: Path, kind: str, wrong: str) -> None:
    token_T, states = tokens_and_states()
    drafter = bound(eagle() if kind == "eagle" else eagle3())
    folder, reading = written(tmp_path / "e", Engine.sglang, drafter), {wrong: "turned round"}
    theirs = eagle_drafted(folder, states["final"], **reading) if kind == "eagle" else eagle3_drafted(folder, **reading)
    assert gaps(own_steps(drafter, token_T, states), theirs)[0] > 1e-2


@pytest.mark.parametrize("name", EAGLE)
def test_eagle_needs_its_fc_bias_in_the_file(tmp_path: Path, name: str) -> None:
    """Zeros where the head has none: the class's own bias is random until it is loaded."""
    token_T, states = tokens_and_states()
    drafter = bound(eagle(**EAGLE[name]))
    folder = written(tmp_path / "e", Engine.sglang, drafter)
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["fc.bias"], drafter.head.fc.bias if EAGLE[name] else torch.zeros(HIDDEN))
    save_file({n: t for n, t in tensors.items() if n != "fc.bias"}, folder / "model.safetensors")
    assert gaps(own_steps(drafter, token_T, states), eagle_drafted(folder, states["final"]))[0] > 1e-2


def test_names_shapes_and_dtypes_of_eagle(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path / "e", Engine.sglang, bound(eagle()), dtype=torch.bfloat16) / "model.safetensors")
    assert set(tensors) == EAGLE_NAMES
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (HIDDEN, 2 * HIDDEN)
    assert tensors["fc.bias"].shape == (HIDDEN,)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (2 * 4, HIDDEN)


@pytest.mark.parametrize("name", EAGLE3)
def test_names_shapes_and_dtypes_of_eagle3(tmp_path: Path, name: str) -> None:
    options = EAGLE3[name]
    tensors = load_file(written(tmp_path / "e", Engine.sglang, bound(eagle3(**options)), dtype=torch.bfloat16) / "model.safetensors")
    count = len(options.get("aux_captures", range(3)))
    extra = {f"fc_norm.{i}.weight" for i in range(count)} if options.get("fc_norm") else set()
    extra |= {"input_norm.weight"} if options.get("norm_before_fc") else set()
    extra |= {"d2t"} if "draft_ids" in options else set()
    extra |= set() if name == "the target's projection" else {"lm_head.weight"}
    assert set(tensors) == EAGLE3_NAMES | extra
    exact = {"lm_head.weight"} if name == "the target's rows" else set()  # float32 there: they are not rounded
    assert {t.dtype for n, t in tensors.items() if n not in {"d2t", *exact}} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (HIDDEN, count * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 4, 2 * HIDDEN)
    if options.get("norm_before_fc"):
        assert tensors["input_norm.weight"].shape == (count * HIDDEN,)
    if name != "the target's projection":
        assert tensors["lm_head.weight"].shape == (len(IDS) if "draft_ids" in options else VOCAB, HIDDEN)


def test_config_of_eagle(tmp_path: Path) -> None:
    config = config_of(written(tmp_path / "e", Engine.sglang, bound(eagle()), dtype=torch.bfloat16))
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle"], "llama")
    assert (config["num_hidden_layers"], config["vocab_size"], config["dtype"]) == (1, VOCAB, "bfloat16")
    assert config["attention_bias"] is False
    assert (config["rope_theta"], config["rope_scaling"], config["rope_parameters"]) == (100.0, None, SPEC.rope)


@pytest.mark.parametrize("name", EAGLE3)
def test_config_of_eagle3(tmp_path: Path, name: str) -> None:
    options = EAGLE3[name]
    config = config_of(written(tmp_path / "e", Engine.sglang, bound(eagle3(**options))))
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert (config["target_hidden_size"], config["head_dim"]) == (HIDDEN, 4)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        assert config[key] is options.get(key, False)
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    assert config["eagle_config"]["norm_before_fc"] is options.get("norm_before_fc", False)
    assert config["num_aux_hidden_states"] == len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    if name == "four streams":
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EAGLE)
def test_round_trip_of_eagle_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    head = eagle(**EAGLE[name])
    own = eagle_parameters(load_file(written(tmp_path / "e", Engine.sglang, bound(head), dtype=dtype) / "model.safetensors"))
    parameters = dict(head.named_parameters())
    assert set(own) == set(parameters) | {"fc.bias"}
    assert all(torch.equal(own[n], p.to(dtype)) for n, p in parameters.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EAGLE3)
def test_round_trip_of_eagle3_is_exact(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    head = eagle3(**EAGLE3[name])
    own = eagle3_parameters(load_file(written(tmp_path / "e", Engine.sglang, bound(head), dtype=dtype) / "model.safetensors"), head)
    state = head.state_dict()
    assert set(own) == set(state)
    assert all(torch.equal(own[n], t.to(dtype if t.is_floating_point() else t.dtype)) for n, t in state.items())


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"kind": HeadKind.mtp}, r"head\.kind=mtp"),
    ({"embed_scale": 4.0}, {"kind": HeadKind.eagle}, "embed_scale=4"),
    ({"embed_scale": 4.0}, {"kind": HeadKind.eagle3}, "embed_scale=4"),
    ({"logit_scale": 0.5}, {"kind": HeadKind.eagle}, r"logit_scale=0\.5"),
    ({"logit_scale": 0.5}, {"kind": HeadKind.eagle3, "lm_head": OutputProjection.target}, r"logit_scale=0\.5"),
    ({"logit_softcap": 30.0}, {"kind": HeadKind.eagle}, "logit_softcap=30"),
    ({}, {"kind": HeadKind.eagle3, "norm_before_residual": True}, r"head\.norm_before_residual=true: the class adds the un-normed state"),
    ({}, {"kind": HeadKind.eagle3, "aux_captures": ["after_1", "after_4", "after_7"]}, r"head\.aux_captures=after_7"),
    ({"rope": YARN | {"rope_type": "dynamic"}}, {"kind": HeadKind.eagle}, "rope_type=dynamic"),
    ({"rope": YARN | {"attention_factor": 1.2}}, {"kind": HeadKind.eagle3}, r"rope attention_factor=1\.2"),
    ({"rope": SPEC.rope | {"partial_rotary_factor": 0.5}}, {"kind": HeadKind.eagle3}, r"partial_rotary_factor=0\.5"),
]


@pytest.mark.parametrize(("target", "head", "reason"), REFUSED)
def test_what_the_classes_cannot_express_is_refused_in_one_line(target: dict[str, Any], head: dict[str, Any], reason: str) -> None:
    spec = small_spec(**({"num_layers": 8} | target))
    with pytest.raises(UserError, match=rf"export\.engines=sglang: SGLang cannot express this head \({reason}.*leave sglang out") as caught:
        refuse(Engine.sglang, head_shape(HeadConfig(**head), spec), spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [HeadKind.eagle, HeadKind.eagle3])
@pytest.mark.parametrize(
    ("change", "reason"),
    [({"attention_bias": True}, "attention_bias"), ({"qk_norm": True}, "qk_norm"), ({"sliding_window": 8}, "sliding_window=8")],
)
def test_parts_that_a_llama_layer_has_not_are_refused(kind: HeadKind, change: dict[str, Any], reason: str) -> None:
    shape = head_shape(HeadConfig(kind=kind), SPEC)
    with pytest.raises(UserError, match=reason):
        refuse(Engine.sglang, replace(shape, layer=replace(shape.layer, **change)), SPEC)


def test_a_head_of_one_stream_is_refused() -> None:
    shape = head_shape(HeadConfig(kind=HeadKind.eagle3), SPEC)
    refuse(Engine.sglang, shape, SPEC)
    with pytest.raises(UserError, match=r"head\.aux_captures=after_2: of one state alone the class takes no fc"):
        refuse(Engine.sglang, replace(shape, captures=("after_2",)), SPEC)


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ({"logit_scale": 0.5, "logit_softcap": 30.0}, {"kind": HeadKind.eagle3}),
        ({"rope": YARN}, {"kind": HeadKind.eagle3}),
        ({"rope": YARN | {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}}, {"kind": HeadKind.eagle}),
        ({"rope": SPEC.rope | {"partial_rotary_factor": 1.0}}, {"kind": HeadKind.eagle}),
        ({"attention_bias": True, "qk_norm": True, "sliding_window": 8}, {"kind": HeadKind.eagle3, "sliding_window": 0}),
    ],
)
def test_what_the_classes_can_express_is_not_refused(target: dict[str, Any], head: dict[str, Any]) -> None:
    spec = small_spec(**({"num_layers": 8} | target))
    refuse(Engine.sglang, head_shape(HeadConfig(**head), spec), spec)


def test_a_refused_head_is_not_written() -> None:
    with pytest.raises(UserError, match="norm_before_residual"):
        to_engine(Engine.sglang, bound(eagle3(norm_before_residual=True)), SPEC)
