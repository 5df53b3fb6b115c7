"""Remote media servers that stall, trickle, lie, send in circles or never end, through the whole service."""

import asyncio
import gzip
import resource

import httpx
import pytest

from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, image, numbers
from tests.http.test_problems import check
from tests.http.tower import SlowTower, until_queued
from tests.raw_server import Answer, chunked, redirect, response, serve
from tests.scrape import nonzero, scrape

Writer = asyncio.StreamWriter
GOOD = png(77)


async def stalls(writer: Writer) -> None:
    await asyncio.sleep(60)


async def stalls_in_the_head(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
    await asyncio.sleep(60)


async def stalls_in_the_body(writer: Writer) -> None:
    writer.write(response(200, GOOD[:-1], content_length=len(GOOD)))
    await asyncio.sleep(60)


async def trickles(writer: Writer) -> None:
    """One byte at a time, never silent for long."""
    for byte in response(200, GOOD * 100):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def endless_headers(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-more: and more\r\n" * 1000)
        await writer.drain()


async def endless_interim_answers(writer: Writer) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
        await writer.drain()


async def endless_body(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(bytes(65_536))
        await writer.drain()


async def endless_chunk_extension(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;")
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


async def endless_trailers(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
    while True:
        writer.write(b"x-more: and more\r\n" * 1000)
        await writer.drain()


async def resets(writer: Writer) -> None:
    writer.write(response(200, GOOD[:20], content_length=len(GOOD)))
    await writer.drain()
    writer.transport.abort()


BOMB = gzip.compress(bytes(64 << 20))

# What the server does, and what its item is told: status, code, and words of the detail.
FAULTS: dict[str, tuple[Answer, int, str, str]] = {
    "stalls": (stalls, 424, "fetch_failed", "silent for 0.3 s"),
    "stalls in the head": (stalls_in_the_head, 424, "fetch_failed", "silent for 0.3 s"),
    "stalls in the body": (stalls_in_the_body, 424, "fetch_failed", "silent for 0.3 s"),
    "trickles": (trickles, 424, "fetch_failed", "did not arrive within 1 s"),
    "announces more than it sends": (response(200, GOOD, content_length=10_000), 424, "fetch_failed", "broke off"),
    "announces less than it sends": (response(200, GOOD, content_length=30), 422, "corrupt_media", ""),
    "announces too much": (response(200, GOOD, content_length=10**15), 413, "limit_exceeded", "limit 1000000"),
    "announces a negative length": (response(200, GOOD, content_length=-1), 424, "fetch_failed", "broke off"),
    "announces two lengths": (
        response(200, GOOD).replace(b"\r\n\r\n", b"\r\ncontent-length: 5\r\n\r\n", 1),
        424,
        "fetch_failed",
        "broke off",
    ),
    "announces a length of 5000 digits": (
        response(200, GOOD, content_length="9" * 5000),
        424,
        "fetch_failed",
        "broke off",
    ),
    "sends in a circle": (redirect("/x?signature=secret"), 424, "fetch_failed", "redirects more than 3 times"),
    "closes at once": (b"", 424, "fetch_failed", "broke off"),
    "closes in the head": (b"HTTP/1.1 200 OK\r\nx:", 424, "fetch_failed", "broke off"),
    "closes in the body": (response(200, GOOD[:-20], content_length=len(GOOD)), 424, "fetch_failed", "broke off"),
    "closes in a chunk": (chunked(GOOD)[:-30], 424, "fetch_failed", "broke off"),
    "resets": (resets, 424, "fetch_failed", "broke off"),
    "endless headers": (endless_headers, 424, "fetch_failed", "broke off"),
    "endless interim answers": (endless_interim_answers, 424, "fetch_failed", "did not arrive within 1 s"),
    "endless body": (endless_body, 413, "limit_exceeded", "more than 1000000 bytes"),
    "endless chunk extension": (endless_chunk_extension, 424, "fetch_failed", "broke off"),
    "endless trailers": (endless_trailers, 424, "fetch_failed", "broke off"),
    "gzip bomb": (response(200, BOMB, content_encoding="gzip"), 424, "fetch_failed", "content encoding"),
    "gzip bomb in the transfer": (
        response(200, BOMB, content_length=None, transfer_encoding="gzip, chunked"),
        424,
        "fetch_failed",
        "broke off",
    ),
    "gzip bomb without a word": (response(200, BOMB), 415, "unsupported_media", ""),
    "another protocol": (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", 424, "fetch_failed", "broke off"),
    "HTTP/2": (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18), 424, "fetch_failed", "broke off"),
}


@pytest.fixture
async def service(connect: Connect) -> httpx.AsyncClient:
    return await connect(
        allow_private_media=True,
        max_item_bytes=1_000_000,
        fetch_idle_timeout_s=0.3,
        fetch_total_timeout_s=1.0,
    )


def url(port: int, path: str = "/x") -> str:
    return f"http://127.0.0.1:{port}{path}?signature=secret"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_media_server_that_misbehaves_costs_its_own_item(service: httpx.AsyncClient, fault: str) -> None:
    answer, status, code, words = FAULTS[fault]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with serve({"/x?signature=secret": answer, "/good?signature=secret": response(200, GOOD)}) as server:
        bad, good = url(server.port), url(server.port, "/good")
        problem = check(await encode(service, bad), status, code, 0)
        assert words in problem["detail"]
        assert not any(word in str(problem) for word in ("secret", "127.0.0.1"))
        among = (await encode(service, good, bad, image(png(5)))).json()["data"]
        assert [element["object"] for element in among] == ["embedding", "error", "embedding"]
        await server.wait_until_all_left()
        assert numbers((await encode(service, good)).json()["data"][0])[:, 0] == pytest.approx(77)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 48  # MB; the bomb holds 64
    samples = await scrape(service)
    assert nonzero(samples, "moonvit_items_total") in (
        {'{code="ok",kind="image"}': 3, f'{{code="{code}",kind="image"}}': 2},
        {'{code="ok",kind="image"}': 3, f'{{code="{code}",kind="unknown"}}': 2},
    )
    assert samples["moonvit_requests_in_flight"] == 0
    app_service = service.app.state.service  # type: ignore[attr-defined]
    assert app_service._fetcher.held_bytes == 0


async def test_a_hundred_stalled_fetches_do_not_keep_others_waiting(service: httpx.AsyncClient) -> None:
    """Uploads and health checks go on; the fetches end at their limits, and their places are free again."""
    async with serve({"/x?signature=secret": stalls, "/good?signature=secret": response(200, GOOD)}) as server:
        stalled = [asyncio.create_task(encode(service, url(server.port))) for _ in range(100)]
        async with asyncio.timeout(10):
            while not server.num_open:  # noqa: ASYNC110 - a test's poll
                await asyncio.sleep(0.005)
        assert (await encode(service, image(png(9)))).status_code == 200
        assert (await service.get("/health/ready")).status_code == 200
        assert not all(task.done() for task in stalled)
        for answer in await asyncio.gather(*stalled):
            check(answer, 424, "fetch_failed", 0)
        assert (await encode(service, url(server.port, "/good"))).status_code == 200


async def test_fetched_media_in_flight_are_bounded_together(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, allow_private_media=True, max_fetched_bytes=10_000)
    fetcher = client.app.state.service._fetcher  # type: ignore[attr-defined]
    large, chunks = png(2) + bytes(6000), [png(3), bytes(6000)]
    answers = {"/a?signature=secret": response(200, png(1) + bytes(6000)), "/b?signature=secret": response(200, large)}
    answers["/c?signature=secret"] = chunked(*chunks)
    async with serve(answers) as server:
        first = asyncio.create_task(encode(client, url(server.port, "/a")))
        await tower.busy()
        assert fetcher.held_bytes == len(png(1)) + 6000  # until its embedding is there
        for path in ("/b", "/c"):
            refused = await encode(client, url(server.port, path))
            assert "limit 10000" in check(refused, 429, "overloaded", 0)["detail"]
            assert int(refused.headers["retry-after"]) >= 1
        uploaded = asyncio.create_task(encode(client, image(png(4))))  # has its own bound
        await until_queued(client, 4)
        tower.release()
        assert (await first).status_code == 200
        assert (await uploaded).status_code == 200
        assert fetcher.held_bytes == 0
        assert (await encode(client, url(server.port, "/b"))).status_code == 200
        assert (await scrape(client))['moonvit_drops_total{reason="overload"}'] == 2


async def test_a_client_that_leaves_takes_its_fetch_along(service: httpx.AsyncClient) -> None:
    async with serve({"/x?signature=secret": stalls_in_the_body}) as server:
        request = asyncio.create_task(encode(service, url(server.port)))
        async with asyncio.timeout(5):
            while not server.num_open:  # noqa: ASYNC110 - a test's poll
                await asyncio.sleep(0.005)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await server.wait_until_all_left()
    assert service.app.state.service._fetcher.held_bytes == 0  # type: ignore[attr-defined]
