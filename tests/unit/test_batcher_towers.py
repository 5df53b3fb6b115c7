"""Towers that come back before a batch has run: what is submitted ahead, to which of them, and what is run again."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable

import pytest
from torch import Tensor

from app.batcher import Batcher
from app.errors import Draining
from app.lane import LOOK_AGAIN_S
from app.metrics import Metrics
from app.ticket import Caller
from app.tower import InlineTower, Pending, TowerLost
from encoder import (
    DeviceFailed,
    DeviceOutOfMemory,
    EncoderConfig,
    NonFiniteResult,
    PackedBatch,
    Segment,
    pack,
)
from encoder.grid import Grid
from tests.scrape import nonzero, samples_of
from tests.unit.test_batcher import CONFIG, marked, segment, until_queued

FAST, SLOW = (1e30, 1.0), (1.0, 1e9)  # FLOPs within seconds: a running batch seems about to end, or never to


class Device:
    """Takes batches at once and ends them, oldest first, when told to and as told."""

    def __init__(self) -> None:
        self.batches: list[list[Grid]] = []
        self.submitters: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.is_up = True
        self.refusals: list[Exception] = []  # of the next submissions
        self.submitted = threading.Semaphore(0)
        self._endings: list[threading.Semaphore] = []
        self._errors: list[Exception | None] = []

    def submit(self, batch: PackedBatch) -> Pending:
        self.submitters.append(threading.current_thread().name)
        if self.refusals:
            self.submitted.release()
            raise self.refusals.pop(0)
        number = len(self.batches)
        self.batches.append(batch.grids)
        self._more(number + 1)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.submitted.release()

        def wait() -> Tensor:
            assert self._endings[number].acquire(timeout=30)
            self.in_flight -= 1
            error = self._errors[number]
            if error is not None:
                raise error
            return marked(batch)

        return wait

    def end(self, number: int, error: Exception | None = None) -> None:
        """End a batch, now or as soon as it is submitted."""
        self._more(number + 1)
        self._errors[number] = error
        self._endings[number].release()

    def end_all(self, error: Exception | None = None) -> None:
        for number in range(40):
            self.end(number, error)

    async def took(self, batches: int = 1) -> None:
        for _ in range(batches):
            assert await asyncio.to_thread(self.submitted.acquire, timeout=30)

    def _more(self, count: int) -> None:
        while len(self._endings) < count:
            self._errors.append(None)
            self._endings.append(threading.Semaphore(0))


Make = Callable[..., Batcher]


async def test_batches_are_packed_into_pinned_memory_for_the_towers_that_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[bool] = []

    def packing(segments: list[Segment], config: EncoderConfig, *, pin_memory: bool) -> PackedBatch:
        pinned.append(pin_memory)
        return pack(segments, config)

    monkeypatch.setattr("app.lane.pack", packing)
    for takes_pinned in (True, False):
        tower = InlineTower(marked)
        vars(tower)["takes_pinned"] = takes_pinned
        batcher = Batcher([tower], CONFIG, max_batch_patches=100, max_queued_patches=1000)
        await batcher.encode([segment(2, 2)])
        await asyncio.to_thread(batcher.close)
    assert pinned == [True, False]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[tuple[Batcher, tuple[Device, ...]]] = []

    def build(*devices: Device, batch: int = 100, pace: tuple[float, float] | None = SLOW) -> Batcher:
        batcher = Batcher(devices, CONFIG, max_batch_patches=batch, max_queued_patches=10_000, metrics=Metrics())
        made.append((batcher, devices))
        for lane in batcher._lanes if pace else []:
            lane._flops_rate.add(*pace)
        return batcher

    yield build
    for batcher, devices in made:
        for device in devices:
            device.end_all()
        await asyncio.to_thread(batcher.close)


def outcomes(batcher: Batcher) -> dict[str, float]:
    return nonzero(samples_of(batcher._metrics.exposition("")[0].decode()), "moonvit_batches_total")


def start(batcher: Batcher, *sizes: int, caller: Caller | None = None) -> "asyncio.Task[list[float]]":
    """Encode segments of so many patches (multiples of 4, up to 1024), and see that each got its own rows."""

    async def encode() -> list[float]:
        encoded = await batcher.encode([segment(2, size // 2) for size in sizes], caller)
        assert [rows[0, 1].item() for rows in encoded.rows] == list(sizes)
        return [rows[0, 1].item() for rows in encoded.rows]

    return asyncio.create_task(encode())


def sizes(device: Device) -> list[list[int]]:
    return [[grid.num_patches for grid in grids] for grids in device.batches]


# ---- ahead of the running batch


async def test_a_batch_is_submitted_before_the_running_one_ends_and_never_a_third(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    first = start(batcher, 4)
    await device.took()
    second = start(batcher, 8)
    await device.took()  # and the first has not ended
    third = start(batcher, 12)
    await until_queued(batcher, 12)
    device.end(0)
    await device.took()
    device.end_all()
    await asyncio.gather(first, second, third)
    assert sizes(device) == [[4], [8], [12]]
    assert device.most_in_flight == 2


async def test_until_the_running_batch_is_about_to_end_the_next_one_grows(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=SLOW)
    first = start(batcher, 4)
    await device.took()
    film = start(batcher, *[40] * 9, caller=Caller())  # more than a batch
    await until_queued(batcher, 360)
    picture = start(batcher, 8)
    await until_queued(batcher, 368)
    device.end_all()
    await asyncio.gather(first, film, picture)
    assert sizes(device)[:2] == [[4], [8, 40, 40]]


async def test_nothing_is_submitted_ahead_before_the_pace_is_known(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=None)
    first = start(batcher, 4)
    await device.took()
    others = [start(batcher, 100) for _ in range(3)]
    await until_queued(batcher, 300)
    with batcher._lock:
        assert batcher._wait_s(batcher._lanes[0]) is None
    assert sizes(device) == [[4]]
    device.end_all()
    await asyncio.gather(first, *others)


async def test_times_count_from_when_the_device_was_free(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await device.took()
    second = asyncio.create_task(batcher.encode([segment(2, 4)]))
    await device.took()
    with batcher._lock:
        running, ahead = batcher._lanes[0].flights
        assert (running.started_s > 0, ahead.started_s) == (True, 0)
        assert batcher.busy_since_s == running.started_s
    device.end(0)
    await first
    device.end_all()
    encoded = await second
    assert encoded.queue_s + encoded.encode_s > encoded.encode_s > 0
    assert ahead.started_s >= running.tickets[0].finished_s - 1


# ---- several towers


async def test_the_tower_with_the_fewest_patches_outstanding_is_next(make: Make) -> None:
    one, other = Device(), Device()
    batcher = make(one, other, pace=FAST)
    tasks = [start(batcher, 100)]
    await one.took()
    tasks.append(start(batcher, 8))
    await other.took()  # the free one
    with batcher._lock:
        tasks.append(start(batcher, 12))
        await asyncio.sleep(0)
        assert [batcher._wait_s(lane) for lane in batcher._lanes] == [LOOK_AGAIN_S, 0]
    await other.took()  # both are busy, this one with less
    tasks.append(start(batcher, 16))
    await one.took()  # the other has two
    for device in (one, other):
        device.end_all()
    await asyncio.gather(*tasks)
    assert (sizes(one), sizes(other)) == ([[100], [16]], [[8], [12]])


async def test_work_is_split_among_free_towers(make: Make) -> None:
    devices = [Device() for _ in range(3)]
    batcher = make(*devices, batch=100_000)
    task = start(batcher, *[1024] * 16)
    with batcher._lock:  # so that none looks before all of it is there
        await asyncio.sleep(0)
    for device in devices:
        device.end_all()
    await task
    assert [sizes(device) for device in devices] == [[[1024] * 6], [[1024] * 5], [[1024] * 5]]


async def test_a_tower_that_is_down_is_given_nothing(make: Make) -> None:
    down, up = Device(), Device()
    down.is_up = False
    batcher = make(down, up)
    up.end_all()
    await asyncio.gather(*(start(batcher, 4) for _ in range(5)))
    assert sizes(down) == []
    up.is_up = False
    waiting = start(batcher, 8)
    await until_queued(batcher, 8)
    down.end_all()
    down.is_up = True
    await waiting
    assert sizes(down) == [[8]]


# ---- failures


async def test_halves_of_a_batch_that_fails_late_are_submitted_by_the_thread_that_submits(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    first = start(batcher, 4)
    await device.took()
    with batcher._lock:  # so that all of it is there when the tower's thread looks
        good, bad, also_good = (start(batcher, size) for size in (8, 12, 16))
        await asyncio.sleep(0)
    await device.took()
    device.end(0)
    device.end(1, NonFiniteResult("not finite"))  # the three
    device.end(2)  # the first of them
    await device.took()
    later = start(batcher, 20)
    device.end(3, NonFiniteResult("not finite"))  # the other two
    device.end(4, NonFiniteResult("alone"))
    for number in range(5, 10):
        device.end(number)
    await first
    with pytest.raises(NonFiniteResult, match="alone"):
        await bad
    await asyncio.gather(good, also_good, later)
    assert sizes(device) == [[4], [8, 12, 16], [8], [12, 16], [12], [16], [20]]
    assert set(device.submitters) == {"launch-0"}
    assert outcomes(batcher) == {'{outcome="ok"}': 4, '{outcome="halved"}': 2, '{outcome="failed"}': 1}


async def test_nobody_is_blamed_for_a_segment_whose_caller_left(make: Make) -> None:
    device = Device()
    batcher = make(device)
    first = start(batcher, 4)
    await device.took()
    guilty, innocent = start(batcher, 8), start(batcher, 12)
    await until_queued(batcher, 20)
    device.end(0)
    await first
    await device.took()
    guilty.cancel()
    await asyncio.gather(guilty, return_exceptions=True)
    device.end(1, NonFiniteResult("not finite"))
    device.end(2)
    await innocent
    assert sizes(device) == [[4], [8, 12], [12]]


async def test_what_is_run_again_has_the_device_to_itself(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    bad = start(batcher, 8, 12)
    await device.took()
    behind = start(batcher, 16)
    await device.took()
    device.end(0, DeviceOutOfMemory("full"))
    waiting = start(batcher, 20)
    await until_queued(batcher, 20 + 20)
    device.end(1)
    await behind
    await device.took()
    assert device.in_flight == 1
    device.end(2)
    await device.took()
    assert device.in_flight == 1
    device.end_all()
    await asyncio.gather(bad, waiting)
    assert sizes(device) == [[8, 12], [16], [8], [12], [20]]


async def test_a_segment_without_memory_beside_another_batch_is_tried_alone(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    first = start(batcher, 4)
    await device.took()
    large = start(batcher, 100)
    await device.took()
    device.end(0)
    device.end(1, DeviceOutOfMemory("full"))
    device.end(2)
    await asyncio.gather(first, large)
    assert sizes(device) == [[4], [100], [100]]
    assert outcomes(batcher) == {'{outcome="ok"}': 2, '{outcome="retried"}': 1}


async def test_a_segment_without_memory_on_its_own_fails(make: Make) -> None:
    device = Device()
    batcher = make(device)
    device.end(0, DeviceOutOfMemory("full"))
    with pytest.raises(DeviceOutOfMemory):
        await start(batcher, 100)
    device.end_all()
    await start(batcher, 4)
    assert outcomes(batcher) == {'{outcome="ok"}': 1, '{outcome="failed"}': 1}


async def test_a_batch_lost_with_its_tower_is_run_once_more_before_all_else(make: Make) -> None:
    one, other = Device(), Device()
    batcher = make(one, other)
    lost = start(batcher, 8, 12)
    await one.took()
    elsewhere = start(batcher, 4)
    await other.took()
    waiting = start(batcher, 100)
    await until_queued(batcher, 100)
    one.is_up = False
    one.end(0, TowerLost("died"))
    await until_queued(batcher, 120)
    other.end_all()
    await asyncio.gather(lost, elsewhere, waiting)
    assert sizes(other) == [[4], [8, 12], [100]]
    assert outcomes(batcher) == {'{outcome="ok"}': 3, '{outcome="retried"}': 1}
    assert batcher.failure is None


async def test_a_batch_lost_twice_fails_and_nothing_else_does(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    poison = start(batcher, 8)
    await device.took()
    behind = start(batcher, 12)
    await device.took()
    for number in (0, 1, 2):  # both, and the first once more
        device.end(number, TowerLost("died"))
    for number in range(3, 10):
        device.end(number)
    with pytest.raises(DeviceFailed, match="died 2 times"):
        await poison
    await behind
    await start(batcher, 16)
    assert sizes(device) == [[8], [12], [8], [12], [16]]
    assert batcher.failure is None
    assert batcher.live_threads == batcher.num_threads


async def test_those_who_left_are_not_run_again(make: Make) -> None:
    device = Device()
    batcher = make(device)
    first = start(batcher, 4)
    await device.took()
    leaving, staying = start(batcher, 8), start(batcher, 12)
    await until_queued(batcher, 20)
    device.end(0)
    await first
    await device.took()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    device.end(1, TowerLost("died"))
    device.end(2)
    await staying
    assert sizes(device) == [[4], [8, 12], [12]]


async def test_a_tower_that_is_gone_when_asked_is_not_the_batchs_fault(make: Make) -> None:
    device = Device()
    device.refusals = [TowerLost("gone") for _ in range(3)]
    batcher = make(device)
    device.end_all()
    await start(batcher, 8)
    assert sizes(device) == [[8]]
    assert outcomes(batcher) == {'{outcome="ok"}': 1, '{outcome="retried"}': 3}


async def test_a_failed_device_fails_the_service_but_not_what_runs_elsewhere(make: Make) -> None:
    one, other = Device(), Device()
    batcher = make(one, other)
    broken = start(batcher, 8)
    await one.took()
    healthy = start(batcher, 12)
    await other.took()
    waiting = start(batcher, 16)
    await until_queued(batcher, 16)
    one.end(0, DeviceFailed("gone"))
    for task in (broken, waiting):
        with pytest.raises(DeviceFailed, match="gone"):
            await task
    other.end(0)
    await healthy
    assert isinstance(batcher.failure, DeviceFailed)


async def test_closing_waits_for_what_runs_and_gives_up_what_does_not_end(make: Make) -> None:
    device = Device()
    batcher = make(device, pace=FAST)
    running = start(batcher, 4)
    await device.took()
    ahead = start(batcher, 8)
    await device.took()
    waiting = start(batcher, 12)
    await until_queued(batcher, 12)
    closing = asyncio.create_task(asyncio.to_thread(batcher.close, 1.0))
    with pytest.raises(Draining):
        await waiting
    device.end(0)
    await running
    with pytest.raises(Draining):  # after a second
        await ahead
    await closing
    assert batcher.live_threads == 1  # the one that waits for the device
    device.end_all()


class Unreliable:
    """A tower that is lost or out of memory every so often, and fails with the segment whose pixels are 66."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def submit(self, batch: PackedBatch) -> Pending:
        if self._random.random() < 0.05:
            raise TowerLost("gone")
        fate = self._random.random()

        def wait() -> Tensor:
            if bool((batch.pixel_values == 66).any()):
                raise NonFiniteResult("not finite")
            if fate < 0.05:
                raise TowerLost("died")
            if fate < 0.1 and len(batch) > 1:
                raise DeviceOutOfMemory("full")
            return marked(batch)

        return wait


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_everybody_has_an_answer_of_their_own(seed: int) -> None:
    choose = random.Random(seed)
    towers = [Unreliable(seed + n) for n in range(3)]
    batcher = Batcher(towers, CONFIG, max_batch_patches=100, max_queued_patches=10**6)
    callers = [Caller(choose.choice(["interactive", "batch"])) for _ in range(8)]

    async def encode(value: int) -> None:
        count = choose.randint(1, 5)
        own = [segment(2, 2 * choose.randint(1, 25), value=value) for _ in range(count)]
        encoded = await batcher.encode(own, choose.choice([None, *callers]))
        assert [rows[0].tolist() for rows in encoded.rows] == [[value, each.num_patches] for each in own]

    values = [66 if choose.random() < 0.05 else choose.randint(70, 250) for _ in range(300)]
    tasks = [asyncio.create_task(encode(value)) for value in values]
    await asyncio.sleep(0)
    for task in choose.sample(tasks, 30):
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for value, end in zip(values, ends, strict=True):
        if isinstance(end, NonFiniteResult):
            assert value == 66
        elif value == 66:
            assert isinstance(end, asyncio.CancelledError | DeviceFailed)
        else:  # DeviceFailed: lost twice
            assert end is None or isinstance(end, asyncio.CancelledError | DeviceFailed)
    assert sum(end is None for end in ends) > 200
    assert not batcher._queue
    assert batcher.failure is None
    assert batcher.live_threads == batcher.num_threads
    await asyncio.to_thread(batcher.close, 10.0)
    assert batcher.live_threads == 0
