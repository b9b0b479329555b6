"""llama.cpp's GGUF: keys, names, shapes, types, and a forward by its names that equals the head's; a wrong convention shows; refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from torch import Tensor

from mtptrain.config import Engine, HeadKind, OutputProjection
from mtptrain.errors import UserError
from mtptrain.exporters.engines import refuse, to_engine
from mtptrain.heads.eagle3 import Eagle3Head
from mtptrain.heads.unroll import Unroll
from mtptrain.target.spec import TargetSpec
from tests.unit.gguf_contract import NAMES, Eagle3Draft, keys_of, tensors_of
from tests.unit.heads import EPS, HIDDEN, THETA, VOCAB, bound, small_batch, small_embed, small_head, small_spec

IDS = torch.tensor([1, 2, 5, 6, 9, 11, 12, 17, 20, 21, 24, 28, 30])
LENGTH, STEPS = 9, 3
LAYERS = 8
ENTERING = [2, 4, 5]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    LLAMA3 | {"partial_rotary_factor": 0.5},
    YARN,
    YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None},
]


def spec_of(**changes: Any) -> TargetSpec:
    return small_spec(**({"num_layers": LAYERS, "head_dim": 8} | changes))


def head_of(spec: TargetSpec, ids: Tensor | None = IDS, **head: Any) -> Eagle3Head:
    return small_head(spec, draft_ids=ids, kind=HeadKind.eagle3, **head)


def written(folder: Path, head: Eagle3Head, spec: TargetSpec, dtype: torch.dtype = torch.float32) -> Path:
    export = to_engine(Engine.gguf, bound(head), spec, dtype)
    assert export.layout == "gguf"
    folder.mkdir(exist_ok=True)
    export.write(folder)
    assert [f.name for f in folder.iterdir()] == ["draft.gguf"]
    return folder / "draft.gguf"


def streams(head: Eagle3Head) -> tuple[Tensor, dict[int, Tensor]]:
    """Tokens of a document, and what enters each layer of the target: the stream after the layer before."""
    batch = small_batch([LENGTH], [[(1, LENGTH)]], 1, captures=[f"after_{i}" for i in range(LAYERS)])
    return batch.token_T, {i + 1: batch.states[f"after_{i}"] for i in range(LAYERS)}


def ours(head: Eagle3Head) -> tuple[Tensor, Tensor]:
    """The head's own states [steps, T-1, H] and drafted tokens [steps, T-1] for every row of that document."""
    drafter, (token_T, inputs) = bound(head), streams(head)
    rows = torch.arange(LENGTH - 1)
    unroll = Unroll(drafter)
    states = {f"after_{i - 1}": x[:-1] for i, x in inputs.items()}
    unroll.extend(token_T[1:], states, rows, torch.zeros_like(rows))
    made, tokens = [unroll.start(rows)], [drafter.choices(unroll.start(rows))]
    for _ in range(1, STEPS):
        made.append(unroll.advance(rows, tokens[-1]))
        tokens.append(drafter.choices(made[-1]))
    return torch.stack(made).detach(), torch.stack(tokens)


def theirs(path: Path, head: Eagle3Head, **wrong: Any) -> tuple[Tensor, Tensor]:
    return Eagle3Draft(path, **wrong).draft(small_embed(), *streams(head), STEPS)


@pytest.mark.parametrize(
    ("ids", "options"),
    [
        (IDS, {}),
        (None, {}),
        (IDS, {"norm_before_residual": True}),
        (IDS, {"norm_before_fc": True}),
        (IDS, {"lm_head": OutputProjection.target}),
        (None, {"lm_head": OutputProjection.target}),
        (IDS, {"aux_captures": ["after_0", "after_5", "after_6"]}),
    ],
)
def test_drafts_by_llama_cpps_names_are_the_heads(tmp_path: Path, ids: Tensor | None, options: dict[str, Any]) -> None:
    """Every row's first step and two recycled ones. Both sides see the same float32 weights; the head computes in float32."""
    head = head_of(spec_of(), ids, **options)
    states, tokens = ours(head)
    their_states, their_tokens = theirs(written(tmp_path / "e", head, spec_of()), head)
    torch.testing.assert_close(states.double(), their_states, rtol=2e-5, atol=2e-5)
    assert torch.equal(tokens, their_tokens)
    assert len(tokens.unique()) > 3


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_type_that_is_written_is_the_heads(tmp_path: Path, rope: dict[str, Any]) -> None:
    spec = spec_of(rope=rope | {"rope_theta": THETA})
    head = head_of(spec)
    path = written(tmp_path / "e", head, spec)
    states, tokens = ours(head)
    their_states, their_tokens = theirs(path, head)
    torch.testing.assert_close(states.double(), their_states, rtol=2e-5, atol=2e-5)
    assert torch.equal(tokens, their_tokens)
    unscaled, _ = theirs(path, head, rope_scaling=False)
    assert bool((unscaled - their_states).abs().max() > 1e-2) == (rope["rope_type"] != "default")


