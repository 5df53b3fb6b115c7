"""The tier on a local disk: survives a restart, and never fails a request."""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from app.store.behind import WriteBehind
from app.store.codec import DamagedError
from app.store.directory import Directory
from app.store.entry import KEY, StoredEmbedding
from app.store.outage import Outage
from app.store.stats import TierStats

T = TypeVar("T")

logger = logging.getLogger(__name__)

THREADS = 4  # of its own: a disk that hangs takes these and no others
READERS = 3  # at a time, which leaves a thread to write
TIMEOUT_S = 5.0  # of one read or removal, not counting the wait for its turn
QUEUED_BYTES = 512 << 20
PAUSE_S = (30.0, 300.0)  # first and longest, after a failure
CLOSE_S = 10.0


class DiskTier:
    """Safetensors files in a directory of at most `max_bytes`. Event loop only; all I/O is in its own threads.

    Reading and writing are switched off apart from each other: a full disk still answers.

    Args:
        directory: made if it does not exist; other processes may use it too.
    """

    def __init__(self, directory: Path, max_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = Directory(directory, max_bytes, clock)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store-disk")
        self._writer = WriteBehind(self._write, QUEUED_BYTES)
        first_s, longest_s = PAUSE_S
        self._reading = Outage("reading the store directory", first_s=first_s, longest_s=longest_s, clock=clock)
        self._writing = Outage("writing the store directory", first_s=first_s, longest_s=longest_s, clock=clock)
        self._readers = asyncio.Semaphore(READERS)
        self._stats = TierStats()

    @property
    def stats(self) -> TierStats:
        self._stats.bytes = self._directory.bytes
        self._stats.evictions = self._directory.evictions
        return self._stats

    async def start(self) -> None:
        """Open the directory; where that fails, the tier is off at first."""
        try:
            await self._in_thread(self._directory.open)
        except OSError as error:
            self._failed(self._writing, error)

    async def load(self, key: str) -> StoredEmbedding | None:
        """The entry if it is there, whole and unaltered; anything else in its place is removed."""
        if not KEY.fullmatch(key):
            return None
        async with self._readers:
            # Asked once it is its turn: nobody waits in line for a disk that has stopped answering.
            return await self._load(key) if self._reading.allows() else None

    def save(self, entry: StoredEmbedding) -> None:
        """Write the entry when there is time."""
        if not KEY.fullmatch(entry.key) or not self._writer.add(entry):
            self._stats.dropped_writes += 1

    async def remove(self, key: str) -> None:
        """Remove the entry, also where it is only about to be written."""
        if not KEY.fullmatch(key):
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._writer.cancel(key)
                await self._in_thread(self._directory.remove, key)
        except OSError as error:  # TimeoutError is one
            self._failed(self._writing, error)

    async def close(self) -> None:
        """Finish what is to be written, within a few seconds."""
        await self._writer.close(CLOSE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, key: str) -> StoredEmbedding | None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                entry = await self._in_thread(self._directory.read, key)
        except DamagedError as error:
            logger.warning("dropped a damaged file of the store directory: %s: %s", key, error)
            self._stats.damaged += 1
            await self.remove(key)
            entry = None
        except OSError as error:  # TimeoutError is one
            self._failed(self._reading, error)
            return None
        self._reading.worked()
        if entry is None:
            self._stats.misses += 1
        else:
            self._stats.hits += 1
        return entry

    async def _write(self, entry: StoredEmbedding) -> None:
        if not self._writing.allows():
            self._stats.dropped_writes += 1
            return
        try:
            written = await self._in_thread(self._directory.write, entry)
        except OSError as error:
            self._stats.dropped_writes += 1
            self._failed(self._writing, error)
            return
        self._writing.worked()
        if written:
            self._stats.writes += 1
        else:
            self._stats.dropped_writes += 1

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def _failed(self, outage: Outage, error: OSError) -> None:
        self._stats.failures += 1
        # Never the text of an exception: it has the directory's path.
        outage.failed(f"{type(error).__name__}, errno {error.errno}")
