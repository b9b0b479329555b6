"""Draft vocabularies: what is chosen, what is always kept, and that no more ids are drafted than occur."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtptrain.config import Config, HeadConfig, HeadKind, LossConfig, TargetConfig, TrainConfig
from mtptrain.data.documents import HELD_OUT, TRAIN, Document
from mtptrain.errors import UserError
from mtptrain.stages.context import Context, open_context
from mtptrain.stages.vocabulary import covered, draft_vocabulary, loss_vocabulary, most_frequent, special_ids, supervised_counts
from mtptrain.store.reader import Store
from mtptrain.target.tiny import make_tiny_target
from tests.unit.stores import make_store, random_state


@given(st.dictionaries(st.integers(0, 60), st.integers(0, 5)), st.integers(0, 70), st.sets(st.integers(0, 60), max_size=8))
def test_the_most_frequent_ids_and_all_kept_ones(counts: dict[int, int], size: int, kept: set[int]) -> None:
    chosen = most_frequent(Counter(counts), size, kept)
    occurring = {t for t, n in counts.items() if n}
    assert chosen == sorted(set(chosen))
    assert kept <= set(chosen) <= kept | occurring
    assert len(chosen) == max(len(kept), min(size, len(kept | occurring)))
    left_out = occurring - set(chosen)
    for inside in set(chosen) - kept:
        assert all((counts[inside], -inside) > (counts[outside], -outside) for outside in left_out)


DOCUMENTS = [
    Document(id="a", source="x", split=TRAIN, tokens=[9, 9, 100, 100, 100, 101, 102], spans=[(2, 7)]),
    Document(id="b", source="y", split=TRAIN, tokens=[9, 101, 103, 9], spans=[(1, 3)]),
    Document(id="c", source="y", split=HELD_OUT, tokens=[9, 104, 104, 104, 104], spans=[(1, 5)]),
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    make_store(tmp_path / "store", DOCUMENTS, {"final": random_state(DOCUMENTS, "final", 64)})
    return Store.open(tmp_path / "store", ["final"])


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return open_context(config(tmp_path_factory.mktemp("target") / "t"))


def config(target: Path, size: int | None = None, loss: int | None = None) -> Config:
    path = target if target.exists() else make_tiny_target(target, "llama")
    kind = HeadKind.mtp if loss else HeadKind.eagle3
    return Config(
        target=TargetConfig(path=str(path)),
        head=HeadConfig(kind=kind, draft_vocabulary=size),
        train=TrainConfig(loss=LossConfig(vocabulary=loss)),
    )


def test_only_the_supervised_tokens_of_the_training_split_are_counted(store: Store) -> None:
    counts = supervised_counts(store, store.indices("train"))
    assert counts == {"x": Counter({100: 3, 101: 1, 102: 1}), "y": Counter({101: 1, 103: 1})}


def test_special_ids_are_kept_and_the_most_frequent_follow(store: Store, context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(context.folder, 2)
    special = special_ids(cfg, context)
    assert special
    assert set(context.spec.eos_token_ids) <= special
    ids = draft_vocabulary(config(context.folder, len(special) + 2), context, store, store.indices("train"))
    assert ids is not None
    assert ids.dtype == torch.int64
    assert set(ids.tolist()) == special | {100, 101}
    said = capsys.readouterr().out
    assert (
        f"drafts {len(special) + 2} of {context.spec.vocab_size} ids (4 occur); they cover 71.4% (x 80.0%, y 50.0%) of supervised" in said
    )
    assert "tokens, 0.0% (y 0.0%) of held-out ones" in said  # 104 does not occur in the training split


def test_fault_12_fewer_distinct_tokens_than_asked_for_give_fewer_ids(store: Store, context: Context) -> None:
    ids = draft_vocabulary(config(context.folder, 300), context, store, store.indices("train"))
    assert ids is not None
    assert set(ids.tolist()) == special_ids(config(context.folder), context) | {100, 101, 102, 103}


def test_fault_12_a_size_beyond_the_vocabulary_is_no_other_case(store: Store, context: Context) -> None:
    documents = store.indices("train")
    small, large = (draft_vocabulary(config(context.folder, size), context, store, documents) for size in (300, 10**6))
    assert small is not None
    assert large is not None
    assert torch.equal(small, large)
    assert draft_vocabulary(config(context.folder), context, store, documents) is None


def test_a_vocabulary_of_special_ids_alone_is_refused(store: Store, context: Context) -> None:
    with pytest.raises(UserError, match=r"head\.draft_vocabulary=2: leaves no room"):
        draft_vocabulary(config(context.folder, 2), context, store, store.indices("train"))


def test_a_vocabulary_of_the_loss_alone(store: Store, context: Context) -> None:
    cfg = config(context.folder, loss=2)
    ids = loss_vocabulary(cfg, context, store, store.indices("train"))
    assert ids is not None
    assert set(ids.tolist()) == {100, 101, *context.spec.eos_token_ids}
    assert covered(Counter({1: 3, 2: 1}), [1]) == 0.75
