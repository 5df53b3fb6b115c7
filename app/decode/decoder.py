"""`Decoder`: one item's bytes to segments, pictures in threads and films in worker processes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final

from app.decode.film_decord import check_distribution
from app.decode.media import DecodeLimits, Jobs, Kind, MediaOptions, Prepared
from app.decode.picture import prepare_picture
from app.decode.picture_threads import PictureThreads
from app.decode.sniff import settle_kind, sniff
from app.decode.workers import FilmWorkers
from app.errors import DeadlineExceeded
from encoder import EncoderConfig

_CLOSE_TIMEOUT_S: Final = 2.0


class Decoder:
    """Owns the threads and processes that decode.

    Args:
        picture_threads: pictures decoded at a time; Pillow lets go of the GIL.
        film_workers: films decoded at a time.
        on_film_worker_restart: called with the reason, see `FilmWorkers`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        limits: DecodeLimits,
        *,
        picture_threads: int,
        film_workers: int,
        on_film_worker_restart: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._config = config
        self._limits = limits
        self._threads = PictureThreads(picture_threads)
        self._pictures: set[Future[Prepared]] = set()  # handed to the threads and not done
        self._workers = FilmWorkers(film_workers, limits, config, on_film_worker_restart)

    async def start(self) -> None:
        """Start the film workers and wait until they are ready; call on the event loop's thread.

        Raises:
            SetupError: decord is missing or the wrong one, or a worker does not start.
        """
        check_distribution()
        await self._workers.start()

    async def close(self) -> None:
        """End all workers and refuse what still waits; pictures being decoded get 2 s and are then left behind."""
        await self._workers.close()
        await asyncio.to_thread(self._threads.close, _CLOSE_TIMEOUT_S)

    @property
    def stuck_s(self) -> float:
        """Seconds that the oldest picture being decoded has taken so far; 0 if there is none.

        Films are not counted: they have their own deadline, which ends their worker.
        """
        return self._threads.oldest_s

    @property
    def film_worker_pids(self) -> list[int]:
        """Film worker processes alive now."""
        return self._workers.pids

    def jobs(self, kind: Kind) -> Jobs:
        """What is being decoded now, and what waits for it."""
        if kind == "video":
            return self._workers.jobs
        pictures = self._pictures.copy()  # at once: threads take theirs out of it at any time
        running = sum(picture.running() for picture in pictures)
        return Jobs(running, waiting=len(pictures) - running)

    async def prepare(
        self, data: bytes, kind: Kind | None, options: MediaOptions, *, timeout_s: float | None = None
    ) -> Prepared:
        """Decode and preprocess one item.

        Args:
            data: the file's bytes, which alone decide its format.
            kind: what the caller says it is; None lets the bytes decide, an animation being a picture.
            timeout_s: seconds this call may take, waiting included.
        Raises:
            UnsupportedMedia: no format we read, or the other kind than the caller says.
            LimitExceeded: too many pixels, frames, seconds or patches.
            CorruptMedia: it does not decode, or not completely.
            DeadlineExceeded: `timeout_s` or the limit for one film passed.
            Starting: no film worker could be started.
            Draining: closed.
        """
        found = sniff(data)
        settled = settle_kind(found, kind)
        try:
            async with asyncio.timeout(timeout_s):
                if settled == "video":
                    return await self._film(data, options)
                return await self._picture(
                    partial(prepare_picture, data, found.format, options, self._limits, self._config)
                )
        except TimeoutError as error:
            raise DeadlineExceeded("not decoded before the request's deadline") from error

    async def _picture(self, prepare: Callable[[], Prepared]) -> Prepared:
        picture = self._threads.submit(prepare)
        self._pictures.add(picture)
        picture.add_done_callback(self._pictures.discard)
        return await asyncio.wrap_future(picture)

    async def _film(self, data: bytes, options: MediaOptions) -> Prepared:
        facts, segments = await self._workers.prepare(data, options)
        return Prepared(
            kind="video",
            segments=segments,
            original_size=facts.original_size,
            resized_size=facts.resized_size,
            frame_indices=facts.frame_indices,
            start_s=facts.start_s,
            timestamps=facts.timestamps,
            decode_s=facts.decode_s,
            preprocess_s=facts.preprocess_s,
        )
