"""The report's error of the store's codecs, against float64, on held-out states that the store keeps exact."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtptrain.heads.lm_head import LmHead
from mtptrain.report.sections import _stored
from mtptrain.stages.codec_error import codec_error
from mtptrain.stages.context import Context
from mtptrain.store.codecs import BF16, CODECS, INT4, INT8
from mtptrain.store.reader import Store
from tests.unit.stores import make_store, random_documents, random_state

HIDDEN, VOCAB = 64, 50
CAPTURES = ["final", "after_1"]


@pytest.fixture
def projection() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def found(folder: Path, projection: torch.Tensor, codecs: Any) -> tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]:
    documents = random_documents([8, 12, 20, 9, 14, 30, 11, 7])
    states = {c: random_state(documents, c, HIDDEN) for c in CAPTURES}
    make_store(folder, documents, states, codecs=codecs)
    store = Store.open(folder, CAPTURES)
    chosen = store.indices("held_out")
    context = Context(folder, None, None, LmHead(projection), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    return codec_error(store, context, CAPTURES, chosen), *([states[c][i] for i in chosen] for c in CAPTURES)


@pytest.mark.parametrize("codecs", [(INT8, INT4), (CODECS["fp8"], INT8)], ids=["int8, int4", "fp8, int8"])
def test_it_is_what_the_definition_says(tmp_path: Path, projection: torch.Tensor, codecs: Any) -> None:
    error, final, aux = found(tmp_path, projection, codecs)
    assert error["codec"] == {"final": f"{codecs[0].name} 1", "after_1": f"{codecs[1].name} 1"}
    for name, states, codec in (("final", final, codecs[0]), ("after_1", aux, codecs[1])):
        exact = torch.cat(states)
        decoded = codec.decode(codec.encode(exact), 0, len(exact))
        expected = ((decoded.double() - exact.double()).norm(dim=1) / exact.double().norm(dim=1)).mean()
        assert error["relative_error"][name] == pytest.approx(float(expected), rel=1e-5)
        assert error["relative_error"][name] > 0.001
        if name == "final":
            p, q = ((s.double() @ projection.double().T).log_softmax(-1) for s in (exact, decoded))
            assert error["rows"] == len(exact)
            assert error["teacher_kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
            assert error["first_choice_changed"] == float((p.argmax(-1) != q.argmax(-1)).double().mean())
    assert "States were read from" in _stored(error)


def test_whole_states_have_none(tmp_path: Path, projection: torch.Tensor) -> None:
    error, _, _ = found(tmp_path, projection, (BF16, BF16))
    assert error["relative_error"] == {"final": 0.0, "after_1": 0.0}
    assert error["teacher_kl"] == error["first_choice_changed"] == 0
    assert _stored(error) == ""
    assert _stored(None) == ""
