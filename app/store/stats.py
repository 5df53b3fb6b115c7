"""Counters of the store as plain numbers: written on the event loop, read by whoever reports them."""

from dataclasses import dataclass


@dataclass
class TierStats:
    """One tier below memory.

    Attributes:
        hits, misses: loads that found a sound value, or none; while the tier is off nothing is looked up or counted.
        writes: entries written.
        dropped_writes: entries not written: the queue was full, the entry too large, the tier off or failing.
        damaged: values that were torn, altered or foreign, and were removed.
        evictions: values removed to stay within the bound.
        failures: operations that failed or took too long.
        bytes: size of the tier; for a shared one unknown and 0.
    """

    hits: int = 0
    misses: int = 0
    writes: int = 0
    dropped_writes: int = 0
    damaged: int = 0
    evictions: int = 0
    failures: int = 0
    bytes: int = 0


@dataclass
class StoreStats:
    """The whole store. A lookup counts once: a hit whichever tier answers it, and neither where it failed or was left.

    Attributes:
        hits, misses: lookups that were answered, and those that were not or led to a computation.
        joined: callers that found another's lookup or computation of the key under way and waited for it.
        evictions: entries removed from memory to make room.
        not_kept: entries that were not kept in memory: larger than the bound, or leases left no room.
        lease_refusals: leases that were refused for want of room.
        damaged: entries that were not of the shape or dtype they should have been, and were dropped.
        bytes, entries, leased_bytes: in memory now, of `max_bytes`.
        disk, shared: the tiers below, where there are any.
    """

    max_bytes: int
    hits: int = 0
    misses: int = 0
    joined: int = 0
    evictions: int = 0
    not_kept: int = 0
    lease_refusals: int = 0
    damaged: int = 0
    bytes: int = 0
    entries: int = 0
    leased_bytes: int = 0
    disk: TierStats | None = None
    shared: TierStats | None = None
