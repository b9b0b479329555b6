"""No held-out prompt, nor 13 words of one, is left in training; nothing depends on more than the seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtptrain.data.readers import Record
from mtptrain.data.split import deduplicated, normalised, sampled, split_off, without_overlap

WORDS = [f"w{n}" for n in range(40)]


def record(*turns: str, name: str = "r") -> Record:
    roles = ("user", "assistant")
    return Record(id=name, source="s", messages=[{"role": roles[n % 2], "content": t} for n, t in enumerate(turns)])


def text(start: int, stop: int) -> str:
    return " ".join(WORDS[start:stop])


@pytest.mark.parametrize(
    ("train", "held_out", "overlaps"),
    [
        (text(0, 30), "x " + text(10, 23) + " y", True),  # 13 words in common
        (text(0, 30), "x " + text(10, 22) + " y", False),  # 12
        (text(0, 30).upper().replace(" ", "\n\t "), text(5, 18), True),  # case and whitespace don't count
        ("Say  HI", "say hi", True),
        ("say hi there", "say hi", False),
        (text(0, 12), text(0, 13), False),
    ],
)
def test_overlap_is_thirteen_words_or_the_same_opening(train: str, held_out: str, overlaps: bool) -> None:
    kept, dropped = without_overlap([record(train)], [record(held_out)])
    assert (len(kept), dropped) == ((0, 1) if overlaps else (1, 0))


def test_overlap_looks_at_all_user_turns_and_no_assistant_turn() -> None:
    held_out = [record("first", text(0, 30), "second " + text(20, 33))]
    assert without_overlap([record("other", "x", text(20, 33))], held_out)[1] == 1
    assert without_overlap([record("other " + text(0, 13))], held_out)[1] == 0
    assert without_overlap([record("First", "x", "something else")], held_out)[1] == 1  # the same first answer would be in both


def test_duplicates_keep_the_first_and_count_answers_only_where_they_are_kept() -> None:
    records = [record("Hi", "Yes", name="a"), record("hi ", "No", name="b"), record("Ho", "Yes", name="c"), record("Hi", "Yes", name="d")]
    kept, dropped = deduplicated(records, with_answers=False)
    assert ([r.id for r in kept], dropped) == (["a", "c"], 2)
    kept, dropped = deduplicated(records, with_answers=True)
    assert ([r.id for r in kept], dropped) == (["a", "b", "c"], 1)


@given(size=st.integers(0, 60), fraction=st.floats(0, 0.99), most=st.integers(1, 20), seed=st.integers(0, 5))
def test_split_off_is_a_partition_of_the_asked_size(size: int, fraction: float, most: int, seed: int) -> None:
    records = [record(f"prompt {n}", name=str(n)) for n in range(size)]
    train, held_out = split_off(records, fraction, most, seed)
    names = [r.id for r in records]
    assert sorted([r.id for r in train + held_out], key=int) == names
    assert [r.id for r in train] == [n for n in names if n not in {r.id for r in held_out}]
    assert len(held_out) <= most
    assert abs(len(held_out) - min(fraction * size, most)) <= 1
    assert not size or train
    if size > 1:
        assert bool(held_out) == (fraction > 0)
    assert split_off(records, fraction, most, seed) == (train, held_out)


def test_seed_decides_the_split() -> None:
    records = [record(f"prompt {n}") for n in range(100)]
    drawn = {tuple(r.messages[0]["content"] for r in split_off(records, 0.1, 100, seed)[1]) for seed in range(5)}
    assert len(drawn) == 5


def test_sample_keeps_order() -> None:
    rows = list(range(50))
    drawn = sampled(rows, 10, seed=3)
    assert len(drawn) == 10
    assert drawn == sorted(drawn)
    assert drawn != rows[:10]
    assert sampled(rows, None, 3) == sampled(rows, 50, 3) == rows


@given(st.text())
def test_normalised_text_is_a_fixed_point(given_text: str) -> None:
    once = normalised(given_text)
    assert once == " ".join(once.split())
    assert normalised(f"\n {given_text}\t ") == once
