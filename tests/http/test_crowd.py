"""More connections than the service can be bothered with: announced bodies, heads that never end, a control port."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.conftest import png
from tests.http.test_socket import free_port, running

SLOW = 200
DESCRIPTORS = 100  # that may be open besides connections: pipes, files of the decoders


@pytest.fixture(scope="module")
def crowded() -> Iterator[tuple[int, int, int]]:
    """(process id, port, control port) of a service that has few connections and little room for bodies."""
    control_port = free_port()
    flags = ["--film-workers", "1", "--control-port", str(control_port), "--max-connections", str(SLOW + 20)]
    flags += ["--max-inflight-bytes", "2000000", "--max-body-bytes", "2000000", "--docs-page"]
    with running(*flags) as (process, url):
        yield process.pid, int(url.rsplit(":", 1)[1]), control_port


@contextlib.asynccontextmanager
async def connected(port: int, number: int, sent: bytes) -> AsyncIterator[list[asyncio.StreamReader]]:
    """So many connections that have sent this much of a request, and send no more."""
    writers, readers = [], []
    try:
        for _ in range(number):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            readers.append(reader)
            writers.append(writer)
        yield readers
    finally:
        for writer in writers:
            writer.close()


def head(length: int) -> bytes:
    return (
        f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {length}\r\n\r\n".encode()
    )


async def until_in_flight(port: int, number: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(10):
        while True:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            if f"moonvit_requests_in_flight {number:.1f}" in text:
                return
            await asyncio.sleep(0.01)


async def encode(port: int) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(
            f"http://127.0.0.1:{port}/v1/encode", content=png(7), headers={"content-type": "image/png"}
        )


async def test_bodies_that_are_only_announced_keep_nobody_out(crowded: tuple[int, int, int]) -> None:
    _, port, control_port = crowded
    async with connected(port, 8, head(2_000_000)):
        await until_in_flight(control_port, 8)
        assert (await encode(port)).status_code == 200
    await until_in_flight(control_port, 0)


async def test_bytes_that_arrived_count_and_an_announcement_beyond_them_is_refused(
    crowded: tuple[int, int, int],
) -> None:
    _, port, control_port = crowded
    async with connected(port, 1, head(1_900_000) + bytes(1_500_000)):
        await until_in_flight(control_port, 1)
        async with asyncio.timeout(10):
            while True:  # until they have all been read
                async with connected(port, 1, head(1_000_000)) as (reader,):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.2):
                            answer = await reader.readuntil(b"\r\n\r\n")
                            break
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert (await encode(port)).status_code == 200
    await until_in_flight(control_port, 0)


async def test_heads_that_do_not_end_stop_nobody_and_use_up_nothing(crowded: tuple[int, int, int]) -> None:
    pid, port, _ = crowded
    async with connected(port, SLOW, b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nX-Slow:"):
        for _ in range(5):
            assert (await encode(port)).status_code == 200
        assert SLOW < open_descriptors(pid) < SLOW + DESCRIPTORS
    async with asyncio.timeout(10):
        while open_descriptors(pid) > DESCRIPTORS:  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.01)


def open_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


async def test_beyond_the_limit_a_connection_is_told_so_and_probes_are_answered(crowded: tuple[int, int, int]) -> None:
    pid, port, control_port = crowded
    async with connected(port, SLOW + 20, b"GET /health HTTP/1.1\r\n"):
        await until_descriptors(pid, SLOW + 20)
        async with connected(port, 1, head(1_000_000) + bytes(500_000)) as (reader,):
            answer = await asyncio.wait_for(reader.read(), 10)
        first, _, rest = answer.partition(b"\r\n")
        assert first == b"HTTP/1.1 429 Too Many Requests"
        fields, _, body = rest.partition(b"\r\n\r\n")
        assert b"\r\nretry-after: 1\r\n" in b"\r\n" + fields + b"\r\n"
        assert json.loads(body)["code"] == "overloaded"
        async with httpx.AsyncClient() as client:
            for route in ("/health", "/health/live", "/health/ready", "/metrics", "/v1/info"):
                assert (await client.get(f"http://127.0.0.1:{control_port}{route}")).status_code == 200
        assert open_descriptors(pid) < SLOW + 20 + DESCRIPTORS
    async with asyncio.timeout(10):
        while (await encode(port)).status_code != 200:  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.01)


async def until_descriptors(pid: int, number: int) -> None:
    async with asyncio.timeout(10):
        while open_descriptors(pid) < number:  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.01)


async def test_the_control_port_has_nothing_else(crowded: tuple[int, int, int]) -> None:
    _, port, control_port = crowded
    async with httpx.AsyncClient() as client:
        for route in ("/v1/models", "/docs", "/openapi.json", "/problems/overloaded", "/health/", "/v1/encode"):
            answer = await client.get(f"http://127.0.0.1:{control_port}{route}")
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), route
        refused: Any = await client.post(f"http://127.0.0.1:{control_port}/v1/encode", content=b"x")
        assert refused.status_code == 404
        assert (await client.get(f"http://127.0.0.1:{port}/docs")).status_code == 200


def test_a_control_port_in_use_is_found_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--port", str(free_port()), "--control-port", str(taken.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-m", "app.cli", "serve", *flags], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
