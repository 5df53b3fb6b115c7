"""The tier on a server, against a real one that the test starts, stops and fills with rubbish."""

import asyncio
import logging
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from app.settings import InvalidSettings
from app.store import StoredEmbedding, codec
from app.store.shared import CONNECTIONS, PIECE_BYTES, SharedTier
from tests.stored import WIDTH, Clock, build_store, entry, film, key, same, saved

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="neither valkey-server nor redis-server is installed")

PASSWORD = "hush-hush"  # noqa: S105 - of a server that lives for a second


class Server:
    """A server on a free port of this machine, with nothing on disk."""

    def __init__(self, directory: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"
        self.client = Redis.from_url(self.url)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "save": "", "requirepass": PASSWORD}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [str(SERVER), *flags], cwd=self._directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(500):
            with closing(socket.socket()) as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError("the server did not start")

    def stop(self) -> None:
        self.client.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


Open = Callable[..., SharedTier]


@pytest.fixture
async def opened(server: Server) -> AsyncIterator[Open]:
    tiers: list[SharedTier] = []

    def build(url: str = server.url, **rest: Any) -> SharedTier:
        tiers.append(SharedTier(url, **rest))
        return tiers[-1]

    yield build
    for tier in tiers:
        await tier.close()


def name(number: int) -> str:
    return "moonvit:" + key(number)


async def test_what_one_node_made_another_finds(opened: Open, server: Server) -> None:
    one, other = opened(ttl_s=100), opened()
    await saved(one, entry(1), film(2))
    assert same(await other.load(key(1)), entry(1))
    assert same(await other.load(key(2)), film(2))
    assert await other.load(key(3)) is None
    assert 0 < server.client.ttl(name(1)) <= 100
    assert (one.stats.writes, other.stats.hits, other.stats.misses) == (2, 2, 1)
    await other.remove(key(1))
    assert await one.load(key(1)) is None


