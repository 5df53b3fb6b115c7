"""One request, top to bottom: every item is fetched, decoded, encoded and named, and fails alone. Read this first."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.batcher import Batcher
from app.data_uri import decode_data_uri
from app.decode import Decoder, Prepared
from app.errors import DeadlineExceeded, LimitExceeded, UnsupportedMedia
from app.fetch import Fetcher
from app.intake import Item, Job
from app.keys import embedding_key, preprocessing_id
from app.payload import Body, convert, embedding_json
from app.prompts import image_prompt, video_prompt
from encoder import EncoderConfig, Grid, num_tokens

# Items of one request that are fetched or decoded, or wait decoded, at a time: bounds what a request holds in memory.
ITEMS_IN_PREPARATION = 8


@dataclass(frozen=True)
class StageTimes:
    """Seconds an item spent in each stage."""

    fetch_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True)
class EncodedItem:
    """A good item: what the answer says of it, and its embedding."""

    index: int
    item: Item
    prepared: Prepared
    key: str
    prompt: str
    grids: list[Grid]
    segment_tokens: list[int]
    tensor: Tensor  # (sum of segment_tokens, E) in the answer's dtype, on the host
    text: Body | None  # the same as a JSON value, where the answer is JSON
    media_bytes: int
    times: StageTimes


@dataclass(frozen=True)
class FailedItem:
    """An item that failed alone."""

    index: int
    item: Item
    error: Exception


Result = EncodedItem | FailedItem


class Pipeline:
    """Everything between a parsed request and its results.

    Args:
        fingerprint: of the model, part of every key.
        window_patches: what one request may have in the queue at a time, so that it can be larger than the queue.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        fetcher: Fetcher,
        decoder: Decoder,
        batcher: Batcher,
        fingerprint: str,
        max_item_bytes: int,
        window_patches: int,
    ) -> None:
        self._config = config
        self._fetcher = fetcher
        self._decoder = decoder
        self._batcher = batcher
        self._fingerprint = fingerprint
        self._preprocessing = preprocessing_id(config)
        self._max_item_bytes = max_item_bytes
        self._window_patches = window_patches

    async def results(self, job: Job, deadline_s: float) -> AsyncGenerator[Result, None]:
        """Yield one result per item as it finishes; closing the iterator drops what is not done.

        Args:
            deadline_s: seconds from now; items that are not done by then fail with `DeadlineExceeded`.
        """
        deadline = asyncio.get_running_loop().time() + deadline_s
        slots = asyncio.Semaphore(ITEMS_IN_PREPARATION)
        window = Window(self._window_patches)
        tasks = [
            asyncio.create_task(self._result(index, item, job, deadline, deadline_s, slots, window))
            for index, item in enumerate(job.items)
        ]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _result(
        self,
        index: int,
        item: Item,
        job: Job,
        deadline: float,
        deadline_s: float,
        slots: asyncio.Semaphore,
        window: "Window",
    ) -> Result:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._encode(index, item, job, deadline, slots, window)
        except TimeoutError:
            return FailedItem(index, item, DeadlineExceeded(f"not done within {deadline_s * 1000:.0f} ms"))
        except Exception as error:  # whatever it is, it is this item's; routes log what is a bug
            return FailedItem(index, item, error)

    async def _encode(
        self, index: int, item: Item, job: Job, deadline: float, slots: asyncio.Semaphore, window: "Window"
    ) -> EncodedItem:
        async with slots:
            start = time.monotonic()
            data = await self._bytes(item)
            fetched = time.monotonic()
            digest = await asyncio.to_thread(_sha256, data)
            remaining = deadline - asyncio.get_running_loop().time()
            prepared = await self._decoder.prepare(data, item.kind, item.options, timeout_s=remaining)
            decoded = time.monotonic()
            media_bytes = len(data)
            del data
            patches = sum(segment.num_patches for segment in prepared.segments)
            await window.enter(patches)
        try:
            encoded = await self._batcher.encode(prepared.segments)
        finally:
            window.leave(patches)
        tensor, text = await asyncio.to_thread(_finish, encoded.rows, job)
        grids = [segment.grid_thw for segment in prepared.segments]
        return EncodedItem(
            index=index,
            item=item,
            # The pixels are done with; the answer needs only what describes them.
            prepared=replace(prepared, segments=[]),
            key=embedding_key(
                digest,
                prepared.kind,
                item.options,
                fingerprint=self._fingerprint,
                preprocessing=self._preprocessing,
            ),
            prompt=self._prompt(prepared),
            grids=grids,
            segment_tokens=[num_tokens(grid, self._config) for grid in grids],
            tensor=tensor,
            text=text,
            media_bytes=media_bytes,
            times=StageTimes(fetched - start, decoded - fetched, encoded.queue_s, encoded.encode_s),
        )

    async def _bytes(self, item: Item) -> bytes:
        source = item.source
        if isinstance(source, str):
            if source[:5].lower() == "data:":
                return await asyncio.to_thread(decode_data_uri, source, self._max_item_bytes)
            return await self._fetcher.fetch(source)
        if not source:
            raise UnsupportedMedia("0 bytes, allowed: a picture or a film")
        if len(source) > self._max_item_bytes:
            raise LimitExceeded(f"{len(source)} bytes, limit {self._max_item_bytes}")
        return source

    def _prompt(self, prepared: Prepared) -> str:
        if prepared.kind == "video":
            return video_prompt(prepared.timestamps or [])
        return image_prompt(prepared.original_size, self._config)


def _finish(rows: list[Tensor], job: Job) -> tuple[Tensor, Body | None]:
    """One item's rows in the answer's dtype, and as JSON where the answer is that."""
    tensor = convert(rows[0] if len(rows) == 1 else torch.cat(rows), job.options.dtype)
    return tensor, None if job.encoding_format == "safetensors" else embedding_json(tensor, job.encoding_format)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Window:
    """A weighted semaphore: at most `capacity` inside at a time, or one entry that is larger."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside = 0
        self._left = asyncio.Event()

    async def enter(self, weight: int) -> None:
        while self._inside and self._inside + weight > self._capacity:
            self._left.clear()
            await self._left.wait()
        self._inside += weight

    def leave(self, weight: int) -> None:
        self._inside -= weight
        self._left.set()
