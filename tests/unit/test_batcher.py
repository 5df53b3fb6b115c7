"""The queue, its two threads, and what happens when a batch fails or nobody waits for it any more."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from torch import Tensor

from app.batcher import Batcher, DrainRate
from app.errors import Draining, LimitExceeded, Overloaded
from encoder import (
    DeviceFailed,
    EncoderConfig,
    NonFiniteResult,
    PackedBatch,
    Segment,
    load_config,
    num_tokens,
)
from encoder.grid import Grid

CONFIG: EncoderConfig = load_config("demo:k3-tiny")


def segment(h: int, w: int, value: int = 0, t: int = 1) -> Segment:
    return Segment(torch.full((t * h * w, 3, 14, 14), value, dtype=torch.uint8), (t, h, w))


def marked(batch: PackedBatch) -> Tensor:
    """(M, 2): every row says which segment it belongs to, by that segment's first pixel and its size."""
    rows = []
    start = 0
    for grid, tokens in zip(batch.grids, batch.num_tokens, strict=True):
        value = float(batch.pixel_values[start, 0, 0, 0])
        rows.append(torch.tensor([[value, float(grid.num_patches)]]).repeat(tokens, 1))
        start += grid.num_patches
    return torch.cat(rows)


class Gate:
    """A tower that records its batches and runs each only when told to."""

    def __init__(self, run: Callable[[PackedBatch], Tensor] = marked) -> None:
        self.batches: list[list[Grid]] = []
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self._run = run

    def __call__(self, batch: PackedBatch) -> Tensor:
        self.batches.append(batch.grids)
        self.entered.release()
        assert self.go.acquire(timeout=30)
        return self._run(batch)


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.acquire, timeout=30)


async def until_queued(batcher: Batcher, patches: int) -> None:
    async with asyncio.timeout(30):
        while batcher.queued_patches != patches:  # noqa: ASYNC110 - the batcher's threads have no event to await
            await asyncio.sleep(0.001)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Batcher]]:
    made: list[Batcher] = []

    def build(run: Callable[[PackedBatch], Tensor], *, batch: int = 100, queue: int = 10_000) -> Batcher:
        made.append(Batcher(run, CONFIG, max_batch_patches=batch, max_queued_patches=queue))
        return made[-1]

    yield build
    for batcher in made:
        await asyncio.to_thread(batcher.close)


async def test_rows_come_back_to_their_own_segments_in_order(make: Callable[..., Batcher]) -> None:
    batcher = make(marked, batch=60)
    items = [[segment(2, 2 + 2 * (i % 4), value=i), segment(4, 4, value=100 + i)] for i in range(20)]
    done = await asyncio.gather(*(batcher.encode(item) for item in items))
    for i, (item, encoded) in enumerate(zip(items, done, strict=True)):
        assert [row[0, 0].item() for row in encoded.rows] == [i, 100 + i]
        assert [len(row) for row in encoded.rows] == [num_tokens(s.grid_thw, CONFIG) for s in item]


async def test_an_item_without_segments_needs_no_batch(make: Callable[..., Batcher]) -> None:
    assert (await make(marked).encode([])).rows == []


async def test_an_item_larger_than_a_batch_is_split_over_batches(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=40)
    for _ in range(10):
        gate.go.release()
    encoded = await batcher.encode([segment(4, 4, value=i) for i in range(6)])
    assert [row[0, 0].item() for row in encoded.rows] == list(range(6))
    assert all(sum(grid.num_patches for grid in grids) <= 40 for grids in gate.batches)


