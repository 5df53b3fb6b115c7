"""`Fetcher` with servers that answer wrong, too much, too slowly or not at all (rows M19, M20)."""

import asyncio
import gzip
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from app.errors import FetchFailed, LimitExceeded
from app.fetch import Fetcher
from tests.fetching import PNG, TRUST_NOBODY, failure, fetch, policy, resolve
from tests.raw_server import chunked, response, serve


@pytest.mark.parametrize("status", [204, 206, 300, 304, 400, 403, 404, 410, 429, 500, 503])
async def test_status_is_named(status: int) -> None:
    async with serve(response(status, b"" if status in (204, 304) else PNG)) as server:
        message = await failure(f"http://media.test:{server.port}/a?token=secret")
        assert message.startswith(f"media.test answered {status}")


async def test_empty_body() -> None:
    for answer in (response(200), chunked(), response(200, content_length=None)):
        async with serve(answer) as server:
            assert "200 without a body" in await failure(f"http://media.test:{server.port}/")


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "deflate, gzip", "x-unknown"])
async def test_content_encodings_are_refused_unread(encoding: str) -> None:
    bomb = gzip.compress(bytes(8_000_000))
    async with serve(response(200, bomb, content_encoding=encoding)) as server:
        assert "content encoding" in await failure(f"http://media.test:{server.port}/")


async def test_content_encoding_identity() -> None:
    async with serve(response(200, PNG, content_encoding="Identity")) as server:
        assert await fetch(f"http://media.test:{server.port}/") == PNG


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 200_000,
        b"HTTP/1.1 200 OK\r\n",
    ],
    ids=[
        "nothing",
        "garbage",
        "short",
        "no number",
        "two lengths",
        "coding",
        "cut chunk",
        "bad chunk",
        "long head",
        "head",
    ],
)
async def test_broken_http(answer: bytes) -> None:
    async with serve(answer) as server:
        message = await failure(f"http://media.test:{server.port}/a")
        assert message == "media.test broke off or did not answer in HTTP"


async def test_bytes_beyond_the_announced_length_reach_nobody() -> None:
    extra = response(200, b"planted for the next request")
    async with serve(response(200, PNG) + extra) as server:
        fetcher = Fetcher(policy(), resolve, ssl_context=TRUST_NOBODY)
        for _ in range(2):
            assert await fetcher.fetch(f"http://media.test:{server.port}/") == PNG
        assert len(server.heads) == 2


async def test_announced_length_over_the_limit_is_not_read() -> None:
    async def announce(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, content_length=10**12))
        await asyncio.sleep(60)

    async with serve(announce) as server:
        message = await failure(f"http://media.test:{server.port}/", LimitExceeded)
        assert message == f"media from media.test has {10**12} bytes, limit 1000000"


@pytest.mark.parametrize("framing", [b"transfer-encoding: chunked\r\n", b""], ids=["chunked", "until close"])
async def test_limit_while_reading_an_endless_body(framing: bytes) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
        while True:
            writer.write((b"10000\r\n%s\r\n" if framing else b"%s") % bytes(65_536))
            await writer.drain()

    async with serve(endless) as server:
        message = await failure(f"http://media.test:{server.port}/", LimitExceeded)
        assert message == "media from media.test has more than 1000000 bytes"


async def test_limit_is_exact() -> None:
    async with serve({"/l": response(200, PNG), "/c": chunked(PNG)}) as server:
        for path in ("/l", "/c"):
            url = f"http://media.test:{server.port}{path}"
            assert await fetch(url, max_bytes=len(PNG)) == PNG
            with pytest.raises(LimitExceeded):
                await fetch(url, max_bytes=len(PNG) - 1)


async def test_a_large_body_is_held_once() -> None:
    async def large(writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, content_length=16_000_000))
        for _ in range(250):
            writer.write(bytes(64_000))
            await writer.drain()

    async with serve(large) as server:
        tracemalloc.start()
        body = await fetch(f"http://media.test:{server.port}/", max_bytes=16_000_000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert body == bytes(16_000_000)
    assert peak < 1.5 * len(body)


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def half_a_body(writer: asyncio.StreamWriter) -> None:
    writer.write(response(200, content_length=100) + b"half")
    await asyncio.sleep(60)


async def half_a_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-")
    await asyncio.sleep(60)


async def trickled_head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        writer.write(b"a")
        await asyncio.sleep(0.02)


async def trickled_body(writer: asyncio.StreamWriter) -> None:
    writer.write(response(200, content_length=10_000))
    while True:
        writer.write(b"a")
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("answer", [silence, half_a_head, half_a_body])
async def test_silence_ends_at_the_idle_limit(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    async with serve(answer) as server:
        message = await failure(f"http://media.test:{server.port}/", idle_timeout_s=0.1)
        assert message == "media.test was silent for 0.1 s"


@pytest.mark.parametrize("answer", [trickled_head, trickled_body])
async def test_a_trickle_ends_at_the_total_limit(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> None:
    async with serve(answer) as server:
        message = await failure(f"http://media.test:{server.port}/", idle_timeout_s=0.2, total_timeout_s=0.4)
        assert message == "media from media.test did not arrive within 0.4 s"


async def test_the_total_limit_covers_waiting_for_a_slot() -> None:
    async with serve(silence) as server:
        fetcher = Fetcher(policy(total_timeout_s=0.2, max_connections_per_host=1), resolve, ssl_context=TRUST_NOBODY)
        results = await asyncio.gather(
            *(fetcher.fetch(f"http://media.test:{server.port}/") for _ in range(5)), return_exceptions=True
        )
        assert [type(result) for result in results] == [FetchFailed] * 5
        assert len(server.heads) == 1


async def test_nobody_listens() -> None:
    async with serve(b"") as server:
        port = server.port
    assert await failure(f"http://media.test:{port}/") == "media.test accepts no connection (limit 2 s)"


async def test_connecting_takes_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stalled(remote_host: str, remote_port: int, local_host: str | None = None) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("anyio.connect_tcp", stalled)
    start = asyncio.get_running_loop().time()
    assert "accepts no connection" in await failure("http://media.test/", connect_timeout_s=0.1)
    assert asyncio.get_running_loop().time() - start < 1


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files through /proc")
async def test_cancelling_leaves_no_connection_and_no_slot() -> None:
    async with serve({"/s": silence, "/h": half_a_body, "/a": response(200, PNG)}) as server:
        fetcher = Fetcher(policy(max_connections=40, max_connections_per_host=20), resolve, ssl_context=TRUST_NOBODY)
        before = open_files()
        for delay_s in (0, 0.001, 0.003, 0.01, 0.05):
            tasks = [
                asyncio.create_task(fetcher.fetch(f"http://{host}.test:{server.port}/{path}"))
                for host in ("media", "other")
                for path in "shshshshshsh" * 2
            ]
            await asyncio.sleep(delay_s)
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            await asyncio.sleep(0.01)
            await server.wait_until_all_left()
        assert open_files() == before
        urls = [f"http://media.test:{server.port}/a"] * 50
        assert await asyncio.gather(*map(fetcher.fetch, urls)) == [PNG] * 50


async def test_a_cancelled_handshake_leaves_no_connection() -> None:
    async with serve(silence) as server:  # accepts, and never shakes hands
        before = open_files()
        message = await failure(f"https://media.test:{server.port}/", total_timeout_s=0.1)
        assert message == "media from media.test did not arrive within 0.1 s"
        assert "no trusted TLS" in await failure(f"https://media.test:{server.port}/", connect_timeout_s=0.1)
        await server.wait_until_all_left()
        await asyncio.sleep(0.01)
        assert open_files() == before
