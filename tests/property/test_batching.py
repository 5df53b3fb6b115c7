"""`take` keeps order, budget and every segment, whatever arrives."""

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batcher import Ticket, take
from encoder import Segment


def ticket(num_patches: int) -> Ticket:
    return Ticket(Segment(torch.zeros((num_patches, 3, 1, 1), dtype=torch.uint8), (1, 1, num_patches)))


arrivals = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=40)


@given(arrivals, st.integers(40, 100))
def test_batches_keep_order_and_budget_and_lose_nothing(sizes: list[tuple[int, bool]], budget: int) -> None:
    tickets = [ticket(size) for size, _ in sizes]
    for each, (_, abandoned) in zip(tickets, sizes, strict=True):
        if abandoned:
            each.result.cancel()
    waiting = deque(tickets)
    taken: list[Ticket] = []
    while waiting:
        batch = take(waiting, budget)
        assert sum(each.num_patches for each in batch) <= budget
        assert batch or not waiting  # the queue always moves
        taken += batch
    assert taken == [each for each in tickets if not each.abandoned]


@given(arrivals, st.integers(40, 100))
def test_a_batch_ends_only_where_the_next_segment_would_not_fit(sizes: list[tuple[int, bool]], budget: int) -> None:
    waiting = deque(ticket(size) for size, _ in sizes)
    while waiting:
        used = sum(each.num_patches for each in take(waiting, budget))
        assert not waiting or used + waiting[0].num_patches > budget


def test_nothing_fits_an_exhausted_budget() -> None:
    waiting = deque([ticket(5)])
    assert take(waiting, 4) == []
    assert len(waiting) == 1
