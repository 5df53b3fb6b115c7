"""Entries, their size, and the tier in memory: what stays, what goes, what is refused."""

import gc
import math
import mmap

import pytest
import torch

from app.decode import Prepared
from app.errors import LimitExceeded, Overloaded
from app.payload import raw
from app.store import Loans, StoredEmbedding
from app.store.memory import MemoryTier
from encoder import Segment
from tests.stored import DTYPE, WIDTH, Clock, entry, film, key

SIZE = entry(0).num_bytes  # 4 rows of 8 bfloat16, one segment: 64 + 2048 + 256


def prepared(*grids: tuple[int, int, int]) -> Prepared:
    segments = [Segment(torch.zeros((t * h * w, 3, 14, 14), dtype=torch.uint8), (t, h, w)) for t, h, w in grids]
    return Prepared("video", segments, (64, 48), (56, 28), [0, 9], [0.0, 1.5], ["a", "b"], 0.1, 0.2)


def test_the_size_counts_the_tensor_and_the_objects_around_it() -> None:
    assert SIZE == 64 + 2048 + 256
    assert film(1).num_bytes == 5 * 8 * 2 + 2048 + 2 * 256 + 7 * 40
    assert entry(1, dtype=torch.float32).num_bytes == SIZE + 64


def test_an_entry_of_rows_keeps_nothing_of_their_batch() -> None:
    batch = torch.randn(1000, WIDTH)
    one = StoredEmbedding.of(key(1), prepared((1, 2, 4)), [batch[10:12]])
    two = StoredEmbedding.of(key(2), prepared((1, 2, 4), (1, 2, 2)), [batch[10:12], batch[500:501]])
    assert torch.equal(one.tensor, batch[10:12])
    assert torch.equal(two.tensor, batch[[10, 11, 500]])
    assert one.tensor.untyped_storage().nbytes() == 2 * WIDTH * 4
    assert two.segment_tokens == (2, 1)
    assert two.grids == ((1, 2, 4), (1, 2, 2))
    assert (two.kind, two.frame_indices, two.start_s, two.timestamps) == ("video", (0, 9), (0.0, 1.5), ("a", "b"))
    view = StoredEmbedding(**{**vars(one), "tensor": batch[10:12]})
    assert view.num_bytes > batch.nbytes  # the truth about what a view keeps in use


def test_an_entry_is_a_copy_also_of_rows_that_fill_their_memory() -> None:
    shared = mmap.mmap(-1, 2 * WIDTH * 4)  # as memory that a worker process writes to: exactly the rows
    rows = torch.frombuffer(memoryview(shared), dtype=torch.float32).view(2, WIDTH)
    assert rows.untyped_storage().nbytes() == rows.nbytes
    one = StoredEmbedding.of(key(1), prepared((1, 2, 4)), [rows])
    lent = StoredEmbedding.lent(key(1), prepared((1, 2, 4)), [rows], rows)
    copied = lent.copied()
    rows.fill_(7)
    assert lent.is_lent
    assert lent.tensor[0, 0] == 7
    for each in (one, copied):
        assert not each.is_lent
        assert not each.tensor.any()
        assert each.num_bytes == 2 * WIDTH * 4 + 2048 + 256 + 2 * 40


def test_what_is_part_of_a_batch_is_not_lent() -> None:
    loans, batch = Loans(4), torch.randn(10, WIDTH)
    assert loans.take([batch[:4]]) is None
    assert loans.take([batch[:4], batch[4:]]) is None
    assert loans.take([torch.randn(WIDTH, 10).T]) is None
    assert loans.take([torch.empty(0, WIDTH)]) is None
    lent = loans.take([batch])
    assert lent is not None
    assert lent.data_ptr() == batch.data_ptr()
    assert torch.equal(lent, batch)


def test_a_loan_lasts_as_long_as_anything_made_of_it() -> None:
    loans = Loans(1)
    lent = loans.take([torch.randn(10, WIDTH).to(torch.bfloat16)])
    assert lent is not None
    body = raw(lent)
    pieces = body.pieces()
    piece = next(pieces)
    del lent, body, pieces
    gc.collect()
    assert loans.take([torch.randn(2, WIDTH)]) is None  # an answer that is being sent holds it
    del piece
    gc.collect()
    assert loans.take([torch.randn(2, WIDTH)]) is not None


@pytest.mark.parametrize(
    ("change", "sound"),
    [
        ({}, True),
        ({"tensor": torch.zeros(3, WIDTH, dtype=DTYPE)}, False),
        ({"tensor": torch.zeros(4, WIDTH + 1, dtype=DTYPE)}, False),
        ({"tensor": torch.zeros(4 * WIDTH, dtype=DTYPE)}, False),
        ({"tensor": torch.zeros(4, WIDTH, dtype=torch.float16)}, False),
        ({"tensor": torch.zeros(WIDTH, 4, dtype=DTYPE).T}, False),
        ({"tensor": torch.zeros(4, WIDTH, dtype=DTYPE, device="meta")}, False),
        ({"segment_tokens": (3, 1)}, False),
        ({"segment_tokens": (), "grids": (), "tensor": torch.zeros(0, WIDTH, dtype=DTYPE)}, False),
    ],
)
def test_what_is_sound(change: dict[str, object], sound: bool) -> None:
    assert StoredEmbedding(**{**vars(entry(1)), **change}).is_sound(WIDTH, DTYPE) is sound


