"""Entries in memory: least recently used first out, never more bytes than the bound, none out while leased."""

import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import LimitExceeded, Overloaded
from app.store.entry import StoredEmbedding


@dataclass(frozen=True)
class Lease:
    """Until when an entry stays for certain.

    Attributes:
        ends_s: on the monotonic clock, which alone decides.
        expires_at: the same in seconds since 1970, for clients.
    """

    ends_s: float
    expires_at: float


@dataclass(eq=False, slots=True)
class _Slot:
    entry: StoredEmbedding
    num_bytes: int
    lease_ends_s: float = -math.inf


class MemoryTier:
    """Byte-bounded LRU with leases; every operation is O(1) or, with a lease, O(log n). One thread only.

    When a lease ends, its entry counts as used at that moment.

    Args:
        max_bytes: bound on the sum of `num_bytes`; 0 keeps nothing.
        clock: seconds, monotonic.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.leased_bytes = 0
        self.evictions = 0
        self._clock = clock
        self._free: OrderedDict[str, _Slot] = OrderedDict()  # least recently used first
        self._leased: dict[str, _Slot] = {}
        # (end, key), earliest first. An item that is not its slot's end any more (extended, dropped) means nothing.
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._free) + len(self._leased)

    def get(self, key: str) -> StoredEmbedding | None:
        """The entry, which becomes the most recently used."""
        self.end_leases()
        slot = self._leased.get(key)
        if slot is None:
            slot = self._free.get(key)
            if slot is None:
                return None
            self._free.move_to_end(key)
        return slot.entry

    def put(self, entry: StoredEmbedding) -> bool:
        """Keep the entry if room can be made for it. One that is there already stays, and counts as used."""
        if self.get(entry.key) is not None:
            return True
        if entry.num_bytes > self.max_bytes - self.leased_bytes:
            return False
        self._free[entry.key] = self._add(entry)
        return True

    def hold(self, entry: StoredEmbedding, seconds: float) -> float:
        """Keep the entry, and for so long at least; a lease that ends later stays.

        Returns:
            End of the lease, on the clock.
        Raises:
            LimitExceeded, Overloaded: as `check_room`; what was there stays.
        """
        ends_s = self._clock() + seconds
        if self.get(entry.key) is None:
            self.check_room(entry.num_bytes)
            slot = self._leased[entry.key] = self._add(entry)
            self.leased_bytes += slot.num_bytes
        elif (free := self._free.pop(entry.key, None)) is not None:
            slot = self._leased[entry.key] = free
            self.leased_bytes += slot.num_bytes
        else:
            slot = self._leased[entry.key]
        if ends_s > slot.lease_ends_s:
            slot.lease_ends_s = ends_s
            self._schedule(ends_s, entry.key)
        return slot.lease_ends_s

    def check_room(self, num_bytes: int) -> None:
        """Whether an entry of that size could be held now.

        Raises:
            LimitExceeded: it never can.
            Overloaded: leases fill the store; `retry_after_s` is when the next one ends.
        """
        self.end_leases()
        if num_bytes > self.max_bytes:
            raise LimitExceeded(f"the embedding takes {num_bytes} bytes, the store holds {self.max_bytes}")
        if num_bytes > self.max_bytes - self.leased_bytes:
            raise Overloaded(
                f"leases hold {self.leased_bytes} bytes of the store and the embedding takes {num_bytes}, "
                f"limit {self.max_bytes}",
                retry_after_s=self._ends[0][0] - self._clock(),
            )

    def drop(self, key: str) -> bool:
        """Remove the entry, leased or not; whether there was one."""
        self.end_leases()
        slot = self._leased.pop(key, None)
        if slot is not None:
            self.leased_bytes -= slot.num_bytes
        else:
            slot = self._free.pop(key, None)
        if slot is None:
            return False
        self.bytes -= slot.num_bytes
        return True

    def end_leases(self) -> None:
        """Let go of the leases that are over; every operation begins with it."""
        now = self._clock()
        while self._ends:
            ends_s, key = self._ends[0]
            slot = self._leased.get(key)
            current = slot is not None and slot.lease_ends_s == ends_s
            if current and ends_s > now:
                return
            heapq.heappop(self._ends)
            if slot is not None and current:
                del self._leased[key]
                self.leased_bytes -= slot.num_bytes
                slot.lease_ends_s = -math.inf
                self._free[key] = slot

    def _add(self, entry: StoredEmbedding) -> _Slot:
        """Count the entry in, evicting what must go; the caller has checked that it can fit."""
        slot = _Slot(entry, entry.num_bytes)
        while self.bytes + slot.num_bytes > self.max_bytes:
            _, evicted = self._free.popitem(last=False)
            self.bytes -= evicted.num_bytes
            self.evictions += 1
        self.bytes += slot.num_bytes
        return slot

    def _schedule(self, ends_s: float, key: str) -> None:
        heapq.heappush(self._ends, (ends_s, key))
        if len(self._ends) > 2 * len(self._leased) + 64:  # more than half mean nothing
            self._ends = [(slot.lease_ends_s, key) for key, slot in self._leased.items()]
            heapq.heapify(self._ends)
