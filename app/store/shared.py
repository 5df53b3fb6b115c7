"""The tier that several nodes share: a Valkey or Redis server, which may be slow or gone without harm.

Imports redis-py, which is an extra: import this module only where the tier is configured.
"""

import asyncio
import io
import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from app.settings import InvalidSettings
from app.store import codec
from app.store.behind import WriteBehind
from app.store.codec import DamagedError
from app.store.entry import KEY, StoredEmbedding
from app.store.outage import Outage
from app.store.stats import TierStats

logger = logging.getLogger(__name__)

PREFIX = "moonvit:"  # of our keys on the server
SCHEMES = ("redis", "rediss", "unix")
CONNECTIONS = 4
PIECE_BYTES = 4 << 20  # a value is read in pieces: none holds the event loop for long, and each has its own timeout
CONNECT_TIMEOUT_S = 0.25
READ_TIMEOUT_S = 1.0  # of one piece, not counting the wait for a connection
WRITE_TIMEOUT_S = 5.0  # of a whole value, which no request waits for
QUEUED_BYTES = 512 << 20
PAUSE_S = (1.0, 30.0)  # first and longest, after a failure
CLOSE_S = 2.0


class SharedTier:
    """Entries on a server, each for `ttl_s` after it was written. Event loop only.

    Whoever can write to the server can answer for the encoder: the digest tells damage, not forgery.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with user, password and database as redis-py reads them.
        max_value_bytes: larger entries are not shared.
    Raises:
        InvalidSettings: a URL that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int = 3600,
        max_value_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = _client(url)
        self._ttl_s = ttl_s
        self._max_value_bytes = max_value_bytes
        self._writer = WriteBehind(self._write, QUEUED_BYTES)
        first_s, longest_s = PAUSE_S
        # Apart from each other: a server that is full still answers.
        self._reading = Outage("reading the shared store", first_s=first_s, longest_s=longest_s, clock=clock)
        self._writing = Outage("writing the shared store", first_s=first_s, longest_s=longest_s, clock=clock)
        self._readers = asyncio.Semaphore(CONNECTIONS)
        self.stats = TierStats()

    async def start(self) -> None:
        """Nothing: a server that is not there yet is as one that has gone."""

    async def load(self, key: str) -> StoredEmbedding | None:
        """The entry if the server has it whole and unaltered; anything else under its key is removed."""
        if not KEY.fullmatch(key):
            return None
        async with self._readers:
            # Asked once it is its turn: nobody waits in line for a server that has stopped answering.
            return await self._load(key) if self._reading.allows() else None

    def save(self, entry: StoredEmbedding) -> None:
        """Send the entry when there is time."""
        too_large = entry.tensor.nbytes > self._max_value_bytes
        if too_large or not KEY.fullmatch(entry.key) or not self._writer.add(entry):
            self.stats.dropped_writes += 1

    async def remove(self, key: str) -> None:
        """Remove the entry for every node, also where it is only about to be sent."""
        if not KEY.fullmatch(key):
            return
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._writer.cancel(key)
                if self._writing.allows():
                    await self._client.delete(PREFIX + key)
                    self._writing.worked()
        except (RedisError, OSError) as error:
            self._failed(self._writing, error)

    async def close(self) -> None:
        """Finish what is to be sent, within a few seconds."""
        await self._writer.close(CLOSE_S)
        await self._client.aclose()

    async def _load(self, key: str) -> StoredEmbedding | None:
        try:
            value = await self._get(PREFIX + key)
            entry = await asyncio.to_thread(_decode, key, value) if value else None
        except (RedisError, OSError) as error:
            self._failed(self._reading, error)
            return None
        except DamagedError as error:
            logger.warning("dropped a damaged value of the shared store: %s: %s", key, error)
            self.stats.damaged += 1
            await self.remove(key)
            entry = None
        else:
            self._reading.worked()
        if entry is None:
            self.stats.misses += 1
        else:
            self.stats.hits += 1
        return entry

    async def _get(self, name: str) -> bytearray:
        """The value, empty if there is none.

        Raises:
            DamagedError: no string, or longer than any we send.
        """
        value = bytearray()
        while True:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    piece: bytes = await self._client.getrange(name, len(value), len(value) + PIECE_BYTES - 1)
            except ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    raise DamagedError("not a string") from error
                raise
            value += piece
            if len(value) > self._max_value_bytes + codec.MAX_HEADER_BYTES:
                raise DamagedError("larger than any that are sent")
            if len(piece) < PIECE_BYTES:
                return value

    async def _write(self, entry: StoredEmbedding) -> None:
        if not self._writing.allows():
            self.stats.dropped_writes += 1
            return
        value = await asyncio.to_thread(_encode, entry)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._client.set(PREFIX + entry.key, value, ex=self._ttl_s)
        except (RedisError, OSError) as error:
            self.stats.dropped_writes += 1
            self._failed(self._writing, error)
        else:
            self.stats.writes += 1
            self._writing.worked()

    def _failed(self, outage: Outage, error: Exception) -> None:
        self.stats.failures += 1
        # Never the text of an exception: it may have the address, or what the server sent.
        outage.failed(type(error).__name__)


def _encode(entry: StoredEmbedding) -> bytes:
    return b"".join(codec.dump(entry))


def _decode(key: str, value: bytearray) -> StoredEmbedding:
    return codec.load(io.BytesIO(value), len(value), key)


def _client(url: str) -> Redis:
    if urlsplit(url).scheme not in SCHEMES:
        raise InvalidSettings("--store-url must begin with redis://, rediss:// or unix://")
    try:
        return Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=WRITE_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),  # its own would wait longer than the work saved is worth
            protocol=2,
        )
    except ValueError as error:
        raise InvalidSettings("--store-url is not a URL of a Redis server") from error
