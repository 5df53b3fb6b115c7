"""A small pool of film worker processes: a film that crashes, hangs or outgrows its decoder costs only itself.

`concurrent.futures` has a pool too, but it is dead for good after one crash and cannot end a worker that hangs.
"""

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

from app.decode.film_facts import FilmFacts
from app.decode.film_messages import MESSAGE_BYTES, READY, dump_job, load_answer, load_facts
from app.decode.media import DecodeLimits, MediaOptions
from app.decode.memory_files import fill, map_result, memory_file
from app.errors import CorruptMedia, DeadlineExceeded, Draining
from encoder import EncoderConfig, Grid, InputError, Segment

logger = logging.getLogger(__name__)

_START_TIMEOUT_S: Final = 120.0  # imports torch, on a busy machine
_KEPT_VARIABLES: Final = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")  # no key or token reaches a worker


class _WorkerDied(Exception):
    """The process went away instead of answering."""


class _Worker:
    """One process and the socket to it."""

    def __init__(self) -> None:
        """Start it. The kernel ties its life to the calling thread, which must be the one that runs the event loop."""
        self.num_jobs = 0
        self._asking = asyncio.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path)}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - nothing of a request is in its arguments
                [sys.executable, "-P", "-m", "app.decode.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the service
            )

    async def introduce(self, limits: DecodeLimits, config: EncoderConfig) -> None:
        """Hand over what stays the same for all films, and wait until it is ready for the first."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            if await self._ask(pickle.dumps((limits, config)), []) != READY:
                raise _WorkerDied

    async def ask(self, job: bytes, film: int, result: int) -> bytes:
        self.num_jobs += 1
        return await self._ask(job, [film, result])

    async def _ask(self, message: bytes, descriptors: list[int]) -> bytes:
        async with self._asking:
            try:
                socket.send_fds(self._channel, [message], descriptors)
                answer = await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_BYTES)
            except OSError as error:
                raise _WorkerDied from error
        if not answer:
            raise _WorkerDied
        return answer

    async def end(self) -> None:
        """Kill it and wait until it is gone and whoever waited for its answer knows."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        async with self._asking:
            self._channel.close()


class FilmWorkers:
    """`num_workers` places for films; each has a worker, or gets one again soon."""

    def __init__(self, num_workers: int, limits: DecodeLimits, config: EncoderConfig) -> None:
        self._limits = limits
        self._config = config
        self._num_workers = num_workers
        self._idle: asyncio.Queue[_Worker | None] = asyncio.Queue()  # None: a place whose worker did not start
        self._workers: list[_Worker] = []
        self._renewals: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Processes alive now."""
        return [worker.process.pid for worker in self._workers]

    async def start(self) -> None:
        """Start all workers and wait until they are ready."""
        try:
            for worker in await asyncio.gather(*(self._started() for _ in range(self._num_workers))):
                self._idle.put_nowait(worker)
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
            Draining: closed.
        """
        worker = await self._idle.get()
        is_fit = False
        try:
            worker = await self._alive(worker)
            with memory_file("film") as film, memory_file("result") as result:
                await fill(film, data)
                async with asyncio.timeout(self._limits.film_deadline_s):
                    answer = await worker.ask(dump_job(options), film, result)
                prepared = _read_result(result, load_answer(answer), self._config.media.patch_size)
            is_fit = self._is_fit(worker)
            return prepared
        except InputError:
            is_fit = self._is_fit(worker)
            raise
        except _WorkerDied as error:
            if self._closed:
                raise Draining("shutting down") from error
            raise CorruptMedia("film that crashed its decoder") from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"film not decoded within {self._limits.film_deadline_s:g} s") from error
        finally:
            if is_fit or self._closed:
                self._idle.put_nowait(worker)
            else:
                self._renew(worker)

    def _is_fit(self, worker: _Worker | None) -> bool:
        """Whether a worker that has answered as it should may go on."""
        return worker is not None and worker.num_jobs < self._limits.film_worker_max_jobs

    async def _alive(self, worker: _Worker | None) -> _Worker:
        """The worker itself, or another in place of one that is gone (the kernel may have killed an idle one)."""
        if self._closed:
            raise Draining("shutting down")
        if worker is not None and worker.process.poll() is None:
            return worker
        if worker is not None:
            await self._end(worker)
        return await self._started()

    async def _started(self) -> _Worker:
        worker = _Worker()
        self._workers.append(worker)
        try:
            await worker.introduce(self._limits, self._config)
        except (TimeoutError, _WorkerDied) as error:
            await self._end(worker)
            raise RuntimeError("a film worker did not start") from error
        except BaseException:
            await self._end(worker)
            raise
        return worker

    async def _end(self, worker: _Worker) -> None:
        await worker.end()
        if worker in self._workers:
            self._workers.remove(worker)

    def _renew(self, worker: _Worker | None) -> None:
        """Put another worker in place of this one, without keeping anybody waiting for it."""

        async def renew() -> None:
            replacement: _Worker | None = None
            try:
                if worker is not None:
                    await self._end(worker)
                replacement = await self._started()
            except (OSError, RuntimeError):
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
