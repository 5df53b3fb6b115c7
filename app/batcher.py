"""Segments of all callers -> batches on the device: one bounded queue, one batch prepared while one runs."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from app.errors import Draining, LimitExceeded, Overloaded
from app.metrics import Metrics
from encoder import DeviceFailed, EncoderConfig, PackedBatch, Segment, pack, split

logger = logging.getLogger(__name__)

Run = Callable[[PackedBatch], Tensor]  # (L, 3, P, P) patches -> (M, E) on the host


@dataclass(eq=False)
class Ticket:
    """One segment in the queue, and the promise of its rows. Times are seconds of the monotonic clock."""

    segment: Segment
    result: "Future[Tensor]" = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.monotonic)
    started_s: float = 0.0
    finished_s: float = 0.0

    @property
    def num_patches(self) -> int:
        return self.segment.num_patches

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


@dataclass(frozen=True)
class Encoded:
    """Rows of one item's segments, in order, and the slowest segment's times."""

    rows: list[Tensor]  # (m_i, E) each
    queue_s: float
    encode_s: float


def take(waiting: deque[Ticket], budget: int) -> list[Ticket]:
    """Remove the next batch from the queue: arrival order, at most `budget` patches, abandoned tickets dropped."""
    batch: list[Ticket] = []
    while waiting and (waiting[0].abandoned or waiting[0].num_patches <= budget):
        ticket = waiting.popleft()
        if not ticket.abandoned:
            batch.append(ticket)
            budget -= ticket.num_patches
    return batch


class Batcher:
    """Owns the queue and two threads: `pack` lays the next batch out, `device` runs batches, so neither waits for the
    other. A free device starts at once with what is there; while it is busy, the prepared batch grows with what
    arrives. Nothing waits on a timer.

    Args:
        run: the tower; called from the device thread only.
        max_batch_patches: at least the largest legal segment, so that every segment fits a batch.
        max_queued_patches: beyond, `encode` raises `Overloaded`.
        metrics: where batches are counted.
    """

    def __init__(
        self,
        run: Run,
        config: EncoderConfig,
        *,
        max_batch_patches: int,
        max_queued_patches: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._max_batch = max_batch_patches
        self._max_queued = max_queued_patches
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._packing: list[Ticket] = []
        self._prepared: list[Ticket] = []
        self._packed: PackedBatch | Exception | None = None
        self._running: list[Ticket] = []
        self._closed = False
        self._rate = DrainRate()
        self._metrics = metrics or Metrics()
        self.failure: DeviceFailed | None = None  # set once the device is unusable
        self.busy_since_s: float | None = None  # monotonic start of the batch that runs now
        self._threads = [
            threading.Thread(target=self._pack_forever, name="pack", daemon=True),
            threading.Thread(target=self._run_forever, name="device", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_patches(self) -> int:
        """Patches that somebody waits for and that have not started."""
        with self._changed:
            return self._queued()

    async def encode(self, segments: Sequence[Segment]) -> Encoded:
        """Encode one item's segments; they may be spread over several batches. Cancelling drops what has not started.

        Raises:
            LimitExceeded: a segment is larger than a batch.
            Overloaded: the queue is full; nothing of the item was queued.
            Draining: the batcher is closed.
            EncoderError: a segment failed, alone in its batch.
        """
        tickets = [Ticket(segment) for segment in segments]
        self._submit(tickets)
        try:
            rows = await asyncio.gather(*(asyncio.wrap_future(ticket.result) for ticket in tickets))
        finally:
            for ticket in tickets:
                ticket.result.cancel()
        return Encoded(
            rows,
            queue_s=max((ticket.started_s - ticket.submitted_s for ticket in tickets), default=0.0),
            encode_s=max((ticket.finished_s - ticket.started_s for ticket in tickets), default=0.0),
        )

    @property
    def live_threads(self) -> int:
        """Of the two; fewer while the batcher is open means that one died of a bug."""
        return sum(thread.is_alive() for thread in self._threads)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop both threads; what waits fails with `Draining`, and so does the batch that runs now if it takes longer
        than `timeout_s`. A device cannot be interrupted: its thread is then left to the end of the process."""
        with self._changed:
            self._closed = True
            left = [*self._waiting, *self._packing, *self._prepared]
            self._waiting.clear()
            self._packing, self._prepared, self._packed = [], [], None
            self._changed.notify_all()
        error = Draining("the service is shutting down")
        _fail_all(left, error)
        for thread in self._threads:
            thread.join(timeout_s)
        _fail_all(self._running, error)

    def _queued(self) -> int:
        return sum(_patches(tickets) for tickets in (self._waiting, self._packing, self._prepared))

    def _submit(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            if ticket.num_patches > self._max_batch:
                raise LimitExceeded(f"segment of {ticket.num_patches} patches, limit {self._max_batch} (one batch)")
        cost = _patches(tickets)
        with self._changed:
            if self._closed:
                raise Draining("the service is shutting down")
            queued = self._queued()
            # An item larger than the whole bound is taken when nothing else waits: it could never be, otherwise.
            if queued and queued + cost > self._max_queued:
                raise Overloaded(
                    f"{queued} patches are waiting and the item has {cost}, limit {self._max_queued}",
                    retry_after_s=self._rate.seconds(queued),
                )
            self._waiting.extend(tickets)
            self._changed.notify_all()

    # ---- the pack thread

    def _room(self) -> int:
        return self._max_batch - _patches(self._prepared)

    def _can_pack(self) -> bool:
        return bool(self._waiting) and (self._waiting[0].abandoned or self._waiting[0].num_patches <= self._room())

    def _pack_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._can_pack())
                if self._closed:
                    return
                before = self._prepared
                self._packing = take(self._waiting, self._room())
                batch = before + self._packing
            packed: PackedBatch | Exception | None = None
            while self._packing:
                packed = self._pack(batch)
                with self._changed:
                    if self._prepared is before:
                        self._prepared, self._packed, self._packing = batch, packed, []
                        self._changed.notify_all()
                    else:  # the device took `before` as it was: what was to join it becomes a batch of its own
                        before = self._prepared
                        batch = list(self._packing)
            del before, batch, packed  # nothing of a batch is kept while waiting for the next

    def _pack(self, batch: list[Ticket]) -> PackedBatch | Exception:
        try:
            return pack([ticket.segment for ticket in batch], self._config)
        except Exception as error:
            return error  # handled where batches that fail are: on the device thread

    # ---- the device thread

    def _run_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._packed is not None)
                if self._closed:
                    return
                batch, packed = self._prepared, self._packed
                self._prepared, self._packed = [], None
                self._changed.notify_all()
            if packed is not None:
                self._run_batch(batch, packed)
            del batch, packed

    def _run_batch(self, batch: list[Ticket], packed: PackedBatch | Exception) -> None:
        """Run one batch and keep its members' promises; one that fails is halved until the guilty segment is alone."""
        self._running = live = [ticket for ticket in batch if not ticket.abandoned]
        if len(live) < len(batch):  # nothing is computed for nobody
            batch, packed = live, self._pack(live)
        if not batch:
            return
        start = self.busy_since_s = time.monotonic()
        for ticket in batch:
            ticket.started_s = ticket.started_s or start
        try:
            if isinstance(packed, Exception):
                raise packed
            rows = self._run_packed(packed)
        except DeviceFailed as error:
            self.failure = error
            self._metrics.batches.labels("failed").inc()
            _fail_all(batch, error)
        except Exception as error:
            self._halve(batch, error)
        else:
            self._metrics.batches.labels("ok").inc()
            self._rate.add(_patches(batch), time.monotonic() - start)
            for ticket, own in zip(batch, rows, strict=True):
                ticket.fulfil(own)
        finally:
            self.busy_since_s = None
            self._running = []

    def _run_packed(self, packed: PackedBatch) -> list[Tensor]:
        metrics, start = self._metrics, time.monotonic()
        metrics.batch_patches.observe(sum(packed.lengths))
        metrics.batch_segments.observe(len(packed))
        try:
            rows = split(self._run(packed), packed)
        finally:
            metrics.device_busy_seconds.inc(time.monotonic() - start)
        metrics.patches.inc(sum(packed.lengths))
        metrics.tokens.inc(sum(packed.num_tokens))
        return rows

    def _halve(self, batch: list[Ticket], error: Exception) -> None:
        if len(batch) == 1:
            self._metrics.batches.labels("failed").inc()
            batch[0].fail(error)
            return
        self._metrics.batches.labels("halved").inc()
        logger.warning("batch of %d segments failed (%s): running its halves", len(batch), type(error).__name__)
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            if self.failure is None:
                self._run_batch(half, self._pack(half))
            else:
                _fail_all(half, self.failure)


class DrainRate:
    """Patches per second that batches finish at, as a moving average; `Retry-After` is computed from it."""

    def __init__(self) -> None:
        self._per_s: float | None = None

    def add(self, patches: int, seconds: float) -> None:
        rate = patches / max(seconds, 1e-6)
        self._per_s = rate if self._per_s is None else 0.8 * self._per_s + 0.2 * rate

    def seconds(self, patches: int) -> float:
        """Time to drain so many patches; one second where nothing has been measured yet."""
        return patches / self._per_s if self._per_s else 1.0


def _fail_all(tickets: Iterable[Ticket], error: Exception) -> None:
    for ticket in tickets:
        ticket.fail(error)


def _patches(tickets: Iterable[Ticket]) -> int:
    return sum(ticket.num_patches for ticket in tickets if not ticket.abandoned)
