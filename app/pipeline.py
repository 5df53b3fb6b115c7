"""One request, top to bottom: every item is fetched, named, looked up or encoded, and fails alone. Read this first."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from app import tracing
from app.batcher import Batcher
from app.budget import ByteBudget, Hold
from app.counting import count_item, count_unwanted, observe_decoding
from app.data_uri import decode_data_uri
from app.decode import Decoder, Kind, MediaOptions, identify
from app.errors import DeadlineExceeded, LimitExceeded, UnsupportedMedia
from app.fetch import Fetcher
from app.intake import Item, Job
from app.keys import embedding_key, preprocessing_id
from app.metrics import Metrics
from app.payload import Body, convert, embedding_json, is_ready
from app.prompts import image_prompt, video_prompt
from app.store import EmbeddingStore, Loans, StoredEmbedding
from app.ticket import Caller
from encoder import EncoderConfig

# Items of one request that are fetched or decoded, or wait decoded, at a time: bounds what a request holds in memory.
ITEMS_IN_PREPARATION = 8
MOST_LENT = 4  # results that are answered from a tower's own memory: one alone in its batch, which few are under load
HASHED_AT_ONCE_BYTES = 512 * 1024  # in 0.3 ms, as long as it takes to hand the work to a thread and back


@dataclass
class StageTimes:
    """Seconds an item spent in each stage; none in the later ones where the store had its embedding."""

    fetch_s: float = 0.0
    decode_s: float = 0.0
    queue_s: float = 0.0
    encode_s: float = 0.0


@dataclass(frozen=True)
class EncodedItem:
    """A good item.

    Attributes:
        stored: its embedding as the tower made it, and what the answer says of it.
        cache: whether the store had it.
        tensor: (m, E) in the answer's dtype, on the host; read only, other answers may share it.
        text: the same as a JSON value, where the answer is JSON.
    """

    index: int
    item: Item
    stored: StoredEmbedding
    cache: Literal["hit", "miss"]
    prompt: str
    tensor: Tensor
    text: Body | None
    media_bytes: int
    times: StageTimes

    @property
    def num_tokens(self) -> int:
        return sum(self.stored.segment_tokens)


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
        deadline_s: the service's own, for work that several requests may wait for.
        max_decoded_bytes: of all requests' decoded media that waits for a place in the queue.
        window_patches: what one request may have in the queue at a time, so that it can be larger than the queue.
        metrics: where items and their stages are counted.
    """

    def __init__(
        self,
        config: EncoderConfig,
        *,
        fetcher: Fetcher,
        decoder: Decoder,
        batcher: Batcher,
        store: EmbeddingStore,
        fingerprint: str,
        max_item_bytes: int,
        max_float_tokens: int,
        max_decoded_bytes: int,
        deadline_s: float,
        window_patches: int,
        metrics: Metrics | None = None,
    ) -> None:
        self._config = config
        self._fetcher = fetcher
        self._decoder = decoder
        self._batcher = batcher
        self._store = store
        self._fingerprint = fingerprint
        self._preprocessing = preprocessing_id(config)
        self._max_item_bytes = max_item_bytes
        self._max_float_tokens = max_float_tokens
        self._decoded = ByteBudget(max_decoded_bytes, "decoded media that waits for a place in the queue")
        self._deadline_s = deadline_s
        self._window_patches = window_patches
        self._metrics = metrics or Metrics()
        self._loans = Loans(MOST_LENT)

    async def results(self, job: Job, deadline_s: float) -> AsyncGenerator[Result, None]:
        """Yield one result per item as it finishes; closing the iterator drops what is not done.

        Args:
            deadline_s: seconds from now; items that are not done by then fail with `DeadlineExceeded`.
        Raises:
            LimitExceeded: the answer as a whole would be too large.
        """
        request = _Request(job, deadline_s, self._window_patches)
        tasks = [asyncio.create_task(self._result(index, item, request)) for index, item in enumerate(job.items)]
        kinds = {index: item.kind for index, item in enumerate(job.items)}  # of those that are not done
        given_up = False
        try:
            for done in asyncio.as_completed(tasks):
                result = await done
                if isinstance(result, FailedItem):
                    given_up = given_up or job.options.on_error == "fail"
                    if isinstance(result.error, _RequestRefused):
                        given_up = True
                        raise result.error.error
                del kinds[result.index]
                self._count(result)
                yield result
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            count_unwanted(self._metrics, kinds.values(), sibling_failed=given_up)

    def _count(self, result: Result) -> None:
        if isinstance(result, FailedItem):
            count_item(self._metrics, result.item.kind, result.error)
        else:
            count_item(self._metrics, result.stored.kind)

    async def _result(self, index: int, item: Item, request: "_Request") -> Result:
        try:
            tracing.enter_item(index)
            async with asyncio.timeout_at(request.deadline):
                return await self._encode(index, item, request)
        except TimeoutError:
            error = DeadlineExceeded(f"not done within {request.deadline_s * 1000:.0f} ms")
            return FailedItem(index, item.without_bytes(), error)
        except Exception as error:  # whatever it is, it is this item's; routes log what is a bug
            return FailedItem(index, item.without_bytes(), error)

    async def _encode(self, index: int, item: Item, request: "_Request") -> EncodedItem:
        times = StageTimes()
        # `compute` keeps the item's bytes until it is done, so fetched ones count for as long.
        with self._fetcher.hold() as hold:
            async with request.slot() as slot:
                start = time.monotonic()
                data = await self._bytes(item, hold)
                times.fetch_s = time.monotonic() - start
                media_bytes = len(data)
                at_once = media_bytes <= HASHED_AT_ONCE_BYTES
                digest = _sha256(data) if at_once else await asyncio.to_thread(_sha256, data)
                kind = identify(data, item.kind)
                key = embedding_key(
                    digest, kind, item.options, fingerprint=self._fingerprint, preprocessing=self._preprocessing
                )
                compute = partial(self._compute, key, data, kind, item.options, request, slot, times)
                del data
                stored, cache = await self._store.fetch_or_compute(key, compute)
        request.count_tokens(sum(stored.segment_tokens), self._max_float_tokens)
        if is_ready(stored.tensor, request.job.options.dtype, request.job.encoding_format):
            tensor, text = _finish(stored.tensor, request.job)
        else:
            tensor, text = await asyncio.to_thread(_finish, stored.tensor, request.job)
        return EncodedItem(
            index=index,
            item=item.without_bytes(),
            stored=stored,
            cache=cache,
            prompt=self._prompt(stored),
            tensor=tensor,
            text=text,
            media_bytes=media_bytes,
            times=times,
        )

    async def _compute(
        self,
        key: str,
        data: bytes,
        kind: Kind,
        options: MediaOptions,
        request: "_Request",
        slot: "_Slot",
        times: StageTimes,
    ) -> StoredEmbedding:
        """Decode and encode. Others may wait for the same embedding, so no one caller's deadline counts in here; it
        ends when nobody waits any more. It has the place in the queue of the request that came first."""
        start = time.monotonic()
        with tracing.stage("decode"):
            prepared = await self._decoder.prepare(data, kind, options, timeout_s=self._deadline_s)
        times.decode_s = time.monotonic() - start
        observe_decoding(self._metrics, prepared, times.decode_s)
        del data
        patches = sum(segment.num_patches for segment in prepared.segments)
        with self._decoded.hold() as waiting:
            waiting.take(sum(segment.num_bytes for segment in prepared.segments))
            await request.window.enter(patches)
        try:
            slot.release()
            encoded = await self._batcher.encode(prepared.segments, request.caller)
        finally:
            request.window.leave(patches)
        times.queue_s, times.encode_s = encoded.queue_s, encoded.encode_s
        started_s = time.monotonic() - encoded.encode_s
        tracing.stage_done("queue", started_s - encoded.queue_s, started_s)
        tracing.stage_done("encode", started_s, started_s + encoded.encode_s)
        self._metrics.stage_seconds.labels("queue").observe(encoded.queue_s)
        self._metrics.stage_seconds.labels("encode").observe(encoded.encode_s)
        lent = self._loans.take(encoded.rows)
        if lent is not None:
            return StoredEmbedding.lent(key, prepared, encoded.rows, lent)
        return await asyncio.to_thread(StoredEmbedding.of, key, prepared, encoded.rows)

    async def _bytes(self, item: Item, hold: Hold) -> bytes:
        source = item.source
        if isinstance(source, str):
            if source[:5].lower() == "data:":
                return await asyncio.to_thread(decode_data_uri, source, self._max_item_bytes)
            with self._metrics.stage_seconds.labels("fetch").time(), tracing.stage("fetch"):
                return await self._fetcher.fetch(source, hold)
        if not source:
            raise UnsupportedMedia("0 bytes, allowed: a picture or a film")
        if len(source) > self._max_item_bytes:
            raise LimitExceeded(f"{len(source)} bytes, limit {self._max_item_bytes}")
        return source

    def _prompt(self, stored: StoredEmbedding) -> str:
        if stored.kind == "video":
            return video_prompt(stored.timestamps or ())
        return image_prompt(stored.original_size, self._config)


