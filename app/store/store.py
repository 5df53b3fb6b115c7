"""`EmbeddingStore`: memory above the tiers below it, and one computation for all who miss the same key."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import torch

from app.errors import Overloaded
from app.store.entry import StoredEmbedding
from app.store.flights import Flights
from app.store.memory import Lease, MemoryTier
from app.store.stats import StoreStats, TierStats

logger = logging.getLogger(__name__)

Outcome = Literal["hit", "miss"]


class Tier(Protocol):
    """A slower place for entries. It may forget, and never raises for what it cannot do."""

    @property
    def stats(self) -> TierStats: ...
    async def start(self) -> None: ...
    async def load(self, key: str) -> StoredEmbedding | None: ...
    def save(self, entry: StoredEmbedding) -> None: ...
    async def remove(self, key: str) -> None: ...
    async def close(self) -> None: ...


class EmbeddingStore:
    """Embeddings by key. Event loop only; what it returns is shared by all who ask and must not be written to.

    While an entry is in memory, its key gives the same bytes. Whatever comes out has the width and dtype of the tower
    and is as long as it says; what has not is dropped, and the key is a miss.

    Args:
        max_bytes: bound on the entries in memory; 0 keeps none there, and computations are still shared.
        width, dtype: of the embeddings this service makes.
        clock, wall_clock: seconds, monotonic and since 1970; the second only labels leases.
        disk, shared: tiers below, asked in this order.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        width: int,
        dtype: torch.dtype,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        disk: Tier | None = None,
        shared: Tier | None = None,
    ) -> None:
        self._memory = MemoryTier(max_bytes, clock)
        self._width = width
        self._dtype = dtype
        self._clock = clock
        self._wall_clock = wall_clock
        self._disk = disk
        self._shared = shared
        self._tiers: Sequence[Tier] = [tier for tier in (disk, shared) if tier is not None]
        self._loads: Flights[StoredEmbedding | None] = Flights()
        self._computations: Flights[tuple[StoredEmbedding, Outcome]] = Flights()
        self._copying: dict[str, StoredEmbedding] = {}  # lent entries whose copy, to be kept, is being made
        self._copies: set[asyncio.Task[None]] = set()
        self._stats = StoreStats(max_bytes)

    @property
    def stats(self) -> StoreStats:
        """Counters since the start, and what is in memory now."""
        memory, stats = self._memory, self._stats
        memory.end_leases()
        stats.bytes, stats.leased_bytes, stats.entries = memory.bytes, memory.leased_bytes, len(memory)
        stats.evictions = memory.evictions
        stats.disk = self._disk.stats if self._disk else None
        stats.shared = self._shared.stats if self._shared else None
        return stats

    async def start(self) -> None:
        for tier in self._tiers:
            await tier.start()

    async def close(self) -> None:
        """Cancel computations, and let the tiers finish their writes."""
        await self._computations.close()
        await self._loads.close()
        await asyncio.gather(*self._copies)
        for tier in self._tiers:
            await tier.close()

    def get(self, key: str) -> StoredEmbedding | None:
        """What memory has under the key."""
        entry = self._recall(key)
        self._count("miss" if entry is None else "hit")
        return entry

    async def find(self, key: str) -> StoredEmbedding | None:
        """What any tier has under the key; it is in memory from then on, if there is room."""
        entry = self._recall(key) or await self._load(key)
        self._count("miss" if entry is None else "hit")
        return entry

    async def fetch_or_compute(
        self, key: str, compute: Callable[[], Awaitable[StoredEmbedding]]
    ) -> tuple[StoredEmbedding, Outcome]:
        """What any tier has under the key, or else what `compute` makes; callers at the same time share both.

        The computation goes on until it is done or nobody waits for it any more, so `compute` must not depend on one
        caller's deadline. "miss" is the outcome for all who waited for it.

        Raises:
            What `compute` raised, to all who wait now; the next caller computes again.
        """
        entry = self._recall(key)
        if entry is not None:
            self._count("hit")
            return entry, "hit"
        self._stats.joined += key in self._computations
        entry, outcome = await self._computations.join(key, partial(self._produce, key, compute))
        self._count(outcome)
        return entry, outcome

    def put(self, entry: StoredEmbedding) -> StoredEmbedding:
        """Keep the entry if there is room, here and below. Never raises.

        Of a lent one a copy is kept, as soon as it is made; until then its key stands for what is lent.

        Returns:
            What the key stands for now: an entry that was there before stays.
        """
        if not entry.is_sound(self._width, self._dtype):
            self._stats.damaged += 1
            return entry
        present = self._recall(entry.key)
        if present is not None:
            return present
        if entry.is_lent:
            self._keep_copy(entry)
            return entry
        self._remember(entry)
        for tier in self._tiers:
            tier.save(entry)
        return entry

    def hold(self, entry: StoredEmbedding, seconds: float) -> Lease:
        """Keep an entry that was just found or made for so long at least; a lease that ends later stays as it is.

        Raises:
            LimitExceeded: larger than the store.
            Overloaded: leases fill the store; `retry_after_s` is when the next one ends.
        """
        if entry.is_lent:
            entry = entry.copied()
        try:
            ends_s = self._memory.hold(entry, seconds)
        except Overloaded:
            self._stats.lease_refusals += 1
            raise
        return Lease(ends_s, self._wall_clock() + ends_s - self._clock())

    def check_room(self, num_bytes: int) -> None:
        """Refuse early, before the work is done, what `hold` would refuse afterwards.

        Raises:
            LimitExceeded, Overloaded: as `hold`.
        """
        try:
            self._memory.check_room(num_bytes)
        except Overloaded:
            self._stats.lease_refusals += 1
            raise

    async def lease(self, key: str, seconds: float) -> Lease | None:
        """Hold what any tier has under the key; None if nothing.

        Raises:
            LimitExceeded, Overloaded: as `hold`.
        """
        entry = await self.find(key)
        return None if entry is None else self.hold(entry, seconds)

    async def drop(self, key: str) -> bool:
        """Forget the key in every tier, leased or not; whether memory had it."""
        copying = self._copying.pop(key, None)  # the copy is not kept then
        dropped = self._memory.drop(key) or copying is not None
        for tier in self._tiers:
            await tier.remove(key)
        return dropped

    def _count(self, outcome: Outcome) -> None:
        if outcome == "hit":
            self._stats.hits += 1
        else:
            self._stats.misses += 1

    def _recall(self, key: str) -> StoredEmbedding | None:
        entry = self._memory.get(key)
        if entry is not None and not entry.is_sound(self._width, self._dtype):
            self._stats.damaged += 1
            self._memory.drop(key)
            return None
        return entry or self._copying.get(key)

    def _keep_copy(self, entry: StoredEmbedding) -> None:
        if not self._memory.max_bytes and not self._tiers:
            self._stats.not_kept += 1
            return
        self._copying[entry.key] = entry
        task = asyncio.get_running_loop().create_task(self._copy(entry))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    async def _copy(self, entry: StoredEmbedding) -> None:
        copy: StoredEmbedding | None = None
        try:
            copy = await asyncio.to_thread(entry.copied)
        except (MemoryError, RuntimeError):  # torch raises the second where there is no memory
            logger.warning("an embedding was not kept: it could not be copied", exc_info=True)
            self._stats.not_kept += 1
        if self._copying.get(entry.key) is entry:
            del self._copying[entry.key]
            if copy is not None:
                self.put(copy)

    def _remember(self, entry: StoredEmbedding) -> None:
        if not self._memory.put(entry):
            self._stats.not_kept += 1

    async def _produce(
        self, key: str, compute: Callable[[], Awaitable[StoredEmbedding]]
    ) -> tuple[StoredEmbedding, Outcome]:
        found = await self._load(key)
        if found is not None:
            return found, "hit"
        computed = await compute()
        if computed.key != key:
            raise RuntimeError("the embedding of another key was computed")
        return self.put(computed), "miss"

    async def _load(self, key: str) -> StoredEmbedding | None:
        if not self._tiers:
            return None
        return await self._loads.join(key, partial(self._ask_tiers, key))

    async def _ask_tiers(self, key: str) -> StoredEmbedding | None:
        for i, tier in enumerate(self._tiers):
            entry = await tier.load(key)
            if entry is None:
                continue
            if entry.is_sound(self._width, self._dtype):
                self._remember(entry)
                for faster in self._tiers[:i]:
                    faster.save(entry)
                return entry
            self._stats.damaged += 1
            await tier.remove(key)
        return None
