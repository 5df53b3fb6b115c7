"""What the batcher counts."""

import asyncio
import threading
import time

import pytest
from torch import Tensor

from app.batcher import Batcher
from app.metrics import Metrics
from app.ticket import Caller
from app.tower import InlineTower
from encoder import DeviceFailed, NonFiniteResult, PackedBatch
from tests.scrape import nonzero, samples_of
from tests.unit.test_batcher import CONFIG, Gate, entered, marked, segment, until_queued


def found_in(metrics: Metrics) -> dict[str, float]:
    return samples_of(metrics.exposition("")[0].decode())


async def test_batches_are_counted_with_their_sizes() -> None:
    metrics, gate = Metrics(), Gate()
    batcher = Batcher([InlineTower(gate)], CONFIG, max_batch_patches=100, max_queued_patches=1000, metrics=metrics)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    others = [asyncio.create_task(batcher.encode([segment(4, 4)])) for _ in range(5)]
    await until_queued(batcher, 5 * 16)
    for _ in range(2):
        gate.go.release()
    await asyncio.gather(first, *others)
    await asyncio.to_thread(batcher.close)
    found = found_in(metrics)
    assert nonzero(found, "moonvit_batches_total") == {'{outcome="ok"}': 2}
    assert found["moonvit_batch_patches_sum"] == found["moonvit_patches_total"] == 4 + 80
    assert found['moonvit_batch_patches_bucket{le="64.0"}'] == 1
    assert found['moonvit_batch_patches_bucket{le="128.0"}'] == 2
    assert found['moonvit_batch_segments_bucket{le="1.0"}'] == 1
    assert found["moonvit_batch_segments_sum"] == 6
    assert found["moonvit_tokens_total"] == 1 + 5 * 4


async def test_one_bad_segment_of_eight_fails_once_and_halves_thrice() -> None:
    def poisoned(batch: PackedBatch) -> Tensor:
        if bool((batch.pixel_values == 66).any()):
            raise NonFiniteResult("not finite")
        return marked(batch)

    metrics, gate = Metrics(), Gate(poisoned)
    batcher = Batcher([InlineTower(gate)], CONFIG, max_batch_patches=100, max_queued_patches=1000, metrics=metrics)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    values = [1, 2, 3, 4, 5, 66, 6, 7]
    others = [asyncio.create_task(batcher.encode([segment(2, 2, value=value)])) for value in values]
    await until_queued(batcher, 8 * 4)
    for _ in range(20):
        gate.go.release()
    await asyncio.gather(first, *others, return_exceptions=True)
    await asyncio.to_thread(batcher.close)
    found = found_in(metrics)
    # 8 fails; 4 runs, 4 fails; 2 fails, 2 runs; 1 runs, 1 fails
    assert nonzero(found, "moonvit_batches_total") == {
        '{outcome="ok"}': 4,
        '{outcome="halved"}': 3,
        '{outcome="failed"}': 1,
    }
    assert found["moonvit_patches_total"] == 4 + 7 * 4
    assert found["moonvit_batch_patches_count"] == 8


async def test_time_of_halves_is_not_counted_twice() -> None:
    def slow(batch: PackedBatch) -> Tensor:
        time.sleep(0.1)
        if len(batch) > 1:
            raise NonFiniteResult("not finite")
        return marked(batch)

    metrics = Metrics()
    batcher = Batcher([InlineTower(slow)], CONFIG, max_batch_patches=100, max_queued_patches=1000, metrics=metrics)
    start = time.monotonic()
    await batcher.encode([segment(2, 2), segment(2, 2)])
    wall_s = time.monotonic() - start
    await asyncio.to_thread(batcher.close)
    assert 3 * 0.1 <= found_in(metrics)["moonvit_device_busy_seconds_total"] <= wall_s


async def test_two_towers_that_run_all_the_time_are_busy_once() -> None:
    together = threading.Barrier(2)

    def slow(batch: PackedBatch) -> Tensor:
        together.wait(30)  # both run
        time.sleep(0.1)
        return marked(batch)

    metrics = Metrics()
    towers = [InlineTower(slow), InlineTower(slow)]
    start = time.monotonic()
    batcher = Batcher(towers, CONFIG, max_batch_patches=4, max_queued_patches=1000, metrics=metrics)
    await batcher.encode([segment(2, 2), segment(2, 2)])
    await asyncio.to_thread(batcher.close)
    wall_s = time.monotonic() - start
    found = found_in(metrics)
    assert nonzero(found, "moonvit_batches_total") == {'{outcome="ok"}': 2}
    assert 0.1 <= found["moonvit_device_busy_seconds_total"] <= wall_s


async def test_a_failed_device_is_a_failed_batch() -> None:
    def broken(batch: PackedBatch) -> Tensor:
        raise DeviceFailed("gone")

    metrics = Metrics()
    batcher = Batcher([InlineTower(broken)], CONFIG, max_batch_patches=100, max_queued_patches=1000, metrics=metrics)
    with pytest.raises(DeviceFailed):
        await batcher.encode([segment(2, 2)])
    await asyncio.to_thread(batcher.close)
    found = found_in(metrics)
    assert nonzero(found, "moonvit_batches_total") == {'{outcome="failed"}': 1}
    assert found["moonvit_patches_total"] == 0


async def test_waits_are_counted_by_priority_and_dropped_work_in_patches() -> None:
    metrics, gate = Metrics(), Gate()
    batcher = Batcher([InlineTower(gate)], CONFIG, max_batch_patches=100, max_queued_patches=1000, metrics=metrics)
    first = asyncio.create_task(batcher.encode([segment(2, 2)]))
    await entered(gate)
    leaving = asyncio.create_task(batcher.encode([segment(4, 4), segment(2, 4)]))
    await until_queued(batcher, 24)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    others = [asyncio.create_task(batcher.encode([segment(4, 4)] * 2, Caller("batch"))) for _ in range(2)]
    await until_queued(batcher, 64)
    for _ in range(2):
        gate.go.release()
    await asyncio.gather(first, *others)
    await asyncio.to_thread(batcher.close)
    found = found_in(metrics)
    assert found["moonvit_dropped_patches_total"] == 24
    assert nonzero(found, "moonvit_queue_wait_seconds_count") == {
        '{priority="interactive"}': 1,
        '{priority="batch"}': 2,
    }
    assert found['moonvit_queue_wait_seconds_sum{priority="batch"}'] > 0
    assert found["moonvit_patches_total"] == 4 + 64
