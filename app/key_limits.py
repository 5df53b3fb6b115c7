"""How many requests one caller may send: a rate with a burst, and a number in flight. Used from the event loop only."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.errors import Overloaded
from app.key_file import Limit

RATE, IN_FLIGHT = "requests_per_s", "max_requests"


class TokenBucket:
    """Fills at `rate` tokens a second up to `size`; begins full.

    Args:
        clock: seconds; must never go back.
    """

    def __init__(self, rate: float, size: float, clock: Callable[[], float]) -> None:
        self.rate, self.size = rate, size
        self._clock = clock
        self._tokens, self._at_s = size, clock()

    def take(self) -> float:
        """Take one token and return 0, or take none and return the seconds until there is one."""
        now_s = self._clock()
        self._tokens = min(self.size, self._tokens + (now_s - self._at_s) * self.rate)
        self._at_s = now_s
        # A caller that waits exactly as long as it was told is not refused for the last bit of a float.
        if self._tokens >= 1 - 1e-9:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self.rate

    def resize(self, rate: float, size: float) -> None:
        self.rate, self.size = rate, size


class Caller:
    """The holder of one key, and what it is doing at the moment; lives as long as its name is in the file.

    Args:
        count_refusal: told which of the two limits a request was refused for.
    """

    def __init__(
        self, name: str, limit: Limit, clock: Callable[[], float], count_refusal: Callable[[str], object]
    ) -> None:
        self.name = name
        self.in_flight = 0
        self._count_refusal = count_refusal
        self._clock = clock
        self._bucket: TokenBucket | None = None
        self.limit = Limit()
        self.set_limit(limit)

    def set_limit(self, limit: Limit) -> None:
        """From now on; a bucket that is there keeps its tokens, so that reading the file again gives no new burst."""
        self.limit = limit
        if limit.requests_per_s is None:
            self._bucket = None
            return
        size = limit.burst or max(1, math.ceil(limit.requests_per_s))
        if self._bucket is None:
            self._bucket = TokenBucket(limit.requests_per_s, size, self._clock)
        else:
            self._bucket.resize(limit.requests_per_s, size)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request in. One that is refused here costs no token; one that fails later has had its token.

        Raises:
            Overloaded: it is one too many for this caller.
        """
        most = self.limit.max_requests
        if most is not None and self.in_flight >= most:
            self._count_refusal(IN_FLIGHT)
            raise Overloaded(f"{self.in_flight} requests of this key are in flight, limit {most}")
        wait_s = self._bucket.take() if self._bucket else 0.0
        if wait_s:
            self._count_refusal(RATE)
            raise Overloaded(f"this key may send {self.limit.requests_per_s:g} requests/s", retry_after_s=wait_s)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
