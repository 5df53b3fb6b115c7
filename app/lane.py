"""One tower and its two threads: one packs and submits batches, the other waits for them and hands out their rows.

The next batch is submitted while one runs, so that packing, upload and launch cost the device nothing. It is closed as
late as that allows, full or not: until then it can grow, and whoever comes can still be in it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from app.batch_log import BatchLog
from app.drain_rate import DrainRate
from app.metrics import Metrics
from app.ticket import Ticket, count_patches
from app.tower import Pending, Tower, TowerLost, attention_of, is_up, takes_pinned
from app.tracing import batch_done
from encoder import EncoderConfig, PackedBatch, pack, split

IN_FLIGHT = 2  # one runs, one is ready behind it
# The next batch is to be there so much before the running one is foreseen to end: late would be an idle device.
MARGIN_S = 0.003
MARGIN_PART = 0.1  # of the running batch's time
PREPARE_S = 0.005  # packing and submitting, until it has been measured
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0  # after a tower refused a batch because it was gone
LOOK_AGAIN_S = 0.1  # for a tower that is down, while work waits


@dataclass(eq=False)
class Flight:
    """One batch between the queue and its rows. Times are seconds of the monotonic clock, 0 for not yet.

    Attributes:
        alone: it failed before, and runs with nothing else on the device.
        crowded: another batch was on the device with it, and may have taken the memory.
        submitted_s: when its tower was given it.
        started_s: when the device was free for it.
        outcome: how to wait for it, or why it could not be submitted.
    """

    tickets: list[Ticket]
    alone: bool = False
    crowded: bool = False
    packed: PackedBatch | None = None
    submitted_s: float = 0.0
    started_s: float = 0.0
    outcome: Pending | Exception | None = None

    @property
    def patches(self) -> int:
        return count_patches(self.tickets)

    @property
    def flops(self) -> int:
        return sum(ticket.flops for ticket in self.tickets)

    @property
    def was_taken(self) -> bool:
        """Its tower took it: what happened to the tower since may be this batch's doing."""
        return self.outcome is not None and not isinstance(self.outcome, Exception)

    def start(self, now_s: float) -> None:
        self.started_s = now_s
        for ticket in self.tickets:
            ticket.started_s = ticket.started_s or now_s

    def wait(self) -> list[Tensor]:
        """(m_i, E) of each ticket, or what the batch failed with."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None or self.packed is None:
            raise RuntimeError("the batch was not submitted")
        return split(self.outcome(), self.packed)


NextBatch = Callable[["Lane"], Flight | None]
"""Waits for a batch for this lane, which is then the last of its `flights`; None is the end."""

Settle = Callable[["Lane", Flight, Exception], None]
"""Decides what becomes of a batch that failed. Called with the lock held."""


class Lane:
    """Everything but the threads is looked at and changed with the lock held.

    Args:
        lock: of all lanes and their queue.
        changed: on that lock; told when a lane may take a batch that could not before.
        busy_part: of all towers; what a second of this one counts in the busy share.
    """

    def __init__(
        self,
        number: int,
        tower: Tower,
        config: EncoderConfig,
        *,
        lock: threading.RLock,
        changed: threading.Condition,
        next_batch: NextBatch,
        settle: Settle,
        metrics: Metrics,
        log: BatchLog,
        busy_part: float = 1.0,
    ) -> None:
        self.number = number
        self.flights: deque[Flight] = deque()
        self.patches_rate = DrainRate()
        self._flops_rate = DrainRate()
        self._preparing_rate = DrainRate()  # of patches
        self._pause_s = self._resumes_s = 0.0
        self._tower = tower
        self._config = config
        self._lock = lock
        self._changed = changed
        self._launched = threading.Condition(lock)
        self._next_batch = next_batch
        self._settle = settle
        self._metrics = metrics
        self._log = log
        self._busy_part = busy_part
        self._no_more = False
        self.threads = [
            threading.Thread(target=self._launch_forever, name=f"launch-{number}", daemon=True),
            threading.Thread(target=self._collect_forever, name=f"collect-{number}", daemon=True),
        ]

    # ---- when it is given the next batch

    @property
    def outstanding_patches(self) -> int:
        return sum(flight.patches for flight in self.flights)

    @property
    def busy_since_s(self) -> float | None:
        """When the batch that runs now began."""
        return self.flights[0].started_s or None if self.flights else None

    def ready_s(self, next_patches: int) -> float | None:
        """From when on it should be given a batch of so many patches; in the past if that is now, None if it is not
        known before something else happens.

        A free lane at once. A busy one just so early that the batch is submitted when the running one ends; so not
        before it was measured how fast that may be.
        """
        if not is_up(self._tower):
            return time.monotonic() + LOOK_AGAIN_S
        if not self.flights:
            return self._resumes_s
        running = self.flights[0]
        if len(self.flights) >= IN_FLIGHT or running.alone or not running.was_taken or not self._flops_rate.per_s:
            return None
        takes_s = self._flops_rate.seconds(running.flops)
        early_s = MARGIN_S + MARGIN_PART * takes_s + self._preparing_rate.seconds(next_patches, PREPARE_S)
        return running.started_s + takes_s - early_s

    def add(self, flight: Flight) -> None:
        """Give it the next batch; only its own launch thread does."""
        for other in self.flights:
            other.crowded = flight.crowded = True
        self.flights.append(flight)

    # ---- the launch thread

    def _launch_forever(self) -> None:
        try:
            while (flight := self._next_batch(self)) is not None:
                self._launch(flight)
                del flight  # nothing of a batch is kept while waiting for the next
        finally:
            with self._lock:
                self._no_more = True
                self._launched.notify()

    def _launch(self, flight: Flight) -> None:
        begin = time.monotonic()
        try:
            segments = [ticket.segment for ticket in flight.tickets]
            flight.packed = pack(segments, self._config, pin_memory=takes_pinned(self._tower))
            with self._lock:
                flight.submitted_s = time.monotonic()
                if flight is self.flights[0]:
                    flight.start(flight.submitted_s)
            self._metrics.batch_patches.observe(flight.patches)
            self._metrics.batch_segments.observe(len(flight.tickets))
            outcome: Pending | Exception = self._tower.submit(flight.packed)
        except Exception as error:  # handled where batches that fail later are
            outcome = error
        with self._lock:
            flight.outcome = outcome
            self._preparing_rate.add(flight.patches, time.monotonic() - begin)
            self._launched.notify()
            self._changed.notify_all()

    # ---- the collect thread

    def _collect_forever(self) -> None:
        while True:
            with self._lock:
                self._launched.wait_for(lambda: self._has_launched() or (self._no_more and not self.flights))
                if not self.flights:
                    return
                flight = self.flights[0]
            self._collect(flight)
            del flight

    def _has_launched(self) -> bool:
        return bool(self.flights) and self.flights[0].outcome is not None

    def _collect(self, flight: Flight) -> None:
        try:
            rows = flight.wait()
        except Exception as error:
            self._end(flight, error)
            flight.packed = flight.outcome = None  # the error may be kept, and through its traceback this batch
            return
        self._end(flight, None)
        for ticket, own in zip(flight.tickets, rows, strict=True):
            ticket.fulfil(own)

    def _end(self, flight: Flight, error: Exception | None) -> None:
        """Make room for the next batch, and count this one."""
        with self._lock:
            now = time.monotonic()
            seconds = now - flight.started_s if flight.started_s else 0.0
            self.flights.popleft()
            if self.flights and self.flights[0].submitted_s:
                self.flights[0].start(now)
            self._metrics.device_busy_seconds.inc(seconds * self._busy_part)
            if error is None:
                self.patches_rate.add(flight.patches, seconds)
                self._flops_rate.add(flight.flops, seconds)
                self._pause_s = 0.0
            else:
                if isinstance(error, TowerLost) and not flight.was_taken:
                    self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                    self._resumes_s = now + self._pause_s
                self._settle(self, flight, error)
            self._changed.notify_all()
        if error is None:
            self._count(flight, seconds)
        traces = [ticket.trace for ticket in flight.tickets]
        batch_done(traces, now - seconds, now, error, patches=flight.patches, segments=len(traces))

    def _count(self, flight: Flight, seconds: float) -> None:
        metrics, packed = self._metrics, flight.packed
        metrics.batches.labels("ok").inc()
        metrics.patches.inc(flight.patches)
        metrics.tokens.inc(sum(packed.num_tokens) if packed else 0)
        self._log.ran(
            tower=self.number,
            patches=flight.patches,
            segments=len(flight.tickets),
            attention=attention_of(flight.outcome),
            queue_s=max(ticket.started_s - ticket.submitted_s for ticket in flight.tickets),
            seconds=seconds,
        )
