"""The tier in memory against a model that keeps a plain list and counts everything anew."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.errors import LimitExceeded, Overloaded
from app.store.memory import MemoryTier
from tests.stored import Clock, entry, key

NUMBERS = st.integers(0, 7)
ROWS = [1 + 20 * number for number in range(8)]  # entries of eight sizes, 16 bytes a row
UNIT = entry(0, ROWS[0]).num_bytes


@dataclass
class Kept:
    """One line of the model."""

    number: int
    num_bytes: int
    lease_ends_s: float | None = None


class LruWithLeases(RuleBasedStateMachine):
    @initialize(bound=st.integers(0, 6 * UNIT))
    def build(self, bound: int) -> None:
        self.bound = bound
        self.clock = Clock()
        self.tier = MemoryTier(bound, self.clock)
        self.kept: list[Kept] = []  # least recently used first
        self.evictions = 0

    def now_ended(self) -> None:
        ended = [one for one in self.kept if one.lease_ends_s is not None and one.lease_ends_s <= self.clock.now]
        for one in sorted(ended, key=lambda one: (one.lease_ends_s, key(one.number))):
            one.lease_ends_s = None
            self.use(one)

    def use(self, one: Kept) -> None:
        self.kept.remove(one)
        self.kept.append(one)

    def find(self, number: int) -> Kept | None:
        return next((one for one in self.kept if one.number == number), None)

    def leased(self) -> int:
        return sum(one.num_bytes for one in self.kept if one.lease_ends_s is not None)

    def add(self, number: int, num_bytes: int, lease_ends_s: float | None) -> None:
        while sum(one.num_bytes for one in self.kept) + num_bytes > self.bound:
            self.kept.remove(next(one for one in self.kept if one.lease_ends_s is None))
            self.evictions += 1
        self.kept.append(Kept(number, num_bytes, lease_ends_s))

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        self.now_ended()
        one = self.find(number)
        found = self.tier.get(key(number))
        assert (found is not None) == (one is not None)
        if one is not None and found is not None:
            assert found.key == key(number)
            self.use(one)

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        self.now_ended()
        new = entry(number, ROWS[number])
        one = self.find(number)
        fits = new.num_bytes <= self.bound - self.leased()
        assert self.tier.put(new) is (one is not None or fits)
        if one is not None:
            self.use(one)
        elif fits:
            self.add(number, new.num_bytes, None)

    @rule(number=NUMBERS, seconds=st.integers(1, 20))
    def hold(self, number: int, seconds: int) -> None:
        self.now_ended()
        new = entry(number, ROWS[number])
        one = self.find(number)
        ends_s = self.clock.now + seconds
        if one is not None:
            one.lease_ends_s = max(ends_s, one.lease_ends_s or 0)
            assert self.tier.hold(new, seconds) == one.lease_ends_s
            self.use(one)
        elif new.num_bytes > self.bound:
            with pytest.raises(LimitExceeded):
                self.tier.hold(new, seconds)
        elif new.num_bytes > self.bound - self.leased():
            with pytest.raises(Overloaded) as refused:
                self.tier.hold(new, seconds)
            first = min(one.lease_ends_s for one in self.kept if one.lease_ends_s is not None)
            assert refused.value.retry_after_s == first - self.clock.now
        else:
            assert self.tier.hold(new, seconds) == ends_s
            self.add(number, new.num_bytes, ends_s)

    @rule(number=NUMBERS)
    def drop(self, number: int) -> None:
        self.now_ended()
        one = self.find(number)
        assert self.tier.drop(key(number)) is (one is not None)
        if one is not None:
            self.kept.remove(one)

    @rule(seconds=st.integers(0, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def end_leases(self) -> None:
        self.now_ended()
        self.tier.end_leases()
        assert self.tier.leased_bytes == self.leased()

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.bytes == sum(one.num_bytes for one in self.kept) <= self.bound
        assert self.leased() <= self.tier.leased_bytes <= self.tier.bytes  # leases that are over may not be ended yet
        assert len(self.tier) == len(self.kept)
        assert self.tier.evictions == self.evictions


TestLruWithLeases = LruWithLeases.TestCase
