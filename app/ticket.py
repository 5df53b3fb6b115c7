"""One segment that waits for its rows, and whose it is."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from app.tracing import Here, here
from encoder import Segment

Priority = Literal["interactive", "batch"]


@dataclass(frozen=True, eq=False)
class Caller:
    """Whom segments are encoded for, in one request: its segments keep their order, and it takes turns with others."""

    priority: Priority = "interactive"


@dataclass(eq=False)
class Ticket:
    """One segment in the queue, and the promise of its rows. Times are seconds of the monotonic clock.

    Attributes:
        flops: what its computation takes, to foresee when a batch ends.
        started_s: when its batch began to run, the first time if it ran more than once; 0 before that.
        losses: how often the process that ran it died.
        trace: the request it was made for, where requests are traced.
    """

    segment: Segment
    caller: Caller = field(default_factory=Caller)
    flops: int = 0
    result: "Future[Tensor]" = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    finished_s: float = 0.0
    losses: int = 0
    trace: Here | None = field(default_factory=here)

    @property
    def num_patches(self) -> int:
        return self.segment.num_patches

    @property
    def num_bytes(self) -> int:
        """Of its pixels in host memory."""
        return self.segment.num_bytes

    @property
    def abandoned(self) -> bool:
        """Nobody waits for it any more: the client left, or its deadline passed."""
        return self.result.cancelled()

    def fulfil(self, rows: Tensor) -> None:
        self.finished_s = time.monotonic()
        with suppress(InvalidStateError):  # abandoned, or failed by `close` meanwhile
            self.result.set_result(rows)

    def fail(self, error: Exception) -> None:
        with suppress(InvalidStateError):
            self.result.set_exception(error)


def count_patches(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.num_patches for ticket in tickets)


def count_bytes(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.num_bytes for ticket in tickets)


def fail_all(tickets: Iterable[Ticket], error: Exception) -> None:
    for ticket in tickets:
        ticket.fail(error)
