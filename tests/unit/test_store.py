"""The store as a whole: soundness, leases, counters, and tiers below that answer, lie or lag."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
import torch

from app.errors import LimitExceeded, Overloaded
from app.store import EmbeddingStore, StoredEmbedding, TierStats
from tests.stored import DTYPE, WIDTH, Clock, Work, build_store, entry, key, same, settle, waiters

SIZE = entry(0).num_bytes


class FakeTier:
    """A tier below, in a dictionary."""

    def __init__(self) -> None:
        self.stats = TierStats()
        self.entries: dict[str, StoredEmbedding] = {}
        self.loads = 0
        self.open = False
        self.go = asyncio.Event()
        self.go.set()

    async def start(self) -> None:
        self.open = True

    async def load(self, wanted: str) -> StoredEmbedding | None:
        self.loads += 1
        await self.go.wait()
        return self.entries.get(wanted)

    def save(self, new: StoredEmbedding) -> None:
        self.entries.setdefault(new.key, new)

    async def remove(self, unwanted: str) -> None:
        self.entries.pop(unwanted, None)

    async def close(self) -> None:
        self.open = False


# ---- soundness


@pytest.mark.parametrize(
    "spoil",
    [
        lambda tensor: tensor.resize_(3, WIDTH),
        lambda tensor: tensor.resize_(4, WIDTH - 1),
        lambda tensor: tensor.set_(torch.zeros(4, WIDTH, dtype=DTYPE).T),
    ],
)
async def test_an_entry_that_went_bad_is_a_miss_and_is_computed_again(spoil: Callable[[torch.Tensor], None]) -> None:
    store, work = build_store(), Work()
    work.go.set()
    spoil(store.put(entry(1)).tensor)
    found, outcome = await store.fetch_or_compute(key(1), work)
    assert outcome == "miss"
    assert same(found, entry(1))
    assert (store.stats.damaged, store.stats.entries, store.stats.bytes) == (1, 1, SIZE)


@pytest.mark.parametrize("bad", [entry(1, dtype=torch.float16), entry(1, dtype=torch.float32)])
async def test_what_the_tower_cannot_have_made_is_never_kept(bad: StoredEmbedding) -> None:
    tier = FakeTier()
    store = build_store(disk=tier)
    assert store.put(bad) is bad
    assert store.get(key(1)) is None
    assert (store.stats.damaged, store.stats.entries, tier.entries) == (1, 0, {})


# ---- leases


async def test_a_lease_has_both_clocks() -> None:
    clock, wall = Clock(), Clock(1_790_000_000)
    store = build_store(clock=clock, wall_clock=wall)
    lease = store.hold(store.put(entry(1)), 300)
    assert (lease.ends_s, lease.expires_at) == (1300, 1_790_000_300)
    wall.now -= 86_400  # somebody set the clock back: a label changes, the lease does not
    clock.now += 100
    extended = await store.lease(key(1), 300)
    assert extended is not None
    assert (extended.ends_s, extended.expires_at) == (1400, 1_790_000_300 - 86_400)
    assert store.stats.leased_bytes == SIZE
    clock.now = 1400
    assert store.stats.leased_bytes == 0


async def test_leases_that_fill_the_store_refuse_more_and_say_until_when() -> None:
    clock = Clock()
    store = build_store(2 * SIZE, clock=clock)
    store.check_room(SIZE)
    store.hold(entry(1), 30)
    store.hold(entry(2), 20)
    fresh = store.put(entry(3))
    assert same(fresh, entry(3))  # no error: only not kept
    for refused in (lambda: store.hold(fresh, 10), lambda: store.check_room(SIZE)):
        with pytest.raises(Overloaded) as error:
            refused()
        assert error.value.retry_after_s == 20
    with pytest.raises(LimitExceeded):
        store.check_room(2 * SIZE + 1)
    assert (store.stats.lease_refusals, store.stats.not_kept) == (2, 1)
    assert await store.lease(key(3), 10) is None


async def test_drop_forgets_the_key_everywhere() -> None:
    disk, shared = FakeTier(), FakeTier()
    store = build_store(disk=disk, shared=shared)
    store.hold(store.put(entry(1)), 300)
    assert await store.drop(key(1))
    assert not await store.drop(key(1))
    assert (disk.entries, shared.entries, store.stats.bytes) == ({}, {}, 0)


# ---- lent entries


def lent(number: int, *, spoilt: bool = False) -> StoredEmbedding:
    one = entry(number)
    return replace(one, tensor=one.tensor[:3] if spoilt else one.tensor, is_lent=True)


class HeldCopies:
    """Makes `StoredEmbedding.copied` wait until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.calls = 0
        copied = StoredEmbedding.copied

        def held(each: StoredEmbedding) -> StoredEmbedding:
            self.calls += 1
            assert self.go.wait(30)
            if error is not None:
                raise error
            return copied(each)

        monkeypatch.setattr(StoredEmbedding, "copied", held)


async def until_no_copies(store: EmbeddingStore) -> None:
    await asyncio.gather(*store._copies)


