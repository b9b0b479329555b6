"""Packing: every document once, the budget kept, the same answer always."""

from hypothesis import given
from hypothesis import strategies as st

from mtptrain.data.packing import pack

LENGTHS = st.lists(st.integers(1, 60), max_size=80)
BUDGETS = st.integers(1, 100)


@given(LENGTHS, BUDGETS)
def test_every_document_exactly_once(lengths: list[int], budget: int) -> None:
    assert sorted(i for batch in pack(lengths, budget) for i in batch) == list(range(len(lengths)))


@given(LENGTHS, BUDGETS)
def test_budget_is_kept_unless_a_document_alone_exceeds_it(lengths: list[int], budget: int) -> None:
    for batch in pack(lengths, budget):
        assert batch
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


@given(LENGTHS, BUDGETS)
def test_no_two_batches_fit_together(lengths: list[int], budget: int) -> None:
    """Any-fit packing: a batch is only opened when its first document fits into no other, so no two batches could be one."""
    sums = sorted(sum(lengths[i] for i in batch) for batch in pack(lengths, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(LENGTHS, BUDGETS)
def test_deterministic_and_dependent_on_lengths_alone(lengths: list[int], budget: int) -> None:
    assert pack(lengths, budget) == pack(tuple(lengths), budget)


def test_equal_lengths_keep_their_order() -> None:
    assert pack([4, 4, 4, 4, 4], budget=8) == [[0, 1], [2, 3], [4]]


def test_worked_example() -> None:
    """By hand, longest first: 9 is alone (over 8); 5 opens a batch, 3 fills it; 2 opens the last."""
    assert pack([3, 5, 2, 9], budget=8) == [[3], [0, 1], [2]]


def test_a_document_goes_into_the_fullest_batch_that_takes_it() -> None:
    """By hand, budget 10: 7 | 6 | then 3 goes beside 7 (room 3), 4 beside 6 (room 4) though it came first."""
    assert pack([7, 6, 4, 3], budget=10) == [[0, 3], [1, 2]]


def test_no_documents() -> None:
    assert pack([], budget=8) == []
