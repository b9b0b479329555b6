"""Capture points, packing and the choice of device and dtype."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from mtptrain.config import Device, Dtype
from mtptrain.errors import UserError
from mtptrain.target.ends import load_ends
from mtptrain.target.model import capture_packed, load_model, pick_device, pick_dtype, set_threads
from tests.unit.tiny import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "t")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_model(folder, torch.float32, CPU, trust_remote_code=False)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def alone(model: PreTrainedModel, document: list[int]) -> tuple[tuple[Tensor, ...], Tensor]:
    with torch.no_grad():
        output = model(input_ids=torch.tensor([document]), output_hidden_states=True, use_cache=False)
    return tuple(state[0] for state in output.hidden_states), output.logits[0]


def test_fault_01_capture_layer_is_neither_early_nor_late(model: PreTrainedModel) -> None:
    document = list(range(3, 40))
    hidden, _ = alone(model, document)
    states = capture_packed(model, [document], ["after_0", "after_1"])
    for i in (0, 1):
        assert relative(states[f"after_{i}"], hidden[i + 1]) < 1e-6
        assert relative(states[f"after_{i}"], hidden[i]) > 0.1
        assert relative(states[f"after_{i}"], hidden[i + 2]) > 0.1


def test_fault_02_teacher_logits_come_from_final_not_from_the_last_layer(model: PreTrainedModel, folder: Path) -> None:
    document = list(range(50, 90))
    _, logits = alone(model, document)
    states = capture_packed(model, [document], ["final", "after_2"])
    lm_head_VH = load_ends(folder, torch.float32, CPU).lm_head_VH
    assert relative(states["final"] @ lm_head_VH.T, logits) < 1e-5
    assert relative(states["after_2"] @ lm_head_VH.T, logits) > 0.1
    rms = states["after_2"].double().square().mean(-1, keepdim=True).add(1e-6).sqrt()
    norm_H = load_ends(folder, torch.float32, CPU).final_norm_H.double()
    assert relative(states["final"], states["after_2"].double() / rms * norm_H) < 1e-5


def test_only_the_asked_states_come_back_in_order(model: PreTrainedModel) -> None:
    states = capture_packed(model, [[5, 6, 7], [8]], ["after_1", "final"])
    assert list(states) == ["after_1", "final"]
    assert {state.shape for state in states.values()} == {(4, 64)}
    assert not states["final"].requires_grad


def test_the_model_is_left_as_it_was(model: PreTrainedModel) -> None:
    before, _ = alone(model, [5, 6, 7, 8])
    hooks = [list(layer._forward_hooks) for layer in model.model.layers]
    capture_packed(model, [[5, 6], [7, 8]], ["after_0", "final"])
    assert [list(layer._forward_hooks) for layer in model.model.layers] == hooks
    after, _ = alone(model, [5, 6, 7, 8])
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(before[-1], after[-1])


@settings(max_examples=15, deadline=None)
@given(documents=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=30), min_size=1, max_size=5))
def test_neighbours_never_change_a_document(model: PreTrainedModel, documents: list[list[int]]) -> None:
    packed = capture_packed(model, documents, ["final", "after_1"])
    expected = [alone(model, document)[0] for document in documents]
    assert relative(packed["final"], torch.cat([hidden[-1] for hidden in expected])) < 1e-5
    assert relative(packed["after_1"], torch.cat([hidden[2] for hidden in expected])) < 1e-5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0] * 8,
            "long_factor": [3.0] * 8,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_a_long_neighbour_does_not_change_length_dependent_rope(tmp_path: Path, rope: dict[str, object]) -> None:
    """With one forward for all, the 40-token document would switch the 10-token one to the long frequencies."""
    folder = tiny_llama(tmp_path / "t", rope_parameters=rope, max_position_embeddings=16 if rope["rope_type"] == "dynamic" else 64)
    model = load_model(folder, torch.float32, CPU, trust_remote_code=False)
    short, long = list(range(3, 13)), list(range(3, 43))
    expected = torch.cat([alone(model, document)[0][-1] for document in (short, long)])
    assert relative(capture_packed(model, [short, long], ["final"])["final"], expected) < 1e-5


def test_a_layer_the_target_lacks_is_named(model: PreTrainedModel) -> None:
    with pytest.raises(UserError, match=r"after_3.*its last is after_2"):
        capture_packed(model, [[1, 2]], ["after_3"])


def test_load_model_is_frozen_and_in_evaluation_mode(model: PreTrainedModel) -> None:
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert next(model.parameters()).dtype is torch.float32


def test_device_and_dtype_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(Device.auto) == pick_device(Device.cpu) == CPU
    with pytest.raises(UserError, match="device=cuda"):
        pick_device(Device.cuda)
    assert pick_dtype(Dtype.bfloat16, CPU) is torch.bfloat16
    assert pick_dtype(Dtype.float32, CPU) is torch.float32
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert pick_dtype(Dtype.auto, CPU) is (torch.bfloat16 if native else torch.float32)


def test_threads() -> None:
    before = torch.get_num_threads()
    set_threads(0)
    assert torch.get_num_threads() == before
    set_threads(1)
    assert torch.get_num_threads() == 1
    set_threads(before)