@pytest.mark.parametrize("body_bytes", [PIECE_BYTES - 16, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 16])
async def test_values_of_several_pieces(opened: Open, body_bytes: int) -> None:
    large = entry(1, rows=body_bytes // (2 * WIDTH))
    tier = opened()
    await saved(tier, large)
    assert same(await tier.load(key(1)), large)


async def test_a_value_that_ends_with_a_piece(opened: Open, server: Server) -> None:
    head, _ = codec.dump(entry(1, rows=PIECE_BYTES // 16))
    fits = entry(1, rows=(PIECE_BYTES - len(head)) // 16)
    tier = opened()
    await saved(tier, fits)
    assert PIECE_BYTES - 16 < server.client.strlen(name(1)) <= PIECE_BYTES
    assert same(await tier.load(key(1)), fits)


async def test_large_entries_are_not_shared(opened: Open, server: Server) -> None:
    tier = opened(max_value_bytes=entry(1).tensor.nbytes)
    await saved(tier, entry(1), entry(2, rows=5))
    assert server.client.keys() == [name(1).encode()]
    assert (tier.stats.writes, tier.stats.dropped_writes) == (1, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda client, value: client.set(name(1), value[:-1]),
        lambda client, value: client.set(name(1), value[:-3] + bytes([value[-3] ^ 4]) + value[-2:]),
        lambda client, value: client.set(name(1), b"rubbish"),
        lambda client, value: client.set(name(1), b"".join(codec.dump(entry(2)))),
        lambda client, value: client.setrange(name(1), 40 << 20, b"x"),
        lambda client, value: (client.delete(name(1)), client.lpush(name(1), "a list")),
    ],
)
async def test_a_damaged_value_is_a_miss_and_is_removed(
    opened: Open, server: Server, spoil: Callable[[Any, bytes], object]
) -> None:
    tier = opened(max_value_bytes=10 << 20)
    await saved(tier, entry(1))
    spoil(server.client, server.client.get(name(1)))
    assert await tier.load(key(1)) is None
    assert server.client.exists(name(1)) == 0
    assert (tier.stats.damaged, tier.stats.misses, tier.stats.failures) == (1, 1, 0)


async def test_nothing_but_keys_is_asked_for(opened: Open, server: Server) -> None:
    tier = opened()
    for bad in ("x", key(1) + "\r\nFLUSHALL\r\n"):
        assert await tier.load(bad) is None
        tier.save(StoredEmbedding(**{**vars(entry(1)), "key": bad}))
        await tier.remove(bad)
    await tier._writer.idle()
    assert server.client.keys() == []
    assert tier.stats.dropped_writes == 2


async def test_a_server_that_goes_and_comes_back(
    opened: Open, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app.store")
    clock = Clock()
    tier = opened(clock=clock)
    store = build_store(shared=tier)
    calls = 0

    def compute(number: int) -> Callable[[], Awaitable[StoredEmbedding]]:
        async def make() -> StoredEmbedding:
            nonlocal calls
            calls += 1
            return entry(number)

        return make

    await store.fetch_or_compute(key(1), compute(1))
    await tier._writer.idle()
    await asyncio.to_thread(server.stop)
    began = time.monotonic()
    for number in range(2, 30):  # nobody notices
        assert (await store.fetch_or_compute(key(number), compute(number)))[1] == "miss"
    assert time.monotonic() - began < 5
    await tier._writer.idle()
    assert calls == 29
    assert tier.stats.failures == 2  # one read, one write: then it is left alone
    await asyncio.to_thread(server.start)
    await saved(tier, entry(40))
    assert server.client.keys() == []  # not yet
    clock.now += 1.5
    await saved(tier, entry(41))
    assert await tier.load(key(50)) is None
    assert same(await tier.load(key(41)), entry(41))
    assert {record.message.partition(":")[0] for record in caplog.records} == {
        "reading the shared store is off for a while",
        "writing the shared store is off for a while",
        "reading the shared store is back",
        "writing the shared store is back",
    }
    assert len(caplog.records) == 4
    assert not any(PASSWORD in record.message or str(server.port) in record.message for record in caplog.records)


async def test_a_server_that_stalls_costs_one_short_wait(
    opened: Open, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.shared.READ_TIMEOUT_S", 0.1)
    tier = opened()
    await saved(tier, entry(1))
    server.client.execute_command("CLIENT", "PAUSE", "1500", "ALL")
    began = time.monotonic()
    assert await asyncio.gather(*(tier.load(key(1)) for _ in range(100))) == [None] * 100
    assert await tier.load(key(1)) is None
    await tier.remove(key(1))
    assert time.monotonic() - began < 1  # not 100 times in line
    assert tier.stats.failures == CONNECTIONS + 1


async def test_a_full_server_still_answers(opened: Open, server: Server) -> None:
    tier = opened()
    await saved(tier, entry(1))
    server.client.config_set("maxmemory", "1")
    await saved(tier, entry(2), entry(3))
    assert (tier.stats.failures, tier.stats.dropped_writes) == (1, 2)
    assert same(await tier.load(key(1)), entry(1))


async def test_a_reader_who_leaves_in_the_middle_spoils_nothing_for_the_next(opened: Open) -> None:
    tier = opened()
    large = entry(1, rows=1 << 20)
    await saved(tier, large, entry(2))
    for delay_s in (0, 0.001, 0.005, 0.01, 0.02):
        task = asyncio.create_task(tier.load(key(1)))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert same(await tier.load(key(2)), entry(2))
    assert same(await tier.load(key(1)), large)
    assert tier.stats.damaged == 0


async def test_a_wrong_password_is_an_outage_not_an_error(
    opened: Open, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(server.url.replace(PASSWORD, "wrong"))
    assert await tier.load(key(1)) is None
    assert [record.message for record in caplog.records] == [
        "reading the shared store is off for a while: AuthenticationError"
    ]


@pytest.mark.parametrize("url", ["http://host:6379", "host:6379", "", "redis://host:port", "redis://host/?db=x"])
def test_urls_that_cannot_be_used(url: str) -> None:
    with pytest.raises(InvalidSettings, match="--store-url"):
        SharedTier(url)
