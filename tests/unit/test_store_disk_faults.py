"""A disk that is full, broken, hung or not there is never a request's trouble."""

import asyncio
import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from app.store import StoredEmbedding
from app.store.disk import READERS
from tests.stored import Clock, build_store, entry, file_names, file_of, key, same, saved
from tests.unit.conftest import OpenTier


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/secret/path")

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
async def test_a_full_disk_turns_writing_off_for_a_while_and_says_so_once(
    open_tier: OpenTier, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = Clock()
    tier = await open_tier(clock=clock)
    await saved(tier, entry(1))
    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        failing(patch, "write", code)
        await saved(tier, *(entry(number) for number in range(2, 10)))
        clock.now += 31
        await saved(tier, entry(10), entry(11))  # one try, which fails again
        assert same(await tier.load(key(1)), entry(1))  # what is there is still given out
    assert file_names(store) == [file_of(store, 1).name]  # nothing half
    await saved(tier, entry(12))  # still off: the pause is longer now
    assert (tier.stats.failures, tier.stats.dropped_writes, tier.stats.writes) == (2, 11, 1)
    clock.now += 61
    await saved(tier, entry(13))
    assert same(await tier.load(key(13)), entry(13))
    assert [record.message for record in caplog.records] == [
        f"writing the store directory is off for a while: OSError, errno {code}",
        "writing the store directory is back",
    ]


async def test_a_disk_that_cannot_be_read_is_a_miss(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    tier = await open_tier(clock=clock)
    await saved(tier, entry(1))
    with monkeypatch.context() as patch:
        failing(patch, "fstat", errno.EIO)
        assert [await tier.load(key(1)) for _ in range(5)] == [None] * 5
    assert await tier.load(key(1)) is None
    assert (tier.stats.failures, tier.stats.damaged, len(caplog.records)) == (1, 0, 1)
    clock.now += 31
    assert same(await tier.load(key(1)), entry(1))


async def test_a_disk_that_hangs_is_given_up_on(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, store: Path
) -> None:
    monkeypatch.setattr("app.store.disk.TIMEOUT_S", 0.05)
    tier = await open_tier()
    let_go = threading.Event()
    monkeypatch.setattr(tier._directory, "read", lambda _: let_go.wait(30))
    monkeypatch.setattr(tier._directory, "remove", lambda _: let_go.wait(30))
    began = time.monotonic()
    try:
        assert await asyncio.gather(*(tier.load(key(number)) for number in range(100))) == [None] * 100
        assert await tier.load(key(1)) is None
        await tier.remove(key(1))
    finally:
        let_go.set()
    assert time.monotonic() - began < 2  # not 100 times in line
    assert tier.stats.failures == READERS + 1
    assert [record.message for record in caplog.records] == [
        "reading the store directory is off for a while: TimeoutError, errno None",
        "writing the store directory is off for a while: TimeoutError, errno None",
    ]


async def test_a_directory_that_cannot_be_made_is_not_the_requests_trouble(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    tier = await open_tier(in_the_way / "store", clock=clock)
    embeddings = build_store(disk=tier)

    async def compute() -> StoredEmbedding:
        return entry(1)

    assert (await embeddings.fetch_or_compute(key(1), compute))[1] == "miss"
    assert (await embeddings.fetch_or_compute(key(1), compute))[1] == "hit"
    await tier._writer.idle()
    assert tier.stats.writes == 0
    in_the_way.unlink()
    clock.now += 31
    await saved(tier, entry(2))
    assert same(await tier.load(key(2)), entry(2))
    assert sum("off for a while" in record.message for record in caplog.records) == 2  # reading and writing


async def test_an_unwritable_directory_still_answers(open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved(await open_tier(), entry(1))
    real = os.open

    def read_only(path: Path, flags: int, *rest: int) -> int:  # permissions alone would not stop root
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    tier = await open_tier()
    await saved(tier, entry(2))
    assert same(await tier.load(key(1)), entry(1))
    assert await tier.load(key(2)) is None
    assert (tier.stats.failures, tier.stats.dropped_writes) == (1, 1)


async def test_a_directory_that_was_removed_is_made_again(open_tier: OpenTier, store: Path) -> None:
    clock = Clock()
    tier = await open_tier(clock=clock)
    await saved(tier, entry(1))
    shutil.rmtree(store)
    assert await tier.load(key(1)) is None
    await saved(tier, entry(2))
    clock.now += 31
    await saved(tier, entry(3))
    assert same(await tier.load(key(3)), entry(3))
