"""What the decoder says of itself: jobs that run and wait, and why film workers were replaced."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from app.decode import DecodeLimits, Decoder, Jobs
from app.errors import CorruptMedia, DeadlineExceeded
from encoder import EncoderConfig, load_config
from tests.clips import make_film
from tests.unit.test_film_workers import PLAIN, alive, stopped_while_it_works, until

CONFIG: EncoderConfig = load_config("demo:k3-tiny")

pytestmark = pytest.mark.usefixtures("shared_template")


@pytest.fixture(scope="module")
def film() -> bytes:
    return make_film(48)


@asynccontextmanager
async def decoder(on_restart: Callable[[str], None], **limits: float) -> AsyncIterator[Decoder]:
    made = Decoder(
        CONFIG,
        DecodeLimits(**limits),  # type: ignore[arg-type]
        picture_workers=1,
        film_workers=1,
        on_worker_restart=lambda kind, reason: on_restart(reason),
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def test_films_that_run_and_wait_and_a_crash(film: bytes) -> None:
    reasons: list[str] = []
    async with decoder(reasons.append) as made:
        assert made.jobs("video") == Jobs(running=0, waiting=0)
        (pid,) = made.pids("video")
        job = await stopped_while_it_works(made, pid, film)
        waiting = [asyncio.create_task(made.prepare(film, "video", PLAIN)) for _ in range(3)]
        await until(lambda: made.jobs("video") == Jobs(running=1, waiting=3))
        waiting.pop().cancel()
        await until(lambda: made.jobs("video") == Jobs(running=1, waiting=2))
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(job, *waiting, return_exceptions=True)  # a killed film may be tried again
        assert made.jobs("video") == Jobs(running=0, waiting=0)
    assert reasons == ["crashed"]


async def test_an_idle_worker_that_was_killed_is_a_crash(film: bytes) -> None:
    reasons: list[str] = []
    async with decoder(reasons.append) as made:
        (pid,) = made.pids("video")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        await made.prepare(film, "video", PLAIN)
    assert reasons == ["crashed"]


async def test_a_film_that_takes_too_long_and_one_that_nobody_waits_for(film: bytes) -> None:
    reasons: list[str] = []
    async with decoder(reasons.append, film_deadline_s=2.0) as made:
        (pid,) = made.pids("video")
        hung = await stopped_while_it_works(made, pid, film)
        with pytest.raises(DeadlineExceeded):
            await hung
        await until(lambda: bool(made.pids("video")) and made.pids("video") != [pid])
        await made.prepare(film, "video", PLAIN)
        (pid,) = made.pids("video")
        left = await stopped_while_it_works(made, pid, film)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
    assert reasons == ["deadline", "cancelled"]


async def test_a_worker_that_has_had_its_films_is_replaced_as_planned(film: bytes) -> None:
    reasons: list[str] = []
    async with decoder(reasons.append, film_worker_max_jobs=1) as made:
        await made.prepare(film, "video", PLAIN)
        with pytest.raises(CorruptMedia):
            await made.prepare(film[: len(film) // 2], "video", PLAIN)
    assert reasons == ["planned", "planned"]


async def test_ending_a_worker_that_is_not_there_yet_leaves_the_next_ones_alone() -> None:
    """Its sockets' numbers are taken again at once; a wait that went on for them would swallow another's answer."""
    for steps in range(12):
        made = Decoder(CONFIG, DecodeLimits(), picture_workers=3, film_workers=1)
        start = asyncio.create_task(made.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        await made.close()
        async with asyncio.timeout(20):
            await asyncio.gather(start, return_exceptions=True)
        other = Decoder(CONFIG, DecodeLimits(), picture_workers=1, film_workers=1)
        async with asyncio.timeout(20):
            await other.start()
        assert len(other.pids("image")) == len(other.pids("video")) == 1
        await other.close()
