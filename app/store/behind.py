"""Writes that nobody waits for: one at a time, a bounded number of bytes waiting, the rest dropped."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import Context

from app.store.entry import StoredEmbedding

logger = logging.getLogger(__name__)


class WriteBehind:
    """Entries on their way to a tier. Event loop only.

    Args:
        write: writes one entry; what it cannot do it counts and logs itself.
        max_bytes: of waiting entries, which live in memory beside the store's own bound; a single one may be larger.
    """

    def __init__(self, write: Callable[[StoredEmbedding], Awaitable[None]], max_bytes: int) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[str, StoredEmbedding] = OrderedDict()
        self._bytes = 0
        self._current: str | None = None
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def add(self, entry: StoredEmbedding) -> bool:
        """Take the entry to be written later; False if there is no room for it."""
        if entry.key in self._waiting or entry.key == self._current:
            return True
        if self._bytes and self._bytes + entry.num_bytes > self._max_bytes:
            return False
        self._waiting[entry.key] = entry
        self._bytes += entry.num_bytes
        if self._task is None or self._task.done():
            # Not in the context of whoever came first: its log lines would bear that request's id.
            self._task = asyncio.create_task(self._run(), context=Context())
        return True

    async def cancel(self, key: str) -> None:
        """Do not write that key; if it is being written, wait until it is."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            self._bytes -= entry.num_bytes
        if self._current == key:
            async with self._writing:
                pass

    async def idle(self) -> None:
        """Wait until nothing waits to be written."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self, timeout_s: float) -> None:
        """Write what waits, or give up after that time."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            self._current, entry = self._waiting.popitem(last=False)
            try:
                async with self._writing:
                    await self._write(entry)
            except Exception:
                logger.exception("an entry could not be written")
            finally:
                self._current = None
                self._bytes -= entry.num_bytes
            del entry  # may be the last to hold it
