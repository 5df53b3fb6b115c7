"""Bytes of all fetched media together: bounded, counted as they arrive, given back however a fetch ends."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.errors import FetchFailed, LimitExceeded, Overloaded
from app.fetch import Fetcher
from tests.fetching import TRUST_NOBODY, policy, resolve
from tests.raw_server import Answer, chunked, response, serve

BODY = bytes(1000)


def fetcher(max_held_bytes: int, **changes: object) -> Fetcher:
    return Fetcher(policy(max_held_bytes=max_held_bytes, **changes), resolve, ssl_context=TRUST_NOBODY)


def half(sent: asyncio.Event, go: asyncio.Event) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Announce 1000 bytes, send 500, and the rest when told to."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, content_length=1000) + BODY[:500])
        await writer.drain()
        sent.set()
        await go.wait()
        writer.write(BODY[500:])
        await writer.drain()

    return answer


async def until_held(media: Fetcher, num_bytes: int) -> None:
    async with asyncio.timeout(5):
        while media.held_bytes != num_bytes:  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.005)


async def test_a_body_counts_until_its_block_ends() -> None:
    media = fetcher(1500)
    async with serve({"/a": response(200, BODY), "/c": chunked(BODY[:400], BODY[:600])}) as server:
        url = f"http://media.test:{server.port}"
        with media.hold() as hold:
            assert await media.fetch(url + "/a", hold) == BODY
            assert media.held_bytes == 1000
            for path in ("/a", "/c"):  # known at once, and while reading
                with pytest.raises(Overloaded, match=r"bytes of fetched media are held .* limit 1500$"):
                    await media.fetch(url + path)
                assert media.held_bytes == 1000
        assert media.held_bytes == 0
        assert await media.fetch(url + "/c") == BODY
        assert media.held_bytes == 0


async def test_only_bytes_that_arrived_count() -> None:
    """A host that announces much and sends little keeps nobody out."""
    sent, go = asyncio.Event(), asyncio.Event()
    media = fetcher(1500)
    async with serve({"/half": half(sent, go), "/a": response(200, BODY)}) as server:
        url = f"http://media.test:{server.port}"
        slow = asyncio.create_task(media.fetch(url + "/half"))
        await until_held(media, 500)
        assert await media.fetch(url + "/a") == BODY
        with media.hold() as hold:
            await media.fetch(url + "/a", hold)
            go.set()
            with pytest.raises(Overloaded):  # its other half finds no room any more
                await slow
            assert media.held_bytes == 1000
    assert media.held_bytes == 0


async def test_an_announced_length_that_does_not_fit_is_not_read() -> None:
    async def announce(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, content_length=900_000))
        await asyncio.sleep(60)

    media = fetcher(500_000)
    async with serve({"/large": announce, "/a": response(200, BODY)}) as server:
        url = f"http://media.test:{server.port}"
        with media.hold() as hold:
            await media.fetch(url + "/a", hold)
            async with asyncio.timeout(1):
                with pytest.raises(Overloaded):
                    await media.fetch(url + "/large")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (response(200, BODY, content_length=2000), FetchFailed),
        (chunked(BODY)[:-10], FetchFailed),
        (chunked(BODY, BODY, BODY), LimitExceeded),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3e8\r\n" + BODY + b"\r\nrubbish\r\n", FetchFailed),
    ],
    ids=["shorter than announced", "cut", "over the item's limit", "broken"],
)
async def test_a_fetch_that_fails_gives_back_what_it_held(answer: Answer, error: type[Exception]) -> None:
    media = fetcher(10_000, max_bytes=2500)
    async with serve(answer) as server:
        with pytest.raises(error):
            await media.fetch(f"http://media.test:{server.port}/")
    assert media.held_bytes == 0


async def test_a_fetch_that_is_cancelled_gives_back_what_it_held() -> None:
    sent, go = asyncio.Event(), asyncio.Event()
    media = fetcher(1500)
    async with serve(half(sent, go)) as server:
        task = asyncio.create_task(media.fetch(f"http://media.test:{server.port}/"))
        await until_held(media, 500)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert media.held_bytes == 0


async def test_many_at_a_time_never_hold_more_than_the_bound() -> None:
    media, seen = fetcher(5000), []

    async def one(url: str) -> int:
        try:
            with media.hold() as hold:
                await media.fetch(url, hold)
                seen.append(media.held_bytes)
                await asyncio.sleep(0.001)
        except Overloaded:
            return 0
        return 1

    async with serve({"/a": response(200, BODY), "/c": chunked(BODY[:700], BODY[:300])}) as server:
        urls = [f"http://media.test:{server.port}/{'ac'[index % 2]}" for index in range(100)]
        fetched = sum(await asyncio.gather(*map(one, urls)))
    assert fetched >= 5
    assert max(seen) <= 5000
    assert media.held_bytes == 0
