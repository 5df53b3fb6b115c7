"""The tier on disk stays within its bound, alone or with another process, and drops writes rather than pile them up."""

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.store import StoredEmbedding
from app.store.behind import WriteBehind
from app.store.directory import Directory
from tests.stored import entry, file_names, file_of, file_size, key, same, saved
from tests.unit.conftest import OpenTier

ROOT = Path(__file__).resolve().parents[2]


def used_at(store: Path, number: int, seconds: int) -> None:
    os.utime(file_of(store, number), (seconds, seconds))


async def test_least_recently_used_files_go_first(open_tier: OpenTier, store: Path) -> None:
    size = file_size(entry(1))
    tier = await open_tier(max_bytes=4 * size)
    await saved(tier, entry(1), entry(2), entry(3), entry(4))
    for number in (1, 2, 3, 4):
        used_at(store, number, 1_000_000 + number)
    await tier.load(key(1))
    await saved(tier, entry(5))
    # A little more is removed than must be: one file for the new one, and one for the next.
    assert [number for number in range(1, 6) if file_of(store, number).exists()] == [1, 4, 5]
    assert (tier.stats.bytes, tier.stats.evictions) == (3 * size, 2)
    await saved(tier, entry(6))
    assert [number for number in range(1, 7) if file_of(store, number).exists()] == [1, 4, 5, 6]


async def test_what_is_larger_than_the_bound_is_not_written(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier(max_bytes=file_size(entry(1)))
    await saved(tier, entry(1), entry(2, rows=100))
    assert file_names(store) == [file_of(store, 1).name]
    assert (tier.stats.writes, tier.stats.dropped_writes) == (1, 1)


async def test_a_smaller_bound_holds_from_the_start_and_strangers_stay(open_tier: OpenTier, store: Path) -> None:
    await saved(await open_tier(), *(entry(number) for number in range(10)))
    for number in range(10):
        used_at(store, number, 1_000_000 + number)
    (store / "notes.txt").write_text("theirs")
    tier = await open_tier(max_bytes=3 * file_size(entry(1)) + 500)
    assert [number for number in range(10) if file_of(store, number).exists()] == [7, 8, 9]
    assert tier.stats.evictions == 7
    assert (store / "notes.txt").exists()


async def test_temporaries_of_the_dead_are_swept_and_those_of_the_living_are_not(
    open_tier: OpenTier, store: Path
) -> None:
    await open_tier()
    dead, living = store / f".{key(1)}.{'0' * 16}.tmp", store / f".{key(2)}.{'1' * 16}.tmp"
    dead.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await open_tier()
        assert not dead.exists()
        assert living.exists()
    await open_tier()
    assert not living.exists()


READER_AND_WRITER = """
import random, sys, time
from pathlib import Path
from app.store.directory import Directory
from tests.stored import entry, key, same
path, bound, me = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
directory = Directory(path / "store", bound)
directory.open()
(path / me).touch()
while not all((path / name).exists() for name in ("one", "two")):
    time.sleep(0.001)
choice = random.Random(me)
hits = 0
for turn in range(600):
    number = choice.randrange(23)
    found = directory.read(key(number))
    assert found is None or same(found, entry(number, 1 + number)), number
    hits += found is not None
    directory.write(entry(number, 1 + number))
    if turn % 11 == 0:
        directory.remove(key(choice.randrange(23)))
print(hits)
"""


def test_two_processes_share_a_directory(tmp_path: Path, store: Path) -> None:
    bound = sum(file_size(entry(number, 1 + number)) for number in range(23)) // 2
    command = [sys.executable, "-c", READER_AND_WRITER, str(tmp_path), str(bound)]
    both = [
        subprocess.Popen([*command, name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    outputs = [process.communicate(timeout=150) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all(int(out) > 100 for out, _ in outputs), outputs  # of 600, with room for half of the entries
    Directory(store, bound).open()
    files = list(store.iterdir())
    assert {file.suffix for file in files} == {".safetensors"}
    assert sum(file.stat().st_size for file in files) <= bound


async def test_waiting_writes_are_bounded_and_the_rest_is_dropped(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.disk.QUEUED_BYTES", 3 * entry(1).num_bytes)
    tier = await open_tier()
    for number in range(10):
        tier.save(entry(number))
    tier.save(entry(0))  # waits already
    assert tier.stats.dropped_writes == 7
    await tier._writer.idle()
    assert tier.stats.writes == 3
    await saved(tier, entry(20, rows=1000))  # larger than the bound, alone
    assert same(await tier.load(key(20)), entry(20, rows=1000))


async def test_remove_reaches_what_is_only_about_to_be_written(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier()
    for number in range(5):
        tier.save(entry(number))
    await asyncio.sleep(0)
    await asyncio.gather(tier.remove(key(0)), tier.remove(key(4)))
    await tier._writer.idle()
    assert [number for number in range(5) if file_of(store, number).exists()] == [1, 2, 3]


async def test_close_writes_what_waits(open_tier: OpenTier, store: Path) -> None:
    tier = await open_tier()
    for number in range(5):
        tier.save(entry(number))
    await tier.close()
    assert all(file_of(store, number).exists() for number in range(5))


async def test_a_write_that_breaks_does_not_stop_the_next(caplog: pytest.LogCaptureFixture) -> None:
    written = []

    async def write(one: StoredEmbedding) -> None:
        if one.key == key(1):
            raise ZeroDivisionError
        written.append(one.key)

    writer = WriteBehind(write, 1 << 20)
    assert writer.add(entry(1))
    assert writer.add(entry(2))
    await writer.idle()
    assert written == [key(2)]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    await writer.close(1)