class _RequestRefused(Exception):
    """What is wrong is the request as a whole, not one item of it."""

    def __init__(self, error: LimitExceeded) -> None:
        super().__init__(str(error))
        self.error = error


class _Request:
    """What the items of one request share. Its clock is the event loop's."""

    def __init__(self, job: Job, deadline_s: float, window_patches: int) -> None:
        self.job = job
        self.deadline_s = deadline_s
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        self.window = Window(window_patches)
        self.caller = Caller(job.options.priority)
        self._slots = asyncio.Semaphore(ITEMS_IN_PREPARATION)
        self._tokens = 0

    def slot(self) -> "_Slot":
        return _Slot(self._slots)

    def count_tokens(self, tokens: int, max_float_tokens: int) -> None:
        """Refuse numbers as text beyond a limit, before any of the text is made."""
        self._tokens += tokens
        if self.job.encoding_format == "float" and self._tokens > max_float_tokens:
            count = f"{self._tokens} tokens or more as float, limit {max_float_tokens}"
            raise _RequestRefused(LimitExceeded(f"answer of {count}; use base64 or safetensors"))


class _Slot:
    """One place among the items in preparation; may be given back before its block ends."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def __aenter__(self) -> "_Slot":
        await self._slots.acquire()
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


def _finish(embedding: Tensor, job: Job) -> tuple[Tensor, Body | None]:
    """One item's embedding in the answer's dtype, and as JSON where the answer is that."""
    tensor = convert(embedding, job.options.dtype)
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