async def test_a_lent_entry_is_answered_at_once_and_a_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held, disk, work = HeldCopies(monkeypatch), FakeTier(), Work()
    store, one = build_store(disk=disk), lent(1)
    made, outcome = await store.fetch_or_compute(key(1), _made(one))
    assert (made is one, outcome) == (True, "miss")
    work.go.set()
    again, outcome = await store.fetch_or_compute(key(1), work)  # comes while the copy is being made
    assert (again is one, outcome, work.calls) == (True, "hit", 0)
    assert store.put(entry(1)) is one
    assert (store.stats.bytes, disk.entries) == (0, {})  # nothing of it is kept yet
    held.go.set()
    await until_no_copies(store)
    kept = store.get(key(1))
    assert kept is not None
    assert same(kept, entry(1))
    assert kept.tensor.data_ptr() != one.tensor.data_ptr()
    assert disk.entries[key(1)] is kept
    assert (store.stats.bytes, store.stats.entries, held.calls) == (SIZE, 1, 1)


async def test_a_key_dropped_while_its_copy_is_made_stays_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    held, store = HeldCopies(monkeypatch), build_store()
    store.put(lent(1))
    assert await store.drop(key(1))
    assert store.get(key(1)) is None
    held.go.set()
    await until_no_copies(store)
    assert store.get(key(1)) is None


async def test_a_copy_that_fails_is_only_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held, store = HeldCopies(monkeypatch, RuntimeError("can't allocate memory")), build_store()
    store.put(lent(1))
    held.go.set()
    await until_no_copies(store)
    assert store.get(key(1)) is None
    assert (store.stats.not_kept, store.stats.bytes) == (1, 0)


async def test_nothing_is_copied_for_a_store_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held, store = HeldCopies(monkeypatch), build_store(0)
    one = lent(1)
    assert store.put(one) is one
    assert store.get(key(1)) is None
    assert (held.calls, store.stats.not_kept) == (0, 1)


async def test_a_lease_holds_a_copy_of_what_is_lent() -> None:
    store, one = build_store(), lent(1)
    store.hold(store.put(one), 300)
    await until_no_copies(store)
    kept = store.get(key(1))
    assert kept is not None
    assert not kept.is_lent
    assert kept.tensor.data_ptr() != one.tensor.data_ptr()
    assert (store.stats.bytes, store.stats.leased_bytes) == (SIZE, SIZE)


async def test_a_lent_entry_that_is_not_sound_is_not_kept() -> None:
    store = build_store()
    store.put(lent(1, spoilt=True))
    assert store.get(key(1)) is None
    assert store.stats.damaged == 1


async def test_closing_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    held, disk = HeldCopies(monkeypatch), FakeTier()
    store = build_store(disk=disk)
    await store.start()
    store.put(lent(1))
    closing = asyncio.create_task(store.close())
    await settle()
    assert disk.open
    held.go.set()
    await closing
    assert key(1) in disk.entries


def _made(one: StoredEmbedding) -> Callable[[], Awaitable[StoredEmbedding]]:
    async def compute() -> StoredEmbedding:
        return one

    return compute


# ---- tiers below


async def test_a_lower_tier_answers_once_for_all_and_fills_those_above() -> None:
    disk, shared, work = FakeTier(), FakeTier(), Work()
    store = build_store(disk=disk, shared=shared)
    await store.start()
    assert disk.open
    assert shared.open
    shared.entries[key(1)] = entry(1)
    shared.go.clear()
    tasks = [*waiters(store, work, 5), *(asyncio.create_task(store.find(key(1))) for _ in range(5))]
    await settle()
    shared.go.set()
    results = await asyncio.gather(*tasks)
    assert [result[1] for result in results if isinstance(result, tuple)] == ["hit"] * 5
    assert all(same(result, entry(1)) for result in results if isinstance(result, StoredEmbedding))
    assert (disk.loads, shared.loads, work.calls) == (1, 1, 0)
    assert key(1) in disk.entries
    assert (store.stats.hits, store.stats.misses) == (10, 0)
    assert store.get(key(1)) is not None
    await store.close()
    assert not disk.open


async def test_what_is_computed_goes_to_every_tier() -> None:
    disk, shared, work = FakeTier(), FakeTier(), Work()
    work.go.set()
    store = build_store(disk=disk, shared=shared)
    await store.fetch_or_compute(key(1), work)
    assert set(disk.entries) == set(shared.entries) == {key(1)}
    assert store.stats.disk is disk.stats
    assert store.stats.shared is shared.stats


async def test_a_tier_that_holds_another_models_embedding_is_a_miss() -> None:
    disk, shared = FakeTier(), FakeTier()
    disk.entries[key(1)] = entry(1, dtype=torch.float16)
    shared.entries[key(1)] = entry(1)
    store = build_store(disk=disk, shared=shared)
    assert same(await store.find(key(1)), entry(1))
    assert store.stats.damaged == 1
    assert disk.entries[key(1)].tensor.dtype == DTYPE  # replaced by the sound one


async def test_find_does_not_wait_for_a_computation() -> None:
    store, work = build_store(), Work()
    (task,) = waiters(store, work, 1)
    await work.started.wait()
    assert await store.find(key(1)) is None
    work.go.set()
    await task