@pytest.mark.parametrize(
    "wrong",
    [
        {"after": True},
        {"reverse": True},
        {"order": "hidden_embed"},
        {"hidden_norm": False},
        {"swap_norms": True},
        {"flip_residual": True},
        {"neox": True},
        {"theta_factor": 10.0},
        {"one_plus": True},
        {"zero_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_a_wrong_convention_changes_the_first_step(tmp_path: Path, wrong: dict[str, Any], norm_before_residual: bool) -> None:
    """Ids as after-layer, reversed streams, concat order, norms, residual, RoPE pairs and base, 1+w, embedding at position 0."""
    head = head_of(spec_of(), norm_before_residual=norm_before_residual)
    states, _ = ours(head)
    their_states, _ = theirs(written(tmp_path / "e", head, spec_of()), head, **wrong)
    assert float((states[0].double() - their_states[0]).abs().max()) > 1e-2


@pytest.mark.parametrize("wrong", [{"recycle": "post_norm"}, {"still": True}], ids=str)
def test_a_wrong_convention_changes_the_recycled_step_alone(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Recycled state before or after the norm; RoPE position of a recycled step."""
    head = head_of(spec_of())
    states, _ = ours(head)
    their_states, _ = theirs(written(tmp_path / "e", head, spec_of()), head, **wrong)
    torch.testing.assert_close(states[0].double(), their_states[0], rtol=2e-5, atol=2e-5)
    assert float((states[1].double() - their_states[1]).abs().max()) > 1e-2


def test_d2t_holds_ids_and_read_as_offsets_it_drafts_other_tokens(tmp_path: Path) -> None:
    head = head_of(spec_of())
    path = written(tmp_path / "e", head, spec_of())
    d2t = tensors_of(path)["d2t"]
    assert d2t.dtype is torch.int64
    assert torch.equal(d2t, IDS)
    _, tokens = ours(head)
    assert not torch.isin(theirs(path, head, offsets=True)[1][0], tokens[0]).all()


def test_keys(tmp_path: Path) -> None:
    spec = spec_of(max_position_embeddings=4096, rope=YARN | {"rope_theta": 5e5})
    head = head_of(spec, norm_before_residual=True)
    keys = keys_of(written(tmp_path / "e", head, spec, torch.bfloat16))
    assert keys.pop("eagle3.attention.layer_norm_rms_epsilon") == pytest.approx(EPS, rel=1e-6)  # float32 in the file
    assert keys == {
        "general.architecture": "eagle3",
        "tokenizer.ggml.model": "none",
        "eagle3.vocab_size": VOCAB,
        "eagle3.context_length": 4096,
        "eagle3.embedding_length": HIDDEN,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": 24,
        "eagle3.attention.head_count": 4,
        "eagle3.attention.head_count_kv": 2,
        "eagle3.attention.key_length": 8,
        "eagle3.attention.value_length": 8,
        "eagle3.rope.dimension_count": 8,
        "eagle3.rope.freq_base": 5e5,
        "eagle3.rope.scaling.type": "yarn",
        "eagle3.rope.scaling.factor": 4.0,
        "eagle3.rope.scaling.original_context_length": 64,
        "eagle3.target_layers": ENTERING,
        "eagle3.extract_layers": ENTERING,
        "eagle3.target_hidden_size": HIDDEN,
        "eagle3.norm_before_residual": True,
        "eagle3.norm_before_fc": False,
    }


def test_values_have_the_types_llama_cpp_asks_for(tmp_path: Path) -> None:
    """It refuses a key of another type."""
    spec = spec_of(rope=YARN | {"rope_theta": THETA})
    types = {
        name.removeprefix("eagle3."): [t.name for t in field.types]
        for name, field in GGUFReader(written(tmp_path / "e", head_of(spec), spec)).fields.items()
    }
    reals = {"attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"}
    for name, found in types.items():
        if name in ("target_layers", "extract_layers"):
            assert found == ["ARRAY", "INT32"]
        elif name in ("general.architecture", "tokenizer.ggml.model", "rope.scaling.type"):
            assert found == ["STRING"]
        elif name.startswith("norm_before_"):
            assert found == ["BOOL"]
        elif not name.startswith("GGUF."):
            assert found == (["FLOAT32"] if name in reals else ["UINT32"])


def test_names_shapes_and_types(tmp_path: Path) -> None:
    """Matrices in the export's dtype, norms and frequencies float32; the target's embeddings are not in the file."""
    spec = spec_of(rope=LLAMA3 | {"rope_theta": THETA})
    tensors = tensors_of(written(tmp_path / "e", head_of(spec, norm_before_fc=True), spec, torch.bfloat16))
    extra = {"output.weight", "d2t", "rope_freqs.weight", "enc.output_norm.weight"}
    assert set(tensors) == NAMES | extra
    assert {t.dtype for t in tensors.values() if t.dim() == 2} == {torch.bfloat16}
    assert {t.dtype for name, t in tensors.items() if t.dim() == 1 and name != "d2t"} == {torch.float32}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes["fc.weight"] == (HIDDEN, 3 * HIDDEN)
    assert shapes["enc.output_norm.weight"] == (3 * HIDDEN,)
    assert shapes["blk.0.attn_q.weight"] == (4 * 8, 2 * HIDDEN)
    assert shapes["blk.0.attn_k.weight"] == shapes["blk.0.attn_v.weight"] == (2 * 8, 2 * HIDDEN)
    assert shapes["blk.0.attn_output.weight"] == (HIDDEN, 4 * 8)
    assert shapes["blk.0.ffn_gate.weight"] == shapes["blk.0.ffn_up.weight"] == (24, HIDDEN)
    assert shapes["blk.0.ffn_down.weight"] == (HIDDEN, 24)
    assert shapes["output.weight"] == (len(IDS), HIDDEN)
    assert shapes["rope_freqs.weight"] == (4,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_the_heads_rounded_once(tmp_path: Path, dtype: torch.dtype) -> None:
    head = head_of(spec_of())
    tensors = tensors_of(written(tmp_path / "e", head, spec_of(), dtype))
    own = dict(head.named_parameters())
    pairs = {
        "fc.weight": "fc.weight",
        "blk.0.attn_v.weight": "layer.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "layer.self_attn.o_proj.weight",
        "blk.0.ffn_gate.weight": "layer.mlp.gate_proj.weight",
        "blk.0.ffn_up.weight": "layer.mlp.up_proj.weight",
        "blk.0.ffn_down.weight": "layer.mlp.down_proj.weight",
        "output.weight": "lm_head.weight",
    }
    for name, mine in pairs.items():
        assert torch.equal(tensors[name], own[mine].to(dtype))
    norms = {
        "blk.0.attn_norm": "embed_norm",
        "blk.0.attn_norm_2": "hidden_norm",
        "blk.0.ffn_norm": "layer.post_attention_layernorm",
        "output_norm": "norm",
    }
    for name, mine in norms.items():
        assert torch.equal(tensors[f"{name}.weight"], own[f"{mine}.weight"])
    q_ND, mine_ND = (t.unflatten(0, (4, 8)) for t in (tensors["blk.0.attn_q.weight"], own["layer.self_attn.q_proj.weight"].to(dtype)))
    assert torch.equal(q_ND, mine_ND[:, [0, 4, 1, 5, 2, 6, 3, 7]])


def test_rows_past_the_rotary_part_stay(tmp_path: Path) -> None:
    spec = spec_of(rope=LLAMA3 | {"rope_theta": THETA, "partial_rotary_factor": 0.5})
    head = head_of(spec)
    path = written(tmp_path / "e", head, spec)
    assert keys_of(path)["eagle3.rope.dimension_count"] == 4
    mine_GD = head.layer.self_attn.k_proj.weight.unflatten(0, (2, 8))
    assert torch.equal(tensors_of(path)["blk.0.attn_k.weight"].unflatten(0, (2, 8)), mine_GD[:, [0, 2, 1, 3, 4, 5, 6, 7]])


@pytest.mark.parametrize(("ids", "rows"), [(None, None), (IDS, small_embed()[IDS])], ids=["whole", "reduced"])
def test_the_targets_projection_is_in_the_file_only_where_its_rows_are_chosen(
    tmp_path: Path, ids: Tensor | None, rows: Tensor | None
) -> None:
    tensors = tensors_of(written(tmp_path / "e", head_of(spec_of(), ids, lm_head=OutputProjection.target), spec_of()))
    assert ("output.weight" in tensors) == ("d2t" in tensors) == (rows is not None)
    assert rows is None or torch.equal(tensors["output.weight"], rows)


def test_a_head_in_bfloat16_has_the_frequencies_of_its_config(tmp_path: Path) -> None:
    spec = spec_of(rope=LLAMA3 | {"rope_theta": THETA})
    files = [written(tmp_path / name, head, spec) for name, head in (("a", head_of(spec)), ("b", head_of(spec).to(torch.bfloat16)))]
    assert torch.equal(*(tensors_of(path)["rope_freqs.weight"] for path in files))


@pytest.mark.parametrize(
    ("target", "head", "reason"),
    [
        ({}, {"kind": HeadKind.mtp}, "hold eagle3 heads"),
        ({}, {"kind": HeadKind.eagle}, "hold eagle3 heads"),
        ({}, {"aux_captures": ["after_1", "after_4"]}, r"head\.aux_captures=after_1,after_4: its eagle3 reads 3 streams"),
        ({}, {"aux_captures": ["after_1", "after_3", "after_7"]}, "after_7 enters none"),
        ({"num_layers": 4}, {}, "after_3 enters none"),
        ({}, {"fc_norm": True}, r"head\.fc_norm=true"),
        ({}, {"norm_output": True}, r"head\.norm_output=true"),
        ({"embed_scale": 4.0}, {}, "embed_scale=4"),
        ({"rope": {"rope_type": "dynamic", "rope_theta": THETA, "factor": 2.0}}, {}, "rope_type=dynamic"),
        ({"rope": YARN | {"rope_theta": THETA, "attention_factor": 1.5}}, {}, r"attention_factor=1\.5"),
        ({"rope": YARN | {"rope_theta": THETA, "beta_slow": 2.0}}, {}, r"beta_slow=2\.0"),
        ({"rope": YARN | {"rope_theta": THETA, "truncate": False}}, {}, "truncate=False"),
    ],
)
def test_what_the_file_cannot_express_is_refused_in_one_line(target: dict[str, Any], head: dict[str, Any], reason: str) -> None:
    spec = spec_of(**target)
    built = small_head(spec, **({"kind": HeadKind.eagle3} | head))
    with pytest.raises(UserError, match=reason) as caught:
        refuse(Engine.gguf, built.config, spec)
    assert "\n" not in str(caught.value)
    assert "llama.cpp" in str(caught.value)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"qk_norm": True}, {"sliding_window": 8}], ids=str)
def test_an_attention_it_has_not_is_refused(change: dict[str, Any]) -> None:
    config = head_of(spec_of()).config
    with pytest.raises(UserError, match=f"{next(iter(change))}="):
        refuse(Engine.gguf, replace(config, layer=replace(config.layer, **change)), spec_of())


@pytest.mark.parametrize("rope", ROPES)
def test_the_rest_is_not_refused(rope: dict[str, Any]) -> None:
    spec = spec_of(rope=rope | {"rope_theta": THETA})
    refuse(Engine.gguf, head_of(spec, norm_before_fc=True, norm_before_residual=True).config, spec)