def test_least_recently_used_goes_first() -> None:
    tier = MemoryTier(3 * SIZE)
    for number in (1, 2, 3):
        assert tier.put(entry(number))
    assert tier.get(key(1)) is not None
    assert tier.put(entry(4))
    assert [number for number in (1, 2, 3, 4) if tier.get(key(number))] == [1, 3, 4]
    assert (tier.bytes, len(tier), tier.evictions) == (3 * SIZE, 3, 1)


def test_a_second_put_keeps_the_first_entry_and_counts_as_use() -> None:
    tier = MemoryTier(2 * SIZE)
    first = entry(1)
    tier.put(first)
    tier.put(entry(2))
    assert tier.put(entry(1))
    assert tier.bytes == 2 * SIZE
    tier.put(entry(3))
    assert tier.get(key(1)) is first
    assert tier.get(key(2)) is None


def test_what_is_larger_than_the_bound_is_not_kept_and_evicts_nothing() -> None:
    tier = MemoryTier(SIZE)
    tier.put(entry(1))
    assert not tier.put(entry(2, rows=5))
    assert tier.get(key(1)) is not None
    with pytest.raises(LimitExceeded, match=f"takes {SIZE + 16} bytes, the store holds {SIZE}"):
        tier.hold(entry(2, rows=5), 10)
    assert not MemoryTier(0).put(entry(1))


def test_leased_entries_stay_and_refuse_others_until_they_end() -> None:
    clock = Clock()
    tier = MemoryTier(2 * SIZE, clock)
    assert tier.hold(entry(1), 30) == 1030
    assert tier.hold(entry(2), 10) == 1010
    assert not tier.put(entry(3))
    clock.now = 1004
    with pytest.raises(Overloaded) as refused:
        tier.hold(entry(3), 5)
    assert refused.value.retry_after_s == 6
    assert (tier.bytes, tier.leased_bytes) == (2 * SIZE, 2 * SIZE)
    clock.now = 1010  # a lease is over at its end
    tier.hold(entry(3), 5)
    assert [number for number in (1, 2, 3) if tier.get(key(number))] == [1, 3]


def test_a_lease_is_extended_and_never_shortened() -> None:
    clock = Clock()
    tier = MemoryTier(SIZE, clock)
    assert tier.hold(entry(1), 10) == 1010
    assert tier.hold(entry(1), 5) == 1010
    assert tier.hold(entry(1), 20) == 1020
    clock.now = 1015
    assert not tier.put(entry(2))
    clock.now = 1020
    assert tier.put(entry(2))
    assert tier.leased_bytes == 0


def test_an_entry_counts_as_used_when_its_lease_ends() -> None:
    clock = Clock()
    tier = MemoryTier(3 * SIZE, clock)
    tier.hold(entry(1), 10)
    tier.put(entry(2))
    clock.now = 1011
    tier.put(entry(3))
    tier.put(entry(4))
    assert [number for number in (1, 2, 3, 4) if tier.get(key(number))] == [1, 3, 4]


def test_drop_ends_the_lease_too() -> None:
    clock = Clock()
    tier = MemoryTier(SIZE, clock)
    tier.hold(entry(1), 10)
    assert tier.drop(key(1))
    assert not tier.drop(key(1))
    assert (tier.bytes, tier.leased_bytes, len(tier)) == (0, 0, 0)
    tier.hold(entry(1), 20)
    clock.now = 1015  # the dropped lease would have ended
    assert not tier.put(entry(2))


def test_leases_that_are_extended_or_dropped_forever_take_no_memory() -> None:
    clock = Clock()
    tier = MemoryTier(10 * SIZE, clock)
    tier.hold(entry(9), 100)  # ends first, so that nothing behind it is looked at
    for i in range(10_000):
        clock.now += 0.001
        tier.hold(entry(i % 3), 300)
        if i % 7 == 0:
            tier.drop(key(i % 3))
        assert len(tier._ends) <= 2 * 4 + 64
    clock.now = 1100
    tier.end_leases()
    assert tier.leased_bytes == (len(tier) - 1) * SIZE
    clock.now = math.inf
    tier.end_leases()
    assert (tier._ends, tier.leased_bytes) == ([], 0)


def test_a_clock_that_goes_backwards_makes_leases_longer_and_breaks_nothing() -> None:
    clock = Clock()
    tier = MemoryTier(2 * SIZE, clock)
    tier.hold(entry(1), 10)
    clock.now = 500
    assert tier.hold(entry(1), 10) == 1010
    assert tier.hold(entry(2), 10) == 510
    with pytest.raises(Overloaded):
        tier.hold(entry(3), 1)
    clock.now = 600
    tier.hold(entry(3), 1)
    assert [number for number in (1, 2, 3) if tier.get(key(number))] == [1, 3]
    assert tier.bytes == tier.leased_bytes == 2 * SIZE
