"""Segments of all callers -> batches on the devices: one bounded queue in front of any number of towers."""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from app.batch_log import BatchLog
from app.errors import Draining, Overloaded
from app.fair_queue import FairQueue
from app.lane import LOOK_AGAIN_S, Flight, Lane
from app.metrics import Metrics
from app.ticket import Caller, Ticket, count_bytes, count_patches, fail_all
from app.tower import Tower, TowerLost
from encoder import DeviceFailed, DeviceOutOfMemory, EncoderConfig, Segment, flops

SHARE_PATCHES = 4096  # of work split among free towers: a smaller share would be mostly overhead
MAX_LOSSES = 2
LONGEST_WAIT_S = 60.0  # at a time: threads cannot wait for as long as a slow device may be foreseen to take
MAX_BATCH_BYTES = 1 << 30  # of one batch's pixels: pictures that the device resizes may have 20 times their patches'
MAX_QUEUED_BYTES = 4 << 30
BATCH_CLASS_BOUND = 0.75  # of the queue: the batch class is never why an interactive caller is refused


@dataclass(frozen=True)
class Encoded:
    """Rows of one item's segments, in order, and the slowest segment's times."""

    rows: list[Tensor]  # (m_i, E) each
    queue_s: float
    encode_s: float


class Batcher:
    """Owns the queue, and a lane of two threads for each tower.

    A free tower starts at once with what is there; behind a running batch another is submitted shortly before it is
    foreseen to end. Of several towers that could take the next batch, the one with the fewest patches outstanding does.

    Args:
        towers: used each by one thread at a time for submitting and another one for waiting.
        max_batch_patches: of several segments; a larger one has a batch of its own.
        max_queued_patches, max_queued_bytes: beyond, `encode` raises `Overloaded`. The bytes are those of pixels.
        metrics: where batches are counted.
    """

    def __init__(
        self,
        towers: Sequence[Tower],
        config: EncoderConfig,
        *,
        max_batch_patches: int,
        max_queued_patches: int,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._max_batch = max_batch_patches
        self._max_queued = max_queued_patches
        self._max_queued_bytes = max_queued_bytes
        # One caller's backlog counts for half the queue at most (a film may have more patches than all of it): others
        # do not wait behind it, so they need not be refused for it.
        self._counted_share = max(max_batch_patches, max_queued_patches // 2)
        self._queue = FairQueue(max_batch_patches, MAX_BATCH_BYTES)
        self._metrics = metrics or Metrics()
        self._log = BatchLog()
        self._closed = False
        self.failure: DeviceFailed | None = None  # set once a device is unusable
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._lanes = [
            Lane(
                number,
                tower,
                config,
                lock=self._lock,
                changed=self._changed,
                next_batch=self._next_batch,
                settle=self._settle,
                metrics=self._metrics,
                log=self._log,
                busy_part=1 / len(towers),
            )
            for number, tower in enumerate(towers)
        ]
        self._threads = [thread for lane in self._lanes for thread in lane.threads]
        for thread in self._threads:
            thread.start()

    # ---- what it says of itself

    @property
    def queued_patches(self) -> int:
        """Patches that somebody waits for and that no tower has been given."""
        with self._lock:
            return self._queue.patches

    @property
    def queued_bytes(self) -> int:
        """Of the pixels of those segments, in host memory."""
        with self._lock:
            return self._queue.num_bytes

    @property
    def busy_since_s(self) -> float | None:
        """Monotonic start of the batch that has been running longest, None if none runs."""
        with self._lock:
            return min((since for lane in self._lanes if (since := lane.busy_since_s) is not None), default=None)

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    @property
    def live_threads(self) -> int:
        """Fewer than all while the batcher is open means that one died of a bug."""
        return sum(thread.is_alive() for thread in self._threads)

    # ---- for the event loop

    async def encode(self, segments: Sequence[Segment], caller: Caller | None = None) -> Encoded:
        """Encode one item's segments; they may be spread over several batches. Cancelling drops what has not started.

        Args:
            caller: the same for all items of one request; None is a caller of its own.
        Raises:
            Overloaded: the queue is full; nothing of the item was queued.
            Draining: the batcher is closed.
            EncoderError: a segment failed, alone in its batch.
        """
        caller = caller or Caller()
        tickets = [Ticket(segment, caller, flops(segment.grid_thw, self._config)) for segment in segments]
        self._submit(caller, tickets)
        try:
            rows = await asyncio.gather(*(asyncio.wrap_future(ticket.result) for ticket in tickets))
        except BaseException:
            self._drop(caller, tickets)
            raise
        queue_s = max((ticket.started_s - ticket.submitted_s for ticket in tickets), default=0.0)
        self._metrics.queue_wait_seconds.labels(caller.priority).observe(queue_s)
        return Encoded(
            rows,
            queue_s=queue_s,
            encode_s=max((ticket.finished_s - ticket.started_s for ticket in tickets), default=0.0),
        )

    def _submit(self, caller: Caller, tickets: list[Ticket]) -> None:
        cost, cost_bytes = count_patches(tickets), count_bytes(tickets)
        part = 1.0 if caller.priority == "interactive" else BATCH_CLASS_BOUND
        bound, bound_bytes = int(part * self._max_queued), int(part * self._max_queued_bytes)
        with self._lock:
            if self._closed:
                raise Draining("the service is shutting down")
            if self.failure is not None:
                raise DeviceFailed(str(self.failure))
            queued = self._queue.patches
            # An item larger than the whole bound is taken when nothing else waits: it could never be, otherwise.
            if queued and queued + cost > bound and self._counted_with(caller, cost) > bound:
                raise self._overloaded(f"{queued} patches are waiting and the item has {cost}, limit {bound}")
            queued_bytes = self._queue.num_bytes
            if queued and queued_bytes + cost_bytes > bound_bytes:
                raise self._overloaded(
                    f"{queued_bytes} bytes of pixels are waiting and the item has {cost_bytes}, limit {bound_bytes}"
                )
            self._queue.add(caller, tickets)
            # Who waits for the time to close a batch reckons with how much there is to pack: roughly will do.
            if queued.bit_length() != self._queue.patches.bit_length():
                self._changed.notify_all()

    def _overloaded(self, text: str) -> Overloaded:
        rate = sum(lane.patches_rate.per_s for lane in self._lanes)
        return Overloaded(text, retry_after_s=self._queue.patches / rate if rate else 1.0)

    def _counted_with(self, caller: Caller, cost: int) -> int:
        """Patches that would wait, with no caller counted for more than its share."""
        own, share = self._queue.patches_of(caller), self._counted_share
        return self._queue.patches_counting_at_most(share) - min(own, share) + min(own + cost, share)

    def _drop(self, caller: Caller, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            ticket.result.cancel()
        with self._lock:
            self._metrics.dropped_patches.inc(self._queue.drop_abandoned(caller))

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop all threads; what waits fails with `Draining`, and so does what runs now if it takes longer than
        `timeout_s`. A device cannot be interrupted: its threads are then left to the end of the process."""
        error = Draining("the service is shutting down")
        with self._lock:
            self._closed = True
            left = self._queue.clear()
            self._changed.notify_all()
        fail_all(left, error)
        give_up_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        with self._lock:
            running = [ticket for lane in self._lanes for flight in lane.flights for ticket in flight.tickets]
        fail_all(running, error)

    # ---- for the lanes

    def _next_batch(self, lane: Lane) -> Flight | None:
        with self._lock:
            while not self._closed:
                wait_s = self._wait_s(lane)
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                flight = self._take()
                if flight.tickets:  # else all that waited had been abandoned
                    lane.add(flight)
                    self._changed.notify_all()
                    return flight
            return None

    def _wait_s(self, lane: Lane) -> float | None:
        """Until this lane may take the next batch, as things are: 0 is now, None is not before they change."""
        # What failed runs with nothing else on the device, so no tower gets more until one is free for it.
        if not self._queue or (self._queue.has_again and lane.flights):
            return None
        patches = min(self._queue.patches, self._max_batch)
        now = time.monotonic()
        ready_s = lane.ready_s(patches)
        if ready_s is None:
            return None
        if ready_s > now:
            return min(ready_s - now, LONGEST_WAIT_S)
        for other in self._lanes:
            other_ready_s = other.ready_s(patches)
            if other_ready_s is not None and other_ready_s <= now and _load(other) < _load(lane):
                return LOOK_AGAIN_S  # its tower may go down before it looks
        return 0.0

    def _take(self) -> Flight:
        if self._queue.has_again:
            return Flight(self._queue.take_again(), alone=True)
        now = time.monotonic()
        free = sum(not lane.flights and (lane.ready_s(0) or 0.0) <= now for lane in self._lanes)
        if free < 2:
            return Flight(self._queue.take())
        return Flight(self._queue.take(max(-(-self._queue.patches // free), SHARE_PATCHES)))

    def _settle(self, lane: Lane, flight: Flight, error: Exception) -> None:
        """Run a failed batch again, as a whole or in halves, until the guilty segment is alone; or give it up."""
        batch = [ticket for ticket in flight.tickets if not ticket.abandoned]
        outcome, then = "failed", "given up"
        if self._closed:
            fail_all(batch, Draining("the service is shutting down"))
        elif isinstance(error, DeviceFailed):
            self.failure = error
            fail_all([*batch, *self._queue.clear()], error)
        elif isinstance(error, TowerLost):
            for ticket in batch:
                ticket.losses += flight.was_taken
            hopeless = [ticket for ticket in batch if ticket.losses >= MAX_LOSSES]
            fail_all(hopeless, DeviceFailed(f"the process that ran it died {MAX_LOSSES} times"))
            again = [ticket for ticket in batch if ticket.losses < MAX_LOSSES]
            self._queue.put_back(again)
            if again:
                outcome, then = "retried", "run again"
        elif len(flight.tickets) > 1:  # one that left meanwhile may be the guilty one
            self._queue.put_back(batch[: len(batch) // 2])
            self._queue.put_back(batch[len(batch) // 2 :])
            outcome, then = "halved", "its halves are run"
        elif isinstance(error, DeviceOutOfMemory) and flight.crowded and batch:
            self._queue.put_back(batch)
            outcome, then = "retried", "run again, alone on the device"
        else:
            fail_all(batch, error)
        self._metrics.batches.labels(outcome).inc()
        self._log.failed(tower=lane.number, segments=len(flight.tickets), error=error, then=then)


def _load(lane: Lane) -> tuple[int, int]:
    return lane.outstanding_patches, lane.number
