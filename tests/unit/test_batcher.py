"""Batches of one tower that runs what it is given at once: what is in them, what fails, what is dropped or refused."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from torch import Tensor

from app.batcher import Batcher
from app.errors import Draining, Overloaded
from app.ticket import Caller
from app.tower import InlineTower
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

    def build(
        run: Callable[[PackedBatch], Tensor], *, batch: int = 100, queue: int = 10_000, queue_bytes: int = 1 << 30
    ) -> Batcher:
        bounds = {"max_batch_patches": batch, "max_queued_patches": queue, "max_queued_bytes": queue_bytes}
        made.append(Batcher([InlineTower(run)], CONFIG, **bounds))
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
    for _ in range(10):
        gate.go.release()
    await asyncio.gather(first, *others)
    assert [len(grids) for grids in gate.batches] == [1, 5]


async def test_a_segment_larger_than_a_batch_runs_alone(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    sizes = [(2, 4), (12, 12), (2, 4)]
    others = [asyncio.create_task(batcher.encode([segment(h, w, value=i)])) for i, (h, w) in enumerate(sizes)]
    await until_queued(batcher, 8 + 144 + 8)
    for _ in range(10):
        gate.go.release()
    done = await asyncio.gather(first, *others)
    assert [encoded.rows[0][0].tolist() for encoded in done[1:]] == [[0, 8], [1, 144], [2, 8]]
    patches = [[grid.num_patches for grid in grids] for grids in gate.batches]
    assert patches == [[4], [8, 8], [144]]


async def test_bytes_of_pixels_that_wait_are_bounded(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    patch_bytes = 3 * 14 * 14
    batcher = make(gate, queue_bytes=40 * patch_bytes)
    running = [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await entered(gate)
    running += [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(2)]
    await until_queued(batcher, 32)
    assert batcher.queued_bytes == 32 * patch_bytes
    text = f"{32 * patch_bytes} bytes of pixels are waiting and the item has {16 * patch_bytes}, limit"
    with pytest.raises(Overloaded, match=text) as refusal:
        await batcher.encode([segment(4, 4)])
    assert refusal.value.retry_after_s is not None
    running.append(asyncio.create_task(batcher.encode([segment(2, 4)])))  # what has room is still taken
    await until_queued(batcher, 40)
    running.pop().cancel()
    await until_queued(batcher, 32)
    assert batcher.queued_bytes == 32 * patch_bytes
    for _ in running:
        gate.go.release()
    assert len(await asyncio.gather(*running)) == 3
    assert batcher.queued_bytes == 0


async def test_the_batch_class_has_three_quarters_of_the_bytes(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, queue_bytes=32 * 3 * 14 * 14)
    running = [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await entered(gate)
    running += [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await until_queued(batcher, 16)
    with pytest.raises(Overloaded, match="bytes of pixels"):
        await batcher.encode([segment(4, 4)], Caller("batch"))
    running += [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await until_queued(batcher, 32)
    for _ in running:
        gate.go.release()
    await asyncio.gather(*running)


async def test_an_item_of_more_bytes_than_the_bound_is_taken_when_it_is_alone(make: Callable[..., Batcher]) -> None:
    encoded = await make(marked, queue_bytes=1).encode([segment(4, 4) for _ in range(4)])
    assert len(encoded.rows) == 4


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


async def test_a_film_delays_another_callers_picture_by_the_running_batch_only(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=64)
    film = asyncio.create_task(batcher.encode([segment(4, 4, value=i) for i in range(40)], Caller()))
    await entered(gate)
    picture = asyncio.create_task(batcher.encode([segment(2, 4, value=99)], Caller()))
    await until_queued(batcher, 40 * 16 - 64 + 8)
    for _ in range(20):
        gate.go.release()
    encoded = await film
    assert Grid(1, 2, 4) in gate.batches[1]
    assert [row[0, 0].item() for row in encoded.rows] == list(range(40))
    assert (await picture).rows[0][0, 0].item() == 99


async def test_interactive_work_goes_before_the_batch_class(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=64)
    nightly = Caller("batch")
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    later = asyncio.create_task(batcher.encode([segment(4, 8)] * 2, nightly))  # 32 patches each
    await until_queued(batcher, 64)
    sooner = [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(4)]
    await until_queued(batcher, 128)
    for _ in range(5):
        gate.go.release()
    await asyncio.gather(first, later, *sooner)
    assert gate.batches[1:] == [[Grid(1, 4, 4)] * 4, [Grid(1, 4, 8)] * 2]


async def test_the_batch_class_leaves_room_in_the_queue_for_interactive_work(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=16, queue=64)
    running = [asyncio.create_task(batcher.encode([segment(4, 4)]))]
    await entered(gate)
    running += [asyncio.create_task(batcher.encode([segment(4, 4)], Caller("batch"))) for _ in range(3)]
    await until_queued(batcher, 48)
    with pytest.raises(Overloaded, match="48 patches are waiting and the item has 4, limit 48"):
        await batcher.encode([segment(2, 2)], Caller("batch"))
    running.append(asyncio.create_task(batcher.encode([segment(4, 4)])))
    await until_queued(batcher, 64)
    for _ in running:
        gate.go.release()
    assert len(await asyncio.gather(*running)) == 5


async def test_one_callers_backlog_fills_half_the_queue_at_most(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=16, queue=64)
    film = Caller()
    running = [asyncio.create_task(batcher.encode([segment(4, 4) for _ in range(11)], film))]
    await entered(gate)
    await until_queued(batcher, 160)  # two and a half times the bound, of which 32 count
    running.append(asyncio.create_task(batcher.encode([segment(4, 4)], film)))  # one that has its half adds nothing
    await until_queued(batcher, 176)
    running += [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(2)]
    await until_queued(batcher, 208)
    with pytest.raises(Overloaded):
        await batcher.encode([segment(2, 2)])
    for _ in range(20):
        gate.go.release()
    await asyncio.gather(*running)


async def test_a_film_whose_caller_left_gives_its_memory_back_at_once(make: Callable[..., Batcher]) -> None:
    gate = Gate()
    batcher = make(gate, batch=16)
    film = asyncio.create_task(batcher.encode([segment(4, 4)] * 5))
    await entered(gate)
    film.cancel()
    await asyncio.gather(film, return_exceptions=True)
    assert not batcher._queue
    gate.go.release()


async def test_a_failed_device_fails_what_waits_and_what_comes(make: Callable[..., Batcher]) -> None:
    def broken(batch: PackedBatch) -> Tensor:
        raise DeviceFailed("gone")

    gate = Gate(broken)
    batcher = make(gate, batch=16)
    waiting = [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(3)]
    await entered(gate)
    await until_queued(batcher, 32)
    gate.go.release()
    assert [str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == ["gone"] * 3
    with pytest.raises(DeviceFailed, match="gone"):
        await batcher.encode([segment(2, 2)])
    assert len(gate.batches) == 1
