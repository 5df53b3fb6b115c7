"""The wall clock goes backwards, jumps or stands still: nothing that is counted in seconds looks at it."""

import ast
import asyncio
import os
import time
from pathlib import Path

import pytest
import torch

from app.store import EmbeddingStore
from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.http.tower import SlowTower, until_queued
from tests.scrape import scrape
from tests.stored import DTYPE, WIDTH, Clock, entry, key

ROOT = Path(__file__).resolve().parents[2]
DAY_S = 86_400.0
JUMPS = [-DAY_S, -1e9, DAY_S, 5e8]

# Every use of the wall clock, and why it may be one: nothing is ever computed from it.
WALL_CLOCK = {
    "app/service.py": "`created` of the model, as OpenAI's list has it",
    "app/routes.py": "`created` of an answer",
    "app/tracing.py": "when a span began, for whoever shows it",
    "app/commands/check_access.py": "whether a certificate has run out, which is a date",
    "app/commands/roads.py": "`created` of an answer",
    "app/commands/encode.py": "`created` of an answer",
    "app/store/store.py": "the label of a lease's end, counted on the monotonic clock",
}


def reads_wall_clock(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in (
                "time.time",
                "time.time_ns",
                "datetime.now",
                "datetime.utcnow",
                "time.localtime",
                "time.gmtime",
            ):
                return True
    return False


def test_only_labels_are_made_from_the_wall_clock() -> None:
    files = [*ROOT.glob("app/**/*.py"), *ROOT.glob("encoder/**/*.py")]
    users = {path.relative_to(ROOT).as_posix() for path in files if reads_wall_clock(path)}
    assert users <= WALL_CLOCK.keys(), "say above why the wall clock is right there, or use time.monotonic"


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A wall clock for the whole process that is set by the test; the monotonic one goes on."""
    clock = Clock(time.time())
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(time, "time_ns", lambda: int(clock.now * 1e9))
    return clock


@pytest.mark.parametrize("seconds", JUMPS)
async def test_requests_do_not_see_the_clock_jump(connect: Connect, jump: Clock, seconds: float) -> None:
    tower = SlowTower()
    client = await connect(run=tower, max_queued_patches=8)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    waiting = asyncio.create_task(encode(client, image(png(2))))
    hasty = asyncio.create_task(encode(client, image(png(3)), deadline_ms=200))
    await until_queued(client, 8)
    jump.now += seconds
    check(await hasty, 504, "deadline_exceeded", 0)  # after its own 200 ms, whatever the clock says
    filling = asyncio.create_task(encode(client, image(png(4))))
    await until_queued(client, 8)
    refused = check(await encode(client, image(png(5))), 429, "overloaded", 0)
    assert refused["detail"]
    retry_after = (await encode(client, image(png(5)))).headers["retry-after"]
    assert 1 <= int(retry_after) <= 600
    assert not waiting.done()
    jump.now -= 2 * seconds
    tower.release()
    for request in (first, waiting, filling):
        timing = (await request).json()["timing_ms"]
        assert all(0 <= value < 60_000 for value in timing.values())
    samples = await scrape(client)
    assert 0 <= samples["moonvit_request_duration_seconds_sum"] < 60
    assert 0 <= samples["moonvit_event_loop_lag_seconds_sum"] < 60
    assert samples["moonvit_running_batch_seconds"] == 0
    assert (await client.get("/health/ready")).status_code == 200


@pytest.mark.parametrize("seconds", JUMPS)
async def test_a_lease_lasts_as_long_as_it_was_given(seconds: float) -> None:
    clock, wall = Clock(), Clock(1.8e9)
    one = entry(1)
    store = EmbeddingStore(one.num_bytes, width=WIDTH, dtype=DTYPE, clock=clock, wall_clock=wall)
    store.put(one)
    lease = store.hold(one, 300)
    assert lease.expires_at == 1.8e9 + 300
    wall.now += seconds
    clock.now += 299
    store.put(entry(2))  # finds no room beside the lease
    assert store.get(key(1)) is not None
    assert store.get(key(2)) is None
    clock.now += 2
    store.put(entry(2))
    assert store.get(key(2)) is not None
    await store.close()


@pytest.mark.parametrize("seconds", JUMPS)
async def test_the_store_directory_outlives_a_clock_that_jumps(
    connect: Connect, jump: Clock, tmp_path: Path, seconds: float
) -> None:
    """Its files are ordered by the time the file system stamps them with, which at worst evicts in another order."""
    client = await connect(store_dir=tmp_path / "store")
    assert (await encode(client, image(png(1)))).status_code == 200
    await client.app.state.service.stop()  # type: ignore[attr-defined]
    jump.now += seconds
    for path in (tmp_path / "store").iterdir():  # as if written by another clock
        os.utime(path, (max(0.0, jump.now), max(0.0, jump.now)))
    again = await connect(store_dir=tmp_path / "store")
    assert (await encode(again, image(png(1)))).json()["data"][0]["cache"] == "hit"
    assert torch.isfinite(torch.tensor((await scrape(again))['moonvit_cache_bytes{tier="disk"}']))
