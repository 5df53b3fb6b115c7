"""The queue loses nothing, keeps every request's order and the budget, and lets nobody wait beyond what it promises."""

from collections import defaultdict

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from app.fair_queue import BATCH_CLASS_PARTS, MAX_PASSED_OVER, FairQueue
from app.ticket import Caller, Ticket, count_bytes, count_patches
from encoder import Segment

LARGEST = 40
budgets = st.integers(LARGEST, 100)
sizes = st.lists(st.integers(1, LARGEST), min_size=1, max_size=12)
# What happens to a queue: a request (by number) brings segments, or it gives up all it has, or a batch is taken.
events = st.lists(
    st.one_of(
        st.tuples(st.just("bring"), st.integers(0, 5), sizes),
        st.tuples(st.just("leave"), st.integers(0, 5), st.just([])),
        st.tuples(st.just("take"), st.integers(1, 100), st.just([])),
    ),
    max_size=40,
)


SEGMENTS = [Segment(torch.zeros((n, 3, 1, 1), dtype=torch.uint8), (1, 1, n)) for n in range(1, LARGEST + 1)]


def bring(queue: FairQueue, caller: Caller, sizes: list[int]) -> list[Ticket]:
    tickets = [Ticket(SEGMENTS[size - 1], caller) for size in sizes]
    queue.add(caller, tickets)
    return tickets


def drain(queue: FairQueue) -> list[list[Ticket]]:
    batches = []
    while queue:
        batches.append(queue.take())
    return batches


@given(events, budgets)
def test_nothing_is_lost_or_reordered_and_no_batch_is_too_large(
    events: list[tuple[str, int, list[int]]], budget: int
) -> None:
    callers = [Caller(priority) for priority in ("interactive", "batch") for _ in range(3)]
    queue = FairQueue(budget)
    brought: dict[Caller, list[Ticket]] = defaultdict(list)
    taken: dict[Caller, list[Ticket]] = defaultdict(list)
    batches = []
    for event, number, sizes in events:
        match event:
            case "bring":
                brought[callers[number]] += bring(queue, callers[number], sizes)
            case "leave":
                for each in brought[callers[number]]:
                    if each not in taken[callers[number]]:
                        each.result.cancel()
                queue.drop_abandoned(callers[number])
                assert queue.patches_of(callers[number]) == 0
            case "take":
                batches.append(queue.take(number))
                for each in batches[-1]:
                    taken[each.caller].append(each)
        waiting = [t for c in callers for t in brought[c] if t not in taken[c] and not t.abandoned]
        assert queue.patches == count_patches(waiting)
        assert queue.num_bytes == count_bytes(waiting)
    for batch in (rest := drain(queue)):
        assert batch or not queue  # it always moves
        for each in batch:
            taken[each.caller].append(each)
    assert all(count_patches(batch) <= budget for batch in batches + rest)
    for caller in callers:
        assert taken[caller] == [each for each in brought[caller] if not each.abandoned]


