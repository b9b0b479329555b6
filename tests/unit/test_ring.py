"""The window of shards that is on disk while training goes on."""

from hypothesis import given
from hypothesis import strategies as st

from mtptrain.data.order import epoch_batches
from mtptrain.store.ring import Ring, Visits

EPOCHS = st.lists(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=8), min_size=1, max_size=3)


@given(EPOCHS, st.integers(1, 3), st.integers(1, 20))
def test_what_an_update_uses_is_in_the_window_that_lies_there_before_it(epochs: list[list[list[int]]], accumulate: int, most: int) -> None:
    batches = [(epoch, shards) for epoch, of_epoch in enumerate(epochs) for shards in of_epoch]
    updates = min(most, -(-len(batches) // accumulate))
    visits = Visits.of(epochs, accumulate, updates)
    room, largest = visits.room(), 0
    for update in range(updates):
        used = {shard for _, shards in batches[update * accumulate : (update + 1) * accumulate] for shard in shards}
        ring = Ring(visits.shards, visits.done(update), room)
        assert used <= set(ring.window)
        assert used <= set(visits.wanted(update))
        largest = max(largest, sum(first <= update for first in visits.first) - visits.done(update))
    assert room == largest
    assert visits.done(updates) == len(visits.shards)


@given(EPOCHS, st.integers(1, 3))
def test_each_epoch_visits_a_shard_once_and_in_the_order_of_first_use(epochs: list[list[list[int]]], accumulate: int) -> None:
    visits = Visits.of(epochs, accumulate, 1000)
    assert visits.shards == [shard for of_epoch in epochs for shard in dict.fromkeys(s for shards in of_epoch for s in shards)]
    assert visits.first == sorted(visits.first)
    assert all(first <= last for first, last in zip(visits.first, visits.last, strict=True))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 9))
def test_documents_are_shuffled_within_groups_of_shards(documents: list[tuple[int, int]], together: int, seed: int) -> None:
    lengths, shards = [length for length, _ in documents], [shard for _, shard in documents]
    names = list(range(100, 100 + len(documents)))
    batches = epoch_batches(names, lengths, budget=40, seed=seed, epoch=0, shards=shards, together=together)
    order = [name - 100 for batch in batches for name in batch]
    assert sorted(order) == list(range(len(documents)))
    groups: list[set[int]] = []
    for i in order:  # a shard belongs to one group, and a group ends before the next one begins
        if not groups or (shards[i] not in groups[-1] and len(groups[-1]) == together):
            groups.append(set())
        groups[-1].add(shards[i])
    seen = [shard for group in groups for shard in group]
    assert len(seen) == len(set(seen))
    assert all(len(group) == together for group in groups[:-1])
