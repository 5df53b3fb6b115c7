"""A small pool of worker processes: an item that crashes, hangs or outgrows its decoder costs only itself.

`concurrent.futures` has a pool too, but it is dead for good after one crash and cannot end a worker that hangs.
"""

import asyncio
import logging
import signal
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from app.decode.duty import Duty, duty_of
from app.decode.facts import BadAnswer, Facts, load_facts, prepared_of
from app.decode.media import DecodeLimits, Jobs, Kind, MediaOptions, Prepared
from app.decode.messages import Introduction, Job, dump_job, load_answer
from app.decode.template_process import TemplateProcess
from app.decode.worker_process import WorkerDied, WorkerProcess
from app.errors import CorruptMedia, DeadlineExceeded, Draining, Starting
from encoder import EncoderConfig, Grid, InputError, InvalidSegment, Segment, SetupError
from encoder.picture import Picture

logger = logging.getLogger(__name__)


class _NotStarted(Exception):
    """A worker's process does not come up."""


class _Places(asyncio.Queue[WorkerProcess | None]):
    """Idle workers, the one that was at work last before the others: its memory and its caches are warm, and the first
    picture of a process takes twice as long as the third. None is a place whose worker did not start: it comes last, so
    that it is nobody's while another is idle.
    """

    _queue: deque[WorkerProcess | None]

    def _put(self, item: WorkerProcess | None) -> None:
        if item is None:
            self._queue.appendleft(item)
        else:
            self._queue.append(item)

    def _get(self) -> WorkerProcess | None:
        return self._queue.pop()


