"""Shifts between tokens, states and predictions, against their definition token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtptrain.heads.alignment import align, pack_alignments, supervised_rows


@st.composite
def documents(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    length = draw(st.integers(1, 30))
    cuts = sorted(draw(st.lists(st.integers(0, length), unique=True, max_size=8)))
    return length, list(zip(cuts[0::2], cuts[1::2], strict=False))


def by_definition(length: int, spans: list[tuple[int, int]], p: int, k: int) -> bool:
    """Tokens p+1 .. p+2+k all lie in one span."""
    return any(all(start <= t < end for t in range(p + 1, p + 3 + k)) for start, end in spans)


@given(documents(), st.integers(1, 6))
def test_valid_rows_are_those_of_the_definition(document: tuple[int, list[tuple[int, int]]], steps: int) -> None:
    length, spans = document
    rows = align(length, spans, steps)
    assert rows.row_R.tolist() == rows.position_R.tolist() == list(range(length - 1))
    for p in range(length - 1):
        for k in range(steps):
            valid = by_definition(length, spans, p, k)
            assert bool(rows.valid_RK[p, k]) == valid
            if valid:
                assert (int(rows.input_RK[p, k]), int(rows.teacher_RK[p, k]), int(rows.label_RK[p, k])) == (p + 1 + k, p + 1 + k, p + 2 + k)


@given(documents())
def test_supervised_rows_counts_step_0(document: tuple[int, list[tuple[int, int]]]) -> None:
    length, spans = document
    assert supervised_rows(spans) == int(align(length, spans, 1).valid_RK.sum())


@given(st.lists(documents(), min_size=1, max_size=5), st.integers(1, 4))
def test_packing_offsets_indices_and_keeps_documents_apart(parts: list[tuple[int, list[tuple[int, int]]]], steps: int) -> None:
    lengths = [length for length, _ in parts]
    packed = pack_alignments([align(length, spans, steps) for length, spans in parts], lengths)
    at, offset = 0, 0
    for number, (length, spans) in enumerate(parts):
        alone = align(length, spans, steps)
        rows = slice(at, at + length - 1)
        assert (packed.document_R[rows] == number).all()
        assert (packed.position_R[rows] == alone.position_R).all()
        for name in ("row_R", "input_RK", "label_RK", "teacher_RK"):
            moved = getattr(packed, name)[rows]
            assert (moved == getattr(alone, name) + offset).all()
            assert ((moved >= offset) & (moved < offset + length)).all()
        assert (packed.valid_RK[rows] == alone.valid_RK).all()
        at, offset = at + length - 1, offset + length


def test_fault_09_first_drafted_token_is_trained_and_the_last_label_is_real() -> None:
    """A span of n tokens gives n-1 labels: its second token is the first one, its end marker the last, nothing behind it."""
    rows = align(7, [(3, 6)], 2)
    labels = rows.label_RK[:, 0][rows.valid_RK[:, 0]].tolist()
    assert labels == [4, 5]
    assert rows.row_R[rows.valid_RK[:, 0]].tolist() == [2, 3]


def test_a_span_outside_the_document_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie in a document of 5 tokens"):
        align(5, [(3, 6)], 1)