async def test_what_arrives_while_the_device_is_busy_joins_one_batch(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    others = [asyncio.create_task(batcher.encode([segment(2, 4, value=i)])) for i in range(5)]
    await until_queued(batcher, 5 * 8)
    await asyncio.sleep(0.05)  # the prepared batch grows in its own thread
    for _ in range(10):
        gate.go.release()
    await asyncio.gather(first, *others)
    assert [len(grids) for grids in gate.batches] == [1, 5]


async def test_a_segment_larger_than_a_batch_is_refused(make: Callable[..., Batcher]) -> None:
    with pytest.raises(LimitExceeded, match="segment of 144 patches, limit 100"):
        await make(marked).encode([segment(12, 12)])


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=16, queue=32)
    running = [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await entered(gate)
    running += [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(2)]
    await until_queued(batcher, 32)
    with pytest.raises(Overloaded, match="32 patches are waiting and the item has 4, limit 32") as refusal:
        await batcher.encode([segment(2, 2)])
    assert refusal.value.retry_after_s is not None
    assert refusal.value.retry_after_s > 0
    for _ in running:
        gate.go.release()
    assert len(await asyncio.gather(*running)) == 3


async def test_an_item_larger_than_the_queue_is_taken_when_it_is_alone(make: Callable[..., Batcher]) -> None:
    encoded = await make(marked, batch=16, queue=16).encode([segment(4, 4) for _ in range(4)])
    assert len(encoded.rows) == 4


async def test_one_guilty_segment_fails_alone(make: Callable[..., Batcher]) -> None:
    def poisoned(batch: PackedBatch) -> Tensor:
        if bool((batch.pixel_values == 66).any()):
            raise NonFiniteResult("not finite")
        return marked(batch)

    gate = Gate(poisoned)
    batcher = make(gate)
    for _ in range(50):
        gate.go.release()
    blocker = asyncio.create_task(batcher.encode([segment(2, 2)]))
    values = [1, 2, 66, 3, 4, 5, 6]
    done = await asyncio.gather(
        blocker, *(batcher.encode([segment(2, 2, value=v)]) for v in values), return_exceptions=True
    )
    for value, outcome in zip(values, done[1:], strict=True):
        if value == 66:
            assert isinstance(outcome, NonFiniteResult)
        else:
            assert not isinstance(outcome, BaseException)
            assert outcome.rows[0][0, 0].item() == value


async def test_the_good_segments_of_a_failed_item_do_not_disturb_others(make: Callable[..., Batcher]) -> None:
    def poisoned(batch: PackedBatch) -> Tensor:
        if bool((batch.pixel_values == 66).any()):
            raise ValueError("kernel bug")
        return marked(batch)

    batcher = make(poisoned)
    bad, good = await asyncio.gather(
        batcher.encode([segment(2, 2, value=1), segment(2, 2, value=66)]),
        batcher.encode([segment(2, 2, value=2)]),
        return_exceptions=True,
    )
    assert isinstance(bad, ValueError)
    assert not isinstance(good, BaseException)
    assert good.rows[0][0, 0].item() == 2


async def test_a_failed_device_fails_the_batch_and_is_remembered(make: Callable[..., Batcher]) -> None:
    calls = 0

    def broken(batch: PackedBatch) -> Tensor:
        nonlocal calls
        calls += 1
        raise DeviceFailed("gone")

    batcher = make(broken)
    with pytest.raises(DeviceFailed, match="gone"):
        await batcher.encode([segment(2, 2), segment(2, 2)])
    assert isinstance(batcher.failure, DeviceFailed)
    assert calls == 1  # halving a batch does not mend a device


async def test_work_whose_caller_left_is_not_computed(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    leaving = [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(3)]
    staying = asyncio.create_task(batcher.encode([segment(2, 4)]))
    await until_queued(batcher, 3 * 16 + 8)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert batcher.queued_patches == 8
    for _ in range(5):
        gate.go.release()
    await asyncio.gather(first, staying)
    assert [grid for grids in gate.batches for grid in grids] == [Grid(1, 2, 2), Grid(1, 2, 4)]
    assert batcher.queued_patches == 0


async def test_closing_finishes_the_running_batch_and_refuses_the_rest(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate)
    running = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    waiting = asyncio.create_task(batcher.encode([segment(4, 4)]))
    await until_queued(batcher, 16)
    closing = asyncio.create_task(asyncio.to_thread(batcher.close))
    with pytest.raises(Draining):
        await waiting
    gate.go.release()
    assert len((await running).rows) == 1
    await closing
    with pytest.raises(Draining):
        await batcher.encode([segment(2, 2)])


def test_the_drain_rate_is_an_average_that_follows() -> None:
    rate = DrainRate()
    assert rate.seconds(1000) == 1.0
    rate.add(1000, 0.5)
    assert rate.seconds(1000) == pytest.approx(0.5)
    for _ in range(50):
        rate.add(4000, 1.0)
    assert rate.seconds(4000) == pytest.approx(1.0, rel=0.01)
