"""The store's directory is taken away, closed or filled up, and its server goes and comes back, under the service."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.store import disk, shared
from tests.faults.waiting import reaches, until
from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, image
from tests.scrape import scrape
from tests.unit.test_store_shared import SERVER, Server


async def cache(client: httpx.AsyncClient, level: int) -> str:
    """hit or miss, of a picture that must always be answered."""
    response = await encode(client, image(png(level)))
    assert response.status_code == 200
    return str(response.json()["data"][0]["cache"])


async def hits(client: httpx.AsyncClient, level: int) -> None:
    """Wait until the picture is found in the tier below, which has come back by then."""

    async def found() -> bool:
        return await cache(client, level) == "hit"

    await until(found)


async def healthy(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health/ready")).status_code == 200
    assert (await scrape(client))["moonvit_requests_in_flight"] == 0


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again after a tenth of a second instead of half a minute."""
    monkeypatch.setattr(disk, "PAUSE_S", (0.1, 0.2))
    monkeypatch.setattr(shared, "PAUSE_S", (0.1, 0.2))


WRITES, DROPPED = 'moonvit_cache_writes_total{tier="disk"}', 'moonvit_cache_dropped_writes_total{tier="disk"}'
FAILURES = 'moonvit_cache_tier_failures_total{tier="disk"}'


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where this machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if (
        os.geteuid()
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs a root that may mount a tmpfs; without one see tests/unit/test_store_disk_faults.py")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.usefixtures("short_pauses")
async def test_a_full_disk_costs_no_request_and_is_used_again(connect: Connect, small_disk: Path) -> None:
    filler = small_disk / "filler"
    client = await connect(store_dir=small_disk / "store")
    assert await cache(client, 1) == "miss"
    await reaches(client, WRITES, 1)
    fill_up(filler)
    assert [await cache(client, level) for level in (2, 3, 4)] == ["miss"] * 3
    await reaches(client, DROPPED, 3)
    assert [path.suffix for path in (small_disk / "store").iterdir()] == [".safetensors"]  # nothing half
    assert (await scrape(client))[FAILURES] >= 1
    await healthy(client)
    filler.unlink()
    levels = iter(range(10, 256))

    async def written() -> bool:
        await cache(client, next(levels))
        return (await scrape(client))[WRITES] >= 2

    await until(written)
    await healthy(client)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(path.parent).f_bavail == 0


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


@pytest.mark.usefixtures("short_pauses")
async def test_a_read_only_file_system_still_answers(connect: Connect, small_disk: Path) -> None:
    client = await connect(store_dir=small_disk / "store", store_bytes=0)
    assert await cache(client, 1) == "miss"
    await reaches(client, WRITES, 1)
    remount(small_disk, "ro")
    assert await cache(client, 1) == "hit"
    assert await cache(client, 2) == "miss"
    await reaches(client, DROPPED, 1)
    assert await cache(client, 2) == "miss"
    await healthy(client)
    remount(small_disk, "rw")
    await hits(client, 2)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("instead", ["nothing", "a file", "a link to nowhere"])
async def test_a_directory_that_is_taken_away(connect: Connect, tmp_path: Path, instead: str) -> None:
    store = tmp_path / "store"
    client = await connect(store_dir=store, store_bytes=0)
    assert await cache(client, 1) == "miss"
    await reaches(client, WRITES, 1)
    assert await cache(client, 1) == "hit"
    store.rename(tmp_path / "elsewhere")
    if instead == "a file":
        store.write_bytes(b"not a directory")
    elif instead == "a link to nowhere":
        store.symlink_to(tmp_path / "no" / "where")
    assert await cache(client, 1) == "miss"
    assert [await cache(client, level) for level in (2, 3)] == ["miss", "miss"]
    await reaches(client, DROPPED, 1)
    await healthy(client)
    if instead != "nothing":
        store.unlink()
    (tmp_path / "elsewhere").rename(store)
    await hits(client, 1)
    await healthy(client)


async def test_files_of_others_in_the_directory_are_left_alone(connect: Connect, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    (store / ("emb-" + "0" * 64 + ".safetensors.bak")).write_text("mine")
    client = await connect(store_dir=store, store_bytes=0)
    assert await cache(client, 1) == "miss"
    await reaches(client, WRITES, 1)
    assert await cache(client, 1) == "hit"
    assert (store / "notes.txt").read_text() == "mine"
    assert len(list(store.iterdir())) == 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    if SERVER is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    found = Server(tmp_path)
    found.start()
    yield found
    found.stop()


SHARED_WRITES = 'moonvit_cache_writes_total{tier="shared"}'
SHARED_FAILURES = 'moonvit_cache_tier_failures_total{tier="shared"}'


@pytest.mark.usefixtures("short_pauses")
async def test_a_server_that_goes_and_comes_back(connect: Connect, server: Server) -> None:
    one = await connect(store_url=server.url, store_bytes=0)
    other = await connect(store_url=server.url, store_bytes=0)
    assert await cache(one, 1) == "miss"
    await reaches(one, SHARED_WRITES, 1)
    assert await cache(other, 1) == "hit"
    server.stop()
    answers = await asyncio.gather(*(cache(one, level) for level in (1, 2, 3, 4) * 5))
    assert set(answers) == {"miss"}
    await reaches(one, SHARED_FAILURES, 1)
    for client in (one, other):
        await healthy(client)
    server.start()  # empty, as after a restart
    await hits(one, 1)
    await hits(other, 1)
    for client in (one, other):
        await healthy(client)


@pytest.mark.usefixtures("short_pauses")
async def test_a_server_that_is_not_there_at_the_start(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = await connect(store_url=f"redis://127.0.0.1:{port}/0")
    assert [await cache(client, 1), await cache(client, 1)] == ["miss", "hit"]
    await healthy(client)


@pytest.mark.usefixtures("short_pauses")
async def test_a_server_that_stops_answering_delays_a_request_by_a_second_once(
    connect: Connect, server: Server
) -> None:
    """Stopped, not gone: connections stay open and nothing comes back."""
    client = await connect(store_url=server.url, store_bytes=0)
    assert await cache(client, 1) == "miss"
    await reaches(client, SHARED_WRITES, 1)
    process = server._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert set(await asyncio.gather(*(cache(client, 2 + level) for level in range(20)))) == {"miss"}
        assert time.monotonic() - start < 10
        await healthy(client)
    finally:
        process.send_signal(signal.SIGCONT)
    await hits(client, 1)
