"""`Decoder`: one item's bytes to segments, in worker processes: some for pictures, others for films."""

import asyncio
from collections.abc import Callable
from typing import Final

from app.decode.film_decord import check_distribution
from app.decode.media import DecodeLimits, Jobs, Kind, MediaOptions, Prepared
from app.decode.sniff import settle_kind, sniff
from app.decode.template_process import TemplateProcess
from app.decode.workers import Workers
from app.errors import DeadlineExceeded
from encoder import EncoderConfig

_KINDS: Final[tuple[Kind, ...]] = ("image", "video")


class Decoder:
    """Owns the processes that decode. Pictures never wait for films, nor films for pictures.

    Attributes:
        defers_preprocessing: whether pictures are only decoded, and made patches of on the device; films never are,
            since their frames are larger than their patches.

    Args:
        picture_workers: pictures decoded at a time.
        film_workers: films decoded at a time.
        on_worker_restart: called with the kind and the reason, see `Workers`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        limits: DecodeLimits,
        *,
        picture_workers: int,
        film_workers: int,
        on_worker_restart: Callable[[Kind, str], None] = lambda kind, reason: None,
    ) -> None:
        self.defers_preprocessing = False
        self._template = TemplateProcess()
        numbers: dict[Kind, int] = {"image": picture_workers, "video": film_workers}

        def workers(kind: Kind) -> Workers:
            return Workers(
                kind, numbers[kind], limits, config, self._template, lambda reason: on_worker_restart(kind, reason)
            )

        self._workers = {kind: workers(kind) for kind in _KINDS}

    async def start(self) -> None:
        """Start all workers and wait until they are ready; call on the event loop's thread.

        Raises:
            SetupError: decord is missing or the wrong one, or a worker does not start.
        """
        check_distribution()
        starts = [asyncio.ensure_future(workers.start()) for workers in self._workers.values()]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await self.close()
            await asyncio.gather(*starts, return_exceptions=True)
            raise

    async def close(self) -> None:
        """End all workers, whatever they are doing, and refuse what still waits."""
        await asyncio.gather(*(workers.close() for workers in self._workers.values()))
        await asyncio.to_thread(self._template.close)

    @property
    def sandbox(self) -> dict[Kind, dict[str, str]]:
        """What is in force of each layer of the workers' sandbox; empty before one has started."""
        return {kind: workers.sandbox for kind, workers in self._workers.items()}

    def pids(self, kind: Kind) -> list[int]:
        """Worker processes alive now."""
        return self._workers[kind].pids

    def jobs(self, kind: Kind) -> Jobs:
        """What is being decoded now, and what waits for it."""
        return self._workers[kind].jobs

    async def prepare(
        self, data: bytes, kind: Kind | None, options: MediaOptions, *, timeout_s: float | None = None
    ) -> Prepared:
        """Decode and preprocess one item. A cancelled call ends the worker that is at it.

        Args:
            data: the file's bytes, which alone decide its format.
            kind: what the caller says it is; None lets the bytes decide, an animation being a picture.
            timeout_s: seconds this call may take, waiting included.
        Raises:
            UnsupportedMedia: no format we read, or the other kind than the caller says.
            LimitExceeded: too many pixels, frames, seconds or patches, or too much memory.
            CorruptMedia: it does not decode, or not completely, or crashes its decoder.
            DeadlineExceeded: `timeout_s` or the limit for one item passed.
            Starting: no worker could be started.
            Draining: closed.
        """
        found = sniff(data)
        settled = settle_kind(found, kind)
        try:
            async with asyncio.timeout(timeout_s):
                defer = self.defers_preprocessing and settled == "image"
                return await self._workers[settled].prepare(data, found.format, options, defer=defer)
        except TimeoutError as error:
            raise DeadlineExceeded("not decoded before the request's deadline") from error
