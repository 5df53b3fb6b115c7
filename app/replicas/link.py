"""One life of a worker: a loaded process, the memory shared with it, and the batches it has not answered."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from app.replicas.blocks import Block, Blocks, Results
from app.replicas.flat import Flat
from app.replicas.messages import Broken, Done, Failed, Share, Work
from app.replicas.process import Process
from app.tower import TowerLost
from encoder import PackedBatch

logger = logging.getLogger(__name__)

BATCHES_IN_FLIGHT: Final = 2  # one runs while the other's pixels travel
RESULTS_HELD: Final = 2  # in shared memory, by whoever reads them; more are copied


@dataclass(eq=False)
class Answer:
    """The `Pending` of a batch.

    Attributes:
        attention: the backend it ran on, once it has been waited for.
    """

    rows: "Future[Tensor]" = field(default_factory=Future)
    attention: str | None = None

    def __call__(self) -> Tensor:
        return self.rows.result()


@dataclass(eq=False)
class _Job:
    """A batch that the worker has."""

    patches: int
    batch: Block
    result: Block
    shape: tuple[int, int]
    answer: Answer = field(default_factory=Answer)


class Link:
    """Batches to one process and rows back. One thread calls `serve`; one at a time calls `submit`.

    Args:
        width, dtype: of the rows.
        on_batch: called with the attention backend of every batch that was answered.
    """

    def __init__(self, process: Process, width: int, dtype: torch.dtype, on_batch: Callable[[str], None]) -> None:
        self._process = process
        self._width = width
        self._dtype = dtype
        self._on_batch = on_batch
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._since_s = 0.0  # since when the oldest job is the oldest
        self._lost = False
        self.attention: str | None = None  # in service, as of the last answer
        self.out_of_service: dict[str, str] = {}
        # They know the process alone: in a ring of objects, large memory would wait for the garbage collector.
        self._batches = Blocks(BATCHES_IN_FLIGHT, 0, partial(_share, process), partial(_forget, process))
        self._blocks = Blocks(BATCHES_IN_FLIGHT + RESULTS_HELD, 1, partial(_share, process), partial(_forget, process))
        self._results = Results(self._blocks, RESULTS_HELD)

    @property
    def outstanding_patches(self) -> int:
        with self._changed:
            return sum(job.patches for job in self._jobs.values())

    def submit(self, batch: PackedBatch) -> Answer:
        """Hand a batch over; waits while the worker has two already.

        Raises:
            TowerLost: the process ended, or ends meanwhile.
        """
        flat = Flat(batch)
        with self._changed:
            self._changed.wait_for(lambda: self._lost or len(self._jobs) < BATCHES_IN_FLIGHT)
            if self._lost:
                raise TowerLost("the worker is gone")
        try:
            job = self._fill(batch, flat)
            number, self._num_jobs = self._num_jobs, self._num_jobs + 1
            with self._changed:
                if self._lost:
                    raise TowerLost("the worker is gone")
                if not self._jobs:
                    self._since_s = time.monotonic()
                self._jobs[number] = job
            self._process.send(Work(number, job.batch.number, flat.num_bytes, job.result.number, job.shape[0]))
        except OSError as error:
            if self._lost or isinstance(error, ConnectionError):
                raise TowerLost("the worker is gone") from error
            with self._changed:  # it was never told, so no answer would free the place
                unsent = self._jobs.pop(number, None)
                self._changed.notify_all()
            if unsent is not None:
                self._batches.give(unsent.batch)
                self._blocks.give(unsent.result)
            raise
        return job.answer

    def _fill(self, batch: PackedBatch, flat: Flat) -> _Job:
        shape = (sum(batch.num_tokens), self._width)
        block = self._batches.take(flat.num_bytes)
        try:
            result = self._blocks.take(shape[0] * shape[1] * self._dtype.itemsize)
        except BaseException:
            self._batches.give(block)
            raise
        flat.write(memoryview(block.memory))
        return _Job(sum(batch.lengths), block, result, shape)

    def serve(self, stall_s: float | None) -> str:
        """Hand out answers until the process is of no use any more; why: "device_failed", "stalled" or "crashed".

        Args:
            stall_s: seconds within which an answer must come while there are batches; None waits for ever.
        """
        while True:
            try:
                message = self._process.receive(self._patience(stall_s))
            except TimeoutError:
                if self._is_stalled(stall_s):
                    return "stalled"
                continue
            match message:
                case Done(number, attention, serving, out_of_service):
                    self.attention, self.out_of_service = serving, out_of_service
                    job = self._jobs[number]
                    rows = self._results.tensor(job.result, job.shape, self._dtype)
                    self._answered(number)
                    self._on_batch(attention)
                    job.answer.attention = attention
                    job.answer.rows.set_result(rows)
                    del job, rows  # nothing of a batch is kept while waiting for the next
                case Failed(int(number), error):
                    job = self._jobs[number]
                    self._blocks.give(job.result)
                    self._answered(number)
                    job.answer.rows.set_exception(error)
                case Broken(text):
                    logger.error("the device of worker %d failed: %s", self._process.pid, text)
                    return "device_failed"
                case _:
                    return "crashed"

    def lose(self) -> None:
        """The process is of no use any more: whoever waits for it learns so now."""
        with self._changed:
            self._lost = True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._changed.notify_all()
        for job in jobs:
            job.answer.rows.set_exception(TowerLost("the worker died with the batch"))

    def _answered(self, number: int) -> None:
        """Let the next batch in; by now there are blocks for it."""
        with self._changed:
            self._batches.give(self._jobs.pop(number).batch)
            self._since_s = time.monotonic()
            self._changed.notify_all()

    def _patience(self, stall_s: float | None) -> float | None:
        """Seconds until the oldest job is too old. Without one, until one that comes now would be."""
        if stall_s is None:
            return None
        with self._changed:
            return self._since_s + stall_s - time.monotonic() if self._jobs else stall_s

    def _is_stalled(self, stall_s: float | None) -> bool:
        with self._changed:
            return bool(self._jobs) and stall_s is not None and time.monotonic() - self._since_s >= stall_s


def _share(process: Process, number: int, descriptor: int) -> None:
    process.send(Share(number, is_new=True), descriptor)


def _forget(process: Process, number: int) -> None:
    process.send(Share(number, is_new=False))
