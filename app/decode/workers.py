"""A small pool of film worker processes: a film that crashes, hangs or outgrows its decoder costs only itself.

`concurrent.futures` has a pool too, but it is dead for good after one crash and cannot end a worker that hangs.
"""

import asyncio
import logging
from collections.abc import Callable

import torch

from app.decode.film_facts import FilmFacts
from app.decode.film_messages import dump_job, load_answer, load_facts
from app.decode.media import DecodeLimits, Jobs, MediaOptions
from app.decode.memory_files import fill, map_result, memory_file
from app.decode.worker_process import WorkerDied, WorkerProcess
from app.errors import CorruptMedia, DeadlineExceeded, Draining, Starting
from encoder import EncoderConfig, Grid, InputError, Segment, SetupError

logger = logging.getLogger(__name__)


class _NotStarted(Exception):
    """A worker's process does not come up."""


class FilmWorkers:
    """`num_workers` places for films; each has a worker, or gets one again soon.

    Args:
        on_restart: called when a worker is replaced, with the reason: crashed, deadline (of one film), cancelled
            (nobody waits for its film), planned (it has had its number of films) or failed (it did not start).
    """

    def __init__(
        self,
        num_workers: int,
        limits: DecodeLimits,
        config: EncoderConfig,
        on_restart: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._limits = limits
        self._config = config
        self._num_workers = num_workers
        self._on_restart = on_restart
        self._num_running = self._num_waiting = 0
        self._idle: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()  # None: a place whose worker did not start
        self._workers: list[WorkerProcess] = []
        self._renewals: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Processes alive now."""
        return [worker.process.pid for worker in self._workers]

    @property
    def jobs(self) -> Jobs:
        """Films being decoded, and waiting for a worker."""
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
            raise SetupError("a film worker did not start") from error
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

    async def prepare(self, data: bytes, options: MediaOptions) -> tuple[FilmFacts, list[Segment]]:
        """Decode and preprocess one film; waits for a free worker first. A cancelled call ends its worker.

        Raises:
            InputError: what `prepare_film` refuses the film with; `CorruptMedia` too if it crashes its worker.
            DeadlineExceeded: `film_deadline_s` passed.
            Starting: no worker could be started.
            Draining: closed.
        """
        try:
            try:
                return await self._prepare_once(data, options)
            except WorkerDied as error:
                if not error.was_killed or self._closed:
                    raise
            return await self._prepare_once(data, options)
        except WorkerDied as error:
            if self._closed:
                raise Draining("shutting down") from error
            raise CorruptMedia("film that crashed its decoder") from error
        except _NotStarted as error:
            logger.exception("a film worker did not start")
            raise Starting("film decoders are restarting") from error

    async def _prepare_once(self, data: bytes, options: MediaOptions) -> tuple[FilmFacts, list[Segment]]:
        worker = await self._place()
        self._num_running += 1
        is_fit = False
        reason = "failed"
        try:
            worker = await self._alive(worker)
            with memory_file("film") as film, memory_file("result") as result:
                await fill(film, data)
                async with asyncio.timeout(self._limits.film_deadline_s):
                    answer = await worker.ask(dump_job(options), film, result)
                prepared = _read_result(result, load_answer(answer), self._config.media.patch_size)
            is_fit, reason = self._is_fit(worker), "planned"
            return prepared
        except InputError:
            is_fit, reason = self._is_fit(worker), "planned"
            raise
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except WorkerDied:
            reason = "crashed"
            raise
        except TimeoutError as error:
            reason = "deadline"
            raise DeadlineExceeded(f"film not decoded within {self._limits.film_deadline_s:g} s") from error
        finally:
            self._num_running -= 1
            if is_fit or self._closed:
                self._idle.put_nowait(worker)
            else:
                self._on_restart(reason)
                self._renew(worker)

    async def _place(self) -> WorkerProcess | None:
        self._num_waiting += 1
        try:
            return await self._idle.get()
        finally:
            self._num_waiting -= 1

    def _is_fit(self, worker: WorkerProcess | None) -> bool:
        """Whether a worker that has answered as it should may go on."""
        return worker is not None and worker.num_jobs < self._limits.film_worker_max_jobs

    async def _alive(self, worker: WorkerProcess | None) -> WorkerProcess:
        """The worker itself, or another in place of one that is gone (the kernel may have killed an idle one)."""
        if self._closed:
            raise Draining("shutting down")
        if worker is not None and worker.process.poll() is None:
            return worker
        if worker is not None:
            self._on_restart("crashed")
            await self._end(worker)
        return await self._started()

    async def _started(self) -> WorkerProcess:
        try:
            worker = WorkerProcess()
        except OSError as error:  # no process, no descriptor, no memory
            raise _NotStarted from error
        self._workers.append(worker)
        try:
            await worker.introduce(self._limits, self._config)
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
            except _NotStarted:
                logger.exception("a film worker did not start")  # the next film tries again
            finally:
                self._idle.put_nowait(replacement)

        renewal = asyncio.get_running_loop().create_task(renew())
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)


def _read_result(descriptor: int, pixel_bytes: int, patch_size: int) -> tuple[FilmFacts, list[Segment]]:
    """Facts and segments from a result's memory file; the segments are views of it."""
    memory = map_result(descriptor)
    facts = load_facts(memory[pixel_bytes:])
    grids = [Grid(*grid) for grid in facts.grids]
    pixels = torch.frombuffer(memory, dtype=torch.uint8, count=pixel_bytes).view(-1, 3, patch_size, patch_size)
    if pixels.shape[0] != sum(grid.num_patches for grid in grids):
        raise RuntimeError(f"film worker sent {pixel_bytes} bytes of pixels for grids {facts.grids}")
    chunks = torch.split(pixels, [grid.num_patches for grid in grids])
    return facts, [Segment(chunk, grid) for chunk, grid in zip(chunks, grids, strict=True)]