@given(sizes, sizes, st.integers(1, LARGEST), st.integers(1, 3 * LARGEST))
def test_a_segment_larger_than_the_budget_is_alone_and_bytes_close_a_batch(
    first: list[int], second: list[int], budget: int, max_bytes: int
) -> None:
    queue = FairQueue(budget, max_bytes)
    interactive, batch_class = Caller(), Caller("batch")
    brought = bring(queue, interactive, first) + bring(queue, batch_class, second)
    found: list[Ticket] = []
    turns = 0
    while queue:
        batch = queue.take()
        found += batch
        turns += 1
        assert count_patches(batch) <= budget or len(batch) == 1
        largest = max((each.num_bytes for each in batch), default=0)
        assert count_bytes(batch) < max_bytes + largest
        assert turns <= len(brought) * (1 + BATCH_CLASS_PARTS * (-(-LARGEST // budget)))
    assert sorted(map(id, found)) == sorted(map(id, brought))
    for caller in (interactive, batch_class):
        assert [each for each in found if each.caller is caller] == [each for each in brought if each.caller is caller]
    assert (queue.patches, queue.num_bytes) == (0, 0)


@given(st.integers(2, LARGEST))
def test_the_batch_class_saves_up_for_a_segment_larger_than_the_budget(budget: int) -> None:
    """While interactive work never ends: an eighth of the budget a batch, until the savings cover it."""
    queue = FairQueue(budget)
    (large,) = bring(queue, Caller("batch"), [LARGEST])
    batches = -(-LARGEST // -(-budget // BATCH_CLASS_PARTS))
    for _ in range(batches + 1):
        bring(queue, Caller(), [min(budget, LARGEST)] * 2)
        batch = queue.take()
        if large in batch:
            assert budget >= LARGEST or batch == [large]
            return
    raise AssertionError(f"not taken within {batches + 1} batches")


@given(sizes, sizes, st.lists(st.booleans(), min_size=24, max_size=24), budgets)
def test_work_that_was_given_up_without_a_word_is_not_handed_out(
    first: list[int], second: list[int], gone: list[bool], budget: int
) -> None:
    queue = FairQueue(budget)
    tickets = bring(queue, Caller(), first) + bring(queue, Caller("batch"), second)
    for each, is_gone in zip(tickets, gone, strict=False):
        if is_gone:
            each.result.cancel()
    found = [each for batch in drain(queue) for each in batch]
    assert sorted(map(id, found)) == sorted(id(each) for each in tickets if not each.abandoned)


@given(st.lists(sizes, min_size=1, max_size=5), budgets)
def test_a_batch_ends_only_where_nobodys_next_segment_fits(requests: list[list[int]], budget: int) -> None:
    queue = FairQueue(budget)
    waiting = {(caller := Caller()): bring(queue, caller, sizes) for sizes in requests}
    while queue:
        used = 0
        for each in queue.take():
            assert waiting[each.caller].pop(0) is each
            used += each.num_patches
        assert all(used + left[0].num_patches > budget for left in waiting.values() if left)


@given(
    st.lists(st.integers(1, LARGEST), min_size=100, max_size=100),
    st.integers(0, 20),
    st.integers(1, LARGEST),
    budgets,
)
def test_a_film_delays_another_callers_picture_by_one_batch_at_most(
    film: list[int], batches_before: int, picture: int, budget: int
) -> None:
    queue = FairQueue(budget)
    bring(queue, Caller(), film)
    for _ in range(batches_before):
        queue.take()
    (own,) = bring(queue, Caller(), [picture])
    first = queue.take()
    if own in first:
        return
    # Its turn comes before the film has had as much again, beside the chunk that was next anyhow.
    assert count_patches(first) + picture > budget
    second = queue.take()
    assert own in second


@given(st.lists(st.lists(st.integers(1, LARGEST), min_size=60, max_size=60), min_size=2, max_size=4), budgets)
def test_requests_that_wait_together_are_given_the_same(requests: list[list[int]], budget: int) -> None:
    """Within a segment of each, and one that did not fit and let others pass."""
    queue = FairQueue(budget)
    callers = [Caller() for _ in requests]
    for caller, sizes in zip(callers, requests, strict=True):
        bring(queue, caller, sizes)
    given_to = dict.fromkeys(callers, 0)
    while all(queue.patches_of(caller) for caller in callers):
        for each in queue.take():
            given_to[each.caller] += each.num_patches
        if all(queue.patches_of(caller) for caller in callers):
            assert max(given_to.values()) - min(given_to.values()) <= 3 * LARGEST


@given(
    st.lists(st.integers(1, LARGEST), min_size=160, max_size=160),
    st.lists(st.integers(1, LARGEST), min_size=60, max_size=60),
    st.integers(1, 20),
    budgets,
)
def test_a_newcomer_is_owed_nothing_for_what_others_had_before(
    early: list[int], late: list[int], batches_before: int, budget: int
) -> None:
    queue = FairQueue(budget)
    callers = [Caller(), Caller()]
    bring(queue, callers[0], early)
    for _ in range(batches_before):
        queue.take()
    bring(queue, callers[1], late)
    given_to = dict.fromkeys(callers, 0)
    while all(queue.patches_of(caller) for caller in callers):
        for each in queue.take():
            given_to[each.caller] += each.num_patches
        if all(queue.patches_of(caller) for caller in callers):
            assert abs(given_to[callers[0]] - given_to[callers[1]]) <= 3 * LARGEST


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=8), st.integers(1, LARGEST), budgets)
def test_no_stream_of_newcomers_keeps_a_request_waiting(waiting: list[int], size: int, budget: int) -> None:
    """Pictures of ever new callers fill every batch by themselves."""
    queue = FairQueue(budget)
    own = Caller()
    bring(queue, own, waiting)
    batches = 0
    while queue.patches_of(own):
        for _ in range(budget // size):
            bring(queue, Caller(), [size])
        queue.take()
        batches += 1
        assert batches <= (MAX_PASSED_OVER + 2) * len(waiting)


@given(st.lists(st.integers(1, LARGEST), min_size=1, max_size=10), sizes, budgets)
def test_the_batch_class_has_its_share_however_much_interactive_work_there_is(
    batch_class: list[int], interactive: list[int], budget: int
) -> None:
    queue = FairQueue(budget)
    bring(queue, Caller("batch"), batch_class)
    wanted, done, batches = sum(batch_class), 0, 0
    while done < wanted:
        while queue._turns["interactive"].patches <= 2 * budget:
            bring(queue, Caller(), interactive)
        done += count_patches(each for each in queue.take() if each.caller.priority == "batch")
        batches += 1
        # An eighth of each batch is saved; nothing is taken before it is saved; one more where it found no room.
        assert done <= batches * -(-budget // BATCH_CLASS_PARTS)
        assert batches <= BATCH_CLASS_PARTS * wanted / budget + 1 + 2 * len(batch_class)


@given(st.lists(st.integers(1, LARGEST), min_size=30, max_size=30), st.integers(1, LARGEST), budgets)
@example([1] * 30, LARGEST, LARGEST)  # a picture that fits an empty batch only
def test_the_batch_class_delays_interactive_work_by_one_batch_at_most(
    batch_class: list[int], picture: int, budget: int
) -> None:
    queue = FairQueue(budget)
    bring(queue, Caller("batch"), batch_class)
    while queue._turns["batch"]:
        (own,) = bring(queue, Caller(), [picture])
        assert own in queue.take() or own in queue.take()


@given(sizes, sizes, budgets)
def test_what_is_put_back_runs_first_and_by_itself(first: list[int], second: list[int], budget: int) -> None:
    queue = FairQueue(budget)
    bring(queue, Caller(), first)
    failed = queue.take()
    bring(queue, Caller(), second)
    before = queue.patches
    queue.put_back(failed)
    assert queue.patches == before + count_patches(failed)
    failed[0].result.cancel()
    assert queue.has_again
    assert queue.take_again() == failed[1:]
    assert not queue.has_again


@given(st.integers(1, 5), budgets)
def test_small_segments_of_the_batch_class_do_not_spend_what_is_saved_for_a_large_one(small: int, budget: int) -> None:
    queue = FairQueue(budget)
    (large,) = bring(queue, Caller("batch"), [LARGEST])
    batches: list[list[Ticket]] = []
    while large not in (batches[-1] if batches else []):
        bring(queue, Caller(), [LARGEST] * 3)
        for _ in range(budget // BATCH_CLASS_PARTS // small + 1):
            bring(queue, Caller("batch"), [small])
        batches.append(queue.take())
        assert len(batches) <= MAX_PASSED_OVER + BATCH_CLASS_PARTS + 2