class Workers:
    """`num_workers` places for pictures, or for films; each has a worker, or gets one again soon.

    Args:
        on_restart: called when a worker is replaced, with the reason: crashed, deadline (of one item), cancelled
            (nobody waits for its item), planned (it has had its number of items) or failed (it did not start, or did
            not answer as it should).
    """

    def __init__(
        self,
        kind: Kind,
        num_workers: int,
        limits: DecodeLimits,
        config: EncoderConfig,
        template: TemplateProcess,
        on_restart: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._duty: Duty = duty_of(kind, limits, config)
        self._limits = limits
        self._config = config
        self._template = template
        self._num_workers = num_workers
        self._on_restart = on_restart
        self._num_running = self._num_waiting = 0
        self._idle = _Places()
        self._workers: list[WorkerProcess] = []
        self._renewals: set[asyncio.Task[None]] = set()
        self._closed = False
        self.sandbox: dict[str, str] = {}  # layers of the last worker that started

    @property
    def pids(self) -> list[int]:
        """Processes that are ready for items or at one."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    @property
    def jobs(self) -> Jobs:
        """Items being decoded, and waiting for a worker."""
        return Jobs(self._num_running, self._num_waiting)

    async def start(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            SetupError: one does not start.
        """
        try:
            for worker in await asyncio.gather(*(self._started() for _ in range(self._num_workers))):
                self._idle.put_nowait(worker)
        except _NotStarted as error:
            await self.close()
            raise SetupError(f"a {self._duty.noun} worker did not start") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill all workers, whatever they are doing."""
        self._closed = True
        for renewal in self._renewals:
            renewal.cancel()
        await asyncio.gather(*self._renewals, return_exceptions=True)
        await asyncio.gather(*(self._end(worker) for worker in list(self._workers)))
        self._idle.put_nowait(None)  # wakes whoever still waits for a place

    async def prepare(self, data: bytes, media_format: str, options: MediaOptions, *, defer: bool = False) -> Prepared:
        """Decode and preprocess one item; waits for a free worker first. A cancelled call ends its worker.

        Args:
            media_format: as `sniff` names it.
            defer: leave of a picture to the device what can be left to it.
        Raises:
            InputError: what the decoder refuses the item with; `CorruptMedia` too if it crashes its worker.
            DeadlineExceeded: the limit for one item passed.
            Starting: no worker could be started.
            Draining: closed.
        """
        noun = self._duty.noun
        job = Job(len(data), media_format, options, defer)
        try:
            try:
                return await self._prepare_once(data, job)
            except WorkerDied as error:
                if not error.was_killed or self._closed:
                    raise
            return await self._prepare_once(data, job)
        except WorkerDied as error:
            if self._closed:
                raise Draining("shutting down") from error
            if error.status == -signal.SIGXCPU:
                raise DeadlineExceeded(f"{noun} not decoded within {self._duty.cpu_s:g} s of CPU time") from error
            raise CorruptMedia(f"{noun} that crashed its decoder") from error
        except BadAnswer as error:
            logger.exception("a %s worker was replaced: it did not answer as our decoders do", noun)
            raise CorruptMedia(f"{noun} that crashed its decoder") from error
        except _NotStarted as error:
            logger.exception("a %s worker did not start", noun)
            raise Starting(f"{noun} decoders are restarting") from error

    async def _prepare_once(self, data: bytes, job: Job) -> Prepared:
        worker = await self._place()
        self._num_running += 1
        is_fit = False
        reason = "failed"
        try:
            worker = await self._alive(worker)
            async with asyncio.timeout(self._duty.deadline_s):
                prepared = await self._ask(worker, data, job)
            is_fit, reason = self._is_fit(worker), "planned"
            return prepared
        except InputError:
            is_fit, reason = self._is_fit(worker), "planned"
            raise
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except WorkerDied as error:
            reason = "deadline" if error.status == -signal.SIGXCPU else "crashed"
            raise
        except TimeoutError as error:
            reason = "deadline"
            noun, deadline_s = self._duty.noun, self._duty.deadline_s
            raise DeadlineExceeded(f"{noun} not decoded within {deadline_s:g} s") from error
        finally:
            self._num_running -= 1
            if is_fit or self._closed:
                self._idle.put_nowait(worker)
            else:
                self._on_restart(reason)
                self._renew(worker)

    async def _ask(self, worker: WorkerProcess, data: bytes, job: Job) -> Prepared:
        """Raises what the worker answers, and `BadAnswer` for what no worker of ours would."""
        file = worker.results.take()
        answer = await worker.ask(dump_job(job), data, file)
        try:
            result = load_answer(answer, self._duty)
        except InputError:
            worker.results.give_back(file)
            raise
        try:
            pixels, text = worker.results.read(file, result.pixel_bytes, result.facts_bytes)
        except ValueError as error:
            raise BadAnswer(str(error)) from error
        facts = load_facts(text, result.pixel_bytes, self._config.media.patch_size, self._limits)
        return prepared_of(self._duty.kind, facts, _segments(pixels, facts, self._config))

    async def _place(self) -> WorkerProcess | None:
        self._num_waiting += 1
        try:
            return await self._idle.get()
        finally:
            self._num_waiting -= 1

    def _is_fit(self, worker: WorkerProcess | None) -> bool:
        """Whether a worker that has answered as it should may go on."""
        return worker is not None and worker.num_jobs < self._duty.max_jobs

    async def _alive(self, worker: WorkerProcess | None) -> WorkerProcess:
        """The worker itself, or another in place of one that is gone (the kernel may have killed an idle one)."""
        if self._closed:
            raise Draining("shutting down")
        if worker is not None and worker.is_alive:
            return worker
        if worker is not None:
            self._on_restart("crashed")
            await self._end(worker)
        return await self._started()

    async def _started(self) -> WorkerProcess:
        if self._closed:
            raise Draining("shutting down")
        try:
            worker = WorkerProcess(self._template)
        except OSError as error:  # no process, no descriptor, no memory
            raise _NotStarted from error
        self._workers.append(worker)
        try:
            self.sandbox = await worker.introduce(Introduction(self._duty, self._limits, self._config))
        except (TimeoutError, WorkerDied) as error:
            await self._end(worker)
            raise _NotStarted from error
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.end()
        if worker in self._workers:
            self._workers.remove(worker)

    def _renew(self, worker: WorkerProcess | None) -> None:
        """Put another worker in place of this one, without keeping anybody waiting for it."""

        async def renew() -> None:
            replacement: WorkerProcess | None = None
            try:
                if worker is not None:
                    await self._end(worker)
                replacement = await self._started()
            except Draining:
                return
            except _NotStarted:
                logger.exception("a %s worker did not start", self._duty.noun)  # the next item tries again
            finally:
                self._idle.put_nowait(replacement)

        renewal = asyncio.get_running_loop().create_task(renew())
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)


def _segments(pixels: NDArray[np.uint8], facts: Facts, config: EncoderConfig) -> list[Segment]:
    """Views of the pixels, one for each grid. Raises `BadAnswer` for deferred ones that do not fit their facts."""
    grids = [Grid(*grid) for grid in facts.grids]
    if facts.deferred is not None:
        try:
            segment = Segment.deferred(Picture.from_facts(facts.deferred, pixels.data, config))
        except InvalidSegment as error:
            raise BadAnswer(str(error)) from error
        if [segment.grid_thw] != grids or facts.deferred["is_film"]:
            raise BadAnswer("deferred pixels of another grid")
        return [segment]
    patches = torch.from_numpy(pixels).view(-1, 3, config.media.patch_size, config.media.patch_size)
    chunks = torch.split(patches, [grid.num_patches for grid in grids])
    return [Segment(chunk, grid) for chunk, grid in zip(chunks, grids, strict=True)]
