"""The device fails, makes no sense or has no memory: who is told what, and what works afterwards."""

import asyncio
import gc
from typing import Any

import httpx
import pytest
import torch
from structlog.typing import EventDict
from torch import Tensor

from encoder import DeviceFailed, DeviceOutOfMemory, Engine, PackedBatch
from tests.faults.conftest import targets
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image, numbers
from tests.http.test_problems import check
from tests.http.tower import SlowTower, queued, until_queued
from tests.scrape import nonzero, scrape

BAD = 66  # level of the picture that the device chokes on


def holds_bad(batch: PackedBatch) -> bool:
    return (
        bool((batch.pixel_values == BAD).all(dim=(1, 2, 3)).any()) if batch.pixel_values.dtype == torch.uint8 else False
    )


class Blocked(SlowTower):
    """Waits as told, then behaves as `inner` does: so that a batch of several requests can be gathered."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, batch: Any) -> Tensor:
        super().__call__(batch)
        return self.inner(batch)


async def answers_right(client: httpx.AsyncClient, level: int) -> None:
    """The next request has the right numbers, nothing waits, and the service says it is ready."""
    element = (await encode(client, image(png(level)))).json()["data"][0]
    assert numbers(element)[:, 0] == pytest.approx(level)
    assert await queued(client) == 0
    assert (await client.get("/health/ready")).status_code == 200
    samples = await scrape(client)
    assert samples["moonvit_ready"] == 1
    assert samples["moonvit_requests_in_flight"] == 0
    assert samples["moonvit_running_batch_seconds"] == 0


async def one_batch(client: httpx.AsyncClient, tower: SlowTower, *levels: int) -> list[httpx.Response]:
    """One request a level, all of them in one batch."""
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    others = [asyncio.create_task(encode(client, image(png(level)))) for level in levels]
    await until_queued(client, 4 * len(levels))
    tower.release()
    assert (await first).status_code == 200
    return await asyncio.gather(*others)


async def test_an_error_inside_a_batch_costs_only_who_caused_it(connect: Connect) -> None:
    def chokes(batch: PackedBatch) -> Tensor:
        if holds_bad(batch):
            raise RuntimeError("index out of range in /secret/kernel.cu")
        return fake_run(batch)

    tower = Blocked(chokes)
    client = await connect(run=tower)
    good = [10, 11, 12, 13, 14]
    *answers, bad = await one_batch(client, tower, *good, BAD)
    for level, answer in zip(good, answers, strict=True):
        assert numbers(answer.json()["data"][0])[:, 0] == pytest.approx(level)
    assert "secret" not in str(check(bad, 500, "internal", 0))
    samples = await scrape(client)
    assert nonzero(samples, "moonvit_items_total") == {
        '{code="ok",kind="image"}': 6,
        '{code="internal",kind="image"}': 1,
    }
    batches = nonzero(samples, "moonvit_batches_total")
    assert batches['{outcome="failed"}'] == 1
    assert batches['{outcome="halved"}'] >= 1
    tower.release()
    await answers_right(client, 20)
    # A failure is not kept: the same picture is computed when the device can.
    tower.inner = fake_run
    assert (await encode(client, image(png(BAD)))).json()["data"][0]["cache"] == "miss"


def memory_files() -> int:
    """Open in this process: media and pixels on their way from and to workers."""
    return sum(target.startswith("/memfd:") for target in targets())


async def test_an_error_in_every_batch_ends_when_the_errors_end(connect: Connect, logs: list[EventDict]) -> None:
    def broken(batch: PackedBatch) -> Tensor:
        raise ValueError("nothing works")

    tower = Blocked(fake_run)
    client = await connect(run=tower)
    tower.release()
    await answers_right(client, 200)
    before = memory_files()
    tower.inner = broken
    tower.release()
    responses = await asyncio.gather(*(encode(client, *(image(png(10 * i + j)) for j in range(4))) for i in range(8)))
    for response in responses:
        problem = check(response, 500, "internal", 0)
        assert [element["error"]["code"] for element in problem["data"]] == ["internal"] * 4
    logs.clear()
    del responses, response
    gc.collect()
    assert memory_files() <= before + 4  # two workers, each with what it keeps for its next picture
    tower.inner = fake_run
    tower.release()
    await answers_right(client, 100)


async def test_a_dead_device_fails_what_it_has_and_refuses_the_rest_at_once(connect: Connect) -> None:
    def dies(batch: PackedBatch) -> Tensor:
        if holds_bad(batch):
            raise DeviceFailed("CUDA error: an illegal memory access was encountered")
        return fake_run(batch)

    tower = Blocked(dies)
    client = await connect(run=tower)
    answers = await one_batch(client, tower, 10, BAD, 12)
    for answer in answers:
        check(answer, 503, "device_failed", 0)
        assert int(answer.headers["retry-after"]) >= 1
    check(await client.get("/health/ready"), 503, "device_failed")
    check(await encode(client, image(png(1))), 503, "device_failed")  # not even what the store has: one answer for all
    assert (await client.get("/health/live")).status_code == 200
    samples = await scrape(client)
    assert samples["moonvit_ready"] == 0
    assert samples["moonvit_requests_in_flight"] == 0
    assert samples["moonvit_queue_patches"] == 0
    assert nonzero(samples, "moonvit_items_total")['{code="device_failed",kind="image"}'] == 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("demo:k3-tiny")


@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_values_that_are_not_finite_reach_nobody(
    connect: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch, which: str, value: float
) -> None:
    """The real tower, whose kernel goes wrong for one picture or for all."""
    forward = type(engine)._forward

    def poisoned(self: Engine, batch: PackedBatch) -> Tensor:
        rows = forward(self, batch).clone()
        if which == "all":
            rows[0, 0] = value
        elif holds_bad(batch):
            rows[-1, -1] = value
        return rows

    client = await connect(run=engine.run_to_host, store_bytes=0)
    right = numbers((await encode(client, image(png(10)))).json()["data"][0])
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_forward", poisoned)
        response = await encode(client, image(png(10)), image(png(BAD)), image(png(12)))
        if which == "all":
            assert [item["error"]["code"] for item in check(response, 500, "internal", 0)["data"]] == ["internal"] * 3
        else:
            kinds = [element["object"] for element in response.json()["data"]]
            assert (response.status_code, kinds) == (200, ["embedding", "error", "embedding"])
            assert (await scrape(client))['moonvit_batches_total{outcome="failed"}'] == 1
    again = await encode(client, image(png(10)), image(png(BAD)))
    assert numbers(again.json()["data"][0]) == pytest.approx(right, abs=1e-4)
    assert again.json()["data"][1]["object"] == "embedding"
    assert (await client.get("/health/ready")).status_code == 200


async def test_too_little_memory_for_large_batches_only(connect: Connect) -> None:
    """Nobody sees it: the batch is halved until it fits."""
    sizes: list[int] = []

    def small(batch: PackedBatch) -> Tensor:
        sizes.append(sum(batch.lengths))
        if sizes[-1] > 8:
            raise DeviceOutOfMemory("the device ran out of memory")
        return fake_run(batch)

    tower = Blocked(small)
    client = await connect(run=tower)
    levels = list(range(10, 26))
    answers = await one_batch(client, tower, *levels)
    for level, answer in zip(levels, answers, strict=True):
        assert numbers(answer.json()["data"][0])[:, 0] == pytest.approx(level)
    assert max(sizes) == 4 * len(levels)
    assert nonzero(await scrape(client), "moonvit_batches_total").keys() == {'{outcome="ok"}', '{outcome="halved"}'}
    tower.release()
    await answers_right(client, 99)


async def test_too_little_memory_for_an_item_alone(connect: Connect) -> None:
    def small(batch: PackedBatch) -> Tensor:
        if max(batch.lengths) > 8:
            raise DeviceOutOfMemory("the device ran out of memory")
        return fake_run(batch)

    tower = Blocked(small)
    client = await connect(run=tower)
    tower.release()
    response = await encode(client, image(png(30)), image(png(31, 56, 56)), image(png(32)))
    assert [element["object"] for element in response.json()["data"]] == ["embedding", "error", "embedding"]
    assert response.json()["data"][1]["error"]["code"] == "device_out_of_memory"
    alone = await encode(client, image(png(31, 56, 56)))
    check(alone, 503, "device_out_of_memory", 0)
    assert int(alone.headers["retry-after"]) >= 1
    await answers_right(client, 33)
