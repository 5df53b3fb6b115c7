"""Single flight: who shares a computation, who ends it, and who hears of its failure."""

import asyncio
import gc

import pytest

from app.errors import CorruptMedia, Draining
from app.store import StoredEmbedding
from app.store.flights import Flights
from tests.stored import Work, build_store, entry, key, same, settle, waiters


async def test_a_hundred_callers_share_one_computation() -> None:
    store, work = build_store(), Work()
    tasks = waiters(store, work, 100)
    await work.started.wait()
    work.go.set()
    results = await asyncio.gather(*tasks)
    assert work.calls == 1
    assert {outcome for _, outcome in results} == {"miss"}
    assert len({id(found) for found, _ in results}) == 1
    assert (store.stats.misses, store.stats.joined, store.stats.hits) == (100, 99, 0)
    again, outcome = await store.fetch_or_compute(key(1), work)
    assert (outcome, work.calls) == ("hit", 1)
    assert again is results[0][0]


async def test_different_keys_are_computed_beside_each_other() -> None:
    store, one, two = build_store(), Work(1), Work(2)
    tasks = [
        asyncio.create_task(store.fetch_or_compute(key(1), one)),
        asyncio.create_task(store.fetch_or_compute(key(2), two)),
    ]
    await asyncio.gather(one.started.wait(), two.started.wait())
    one.go.set(), two.go.set()
    assert [found.key for found, _ in await asyncio.gather(*tasks)] == [key(1), key(2)]


@pytest.mark.parametrize("leaver", [0, 1, 4])
async def test_one_who_leaves_takes_nobody_along(leaver: int) -> None:
    store, work = build_store(), Work()
    tasks = waiters(store, work, 5)
    await work.started.wait()
    await settle()
    tasks[leaver].cancel()
    await settle()
    assert tasks[leaver].cancelled()
    work.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, tuple) for result in results] == [i != leaver for i in range(5)]
    assert (work.calls, work.cancelled) == (1, 0)


async def test_the_last_to_leave_ends_the_computation_and_the_next_starts_anew() -> None:
    store, work = build_store(), Work()
    tasks = waiters(store, work, 3)
    await work.started.wait()
    await settle()
    for task in tasks[:2]:
        task.cancel()
    await settle()
    assert work.cancelled == 0
    tasks[2].cancel()
    newcomer = asyncio.create_task(store.fetch_or_compute(key(1), work))
    await settle()
    assert (work.calls, work.cancelled) == (2, 1)
    work.go.set()
    assert same((await newcomer)[0], entry(1))


async def test_every_waiter_has_a_deadline_of_its_own() -> None:
    store, work = build_store(), Work()

    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await store.fetch_or_compute(key(1), work)

    hasty = asyncio.create_task(impatient())
    patient = asyncio.create_task(store.fetch_or_compute(key(1), work))
    with pytest.raises(TimeoutError):
        await hasty
    work.go.set()
    assert (await patient)[1] == "miss"
    assert work.calls == 1


async def test_an_error_reaches_all_who_wait_and_is_not_remembered() -> None:
    store, work = build_store(), Work(error=CorruptMedia("broken"))
    tasks = waiters(store, work, 10)
    await work.started.wait()
    work.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in results] == ["broken"] * 10
    assert work.calls == 1
    assert store.get(key(1)) is None
    healthy = Work()
    healthy.go.set()
    assert (await store.fetch_or_compute(key(1), healthy))[1] == "miss"


async def test_an_error_after_everybody_left_is_not_reported_as_lost(caplog: pytest.LogCaptureFixture) -> None:
    flights: Flights[int] = Flights()
    started = asyncio.Event()

    async def stubborn() -> int:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("while cleaning up") from None
        return 1

    task = asyncio.create_task(flights.join("a", stubborn))
    await started.wait()
    task.cancel()
    await settle()
    gc.collect()
    assert caplog.records == []
    assert "a" not in flights


async def test_a_computation_cancelled_from_within_is_an_error_not_a_cancellation() -> None:
    async def cancels_itself() -> StoredEmbedding:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await build_store().fetch_or_compute(key(1), cancels_itself)


async def test_close_tells_who_waits() -> None:
    store, work = build_store(), Work()
    tasks = waiters(store, work, 2)
    await work.started.wait()
    await store.close()
    assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [Draining] * 2
    assert work.cancelled == 1
    with pytest.raises(Draining):
        await store.fetch_or_compute(key(1), work)


async def test_a_store_of_no_bytes_still_shares_computations() -> None:
    store, work = build_store(0), Work()
    work.go.set()
    results = await asyncio.gather(*waiters(store, work, 10))
    assert work.calls == 1
    assert all(same(found, entry(1)) for found, _ in results)
    assert store.get(key(1)) is None
    assert store.stats.not_kept == 1
    assert (await store.fetch_or_compute(key(1), work))[1] == "miss"
    assert work.calls == 2


async def test_a_computation_of_another_key_is_a_bug_and_is_not_kept() -> None:
    store, work = build_store(), Work(2)
    work.go.set()
    with pytest.raises(RuntimeError, match="another key"):
        await store.fetch_or_compute(key(1), work)
    assert store.stats.entries == 0


async def test_what_was_stored_meanwhile_wins_over_what_was_computed() -> None:
    store, work = build_store(), Work()
    (task,) = waiters(store, work, 1)
    await work.started.wait()
    first = store.put(entry(1))
    work.go.set()
    assert (await task)[0] is first
