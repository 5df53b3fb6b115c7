"""The process itself: told to end with a hundred requests in its hands, killed at once."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.faults.processes import Running, gone, service
from tests.faults.waiting import until
from tests.http.conftest import png
from tests.scrape import samples_of

HEADERS = {"content-type": "image/png"}


async def post(client: httpx.AsyncClient, running: Running, data: bytes) -> httpx.Response:
    return await client.post(f"{running.url}/v1/encode?dtype=float32", content=data, headers=HEADERS)


async def metrics(client: httpx.AsyncClient, running: Running) -> dict[str, float]:
    return samples_of((await client.get(f"{running.url}/metrics")).text)


async def reaches(client: httpx.AsyncClient, running: Running, series: str, value: float) -> None:
    async def there() -> bool:
        return (await metrics(client, running))[series] >= value

    await until(there)


def unlimited() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


async def test_sigterm_with_a_hundred_requests_in_flight(tmp_path: Path) -> None:
    """All that were accepted are answered, new ones are told why not, and the process ends with 0 in time."""
    drain_s = 120.0  # what it may take; a quiet machine needs a few seconds
    with service(tmp_path, "--film-workers", "1", "--drain-timeout-s", str(drain_s)) as running:
        children = running.children()
        async with unlimited() as client:
            gate = asyncio.Event()

            async def held_back(data: bytes) -> httpx.Response:
                """Accepted at once, and complete when the test says so: so that all are in flight at the signal."""

                async def body() -> AsyncIterator[bytes]:
                    yield data[:20]
                    await gate.wait()
                    yield data[20:]

                return await client.post(f"{running.url}/v1/encode?dtype=float32", content=body(), headers=HEADERS)

            held = [asyncio.create_task(held_back(png(100 + i % 50, 28, 28 * (1 + i % 3)))) for i in range(80)]
            large = [asyncio.create_task(post(client, running, png(i, 280, 280 + 28 * i))) for i in range(20)]
            # The large ones may be done before: they were sent, which is enough.
            await reaches(client, running, "moonvit_requests_in_flight", len(held))

            async def all_there() -> bool:
                waiting = (await metrics(client, running))["moonvit_requests_in_flight"]
                return sum(task.done() for task in large) + waiting >= 100

            await until(all_there)
            signalled = time.monotonic()
            running.signal(signal.SIGTERM)

            async def draining() -> bool:
                ready = await client.get(f"{running.url}/health/ready")
                return (ready.status_code, ready.json().get("code")) == (503, "draining")

            await until(draining)
            assert (await client.get(f"{running.url}/health/live")).status_code == 200
            refused = await asyncio.gather(*(post(client, running, png(i)) for i in range(10)))
            assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(503, "draining")}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            gate.set()
            answers = await asyncio.gather(*held, *large)
            assert {answer.status_code for answer in answers} == {200}
            assert all(answer.json()["data"][0]["object"] == "embedding" for answer in answers)
        assert running.exit_code() == 0
        assert time.monotonic() - signalled < drain_s
        assert gone(children)
        assert "Traceback" not in running.log.read_text()
        async with unlimited() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"{running.url}/health/live")


async def test_killed_at_once_it_finds_its_store_again(tmp_path: Path) -> None:
    """What was written is found; what was cut by the kill is dropped and made again; no process is left behind."""
    store = tmp_path / "store"
    flags = ("--film-workers", "1", "--store-dir", str(store))
    pictures = [png(10 * i, 56, 28) for i in range(5)]
    async with unlimited() as client:
        with service(tmp_path, *flags) as running:
            first = [(await post(client, running, data)).json()["data"][0] for data in pictures]
            await reaches(client, running, 'moonvit_cache_writes_total{tier="disk"}', len(pictures))
            children = running.children()
            assert children  # the film worker
            running.signal(signal.SIGKILL)
            assert running.exit_code() == -signal.SIGKILL
            assert gone(children)
        # Two that the kill, or a power cut, tore: one cut short, one with its tail never written.
        files = {path.name: path for path in store.iterdir()}
        torn = [files[f"{entry['key']}.safetensors"] for entry in first[:2]]
        os.truncate(torn[0], torn[0].stat().st_size // 2)
        with torn[1].open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        half_written = store / f".{first[2]['key']}.0123456789abcdef.tmp"
        half_written.write_bytes(b"x" * 1000)
        with service(tmp_path, *flags) as running:
            assert not half_written.exists()
            again = [(await post(client, running, data)).json()["data"][0] for data in pictures]
            assert [entry["cache"] for entry in again] == ["miss", "miss", "hit", "hit", "hit"]
            assert [entry["embedding"] for entry in again] == [entry["embedding"] for entry in first]
            samples = await metrics(client, running)
            assert samples['moonvit_cache_damaged_total{tier="disk"}'] == 2
            running.signal(signal.SIGTERM)
            assert running.exit_code() == 0
