"""Results -> the documents of `schemas`: what an answer says, before it is written as bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.pipeline import EncodedItem, FailedItem, Result
from app.problems import describe
from app.schemas import DtypeName, Embedding, EncodeAnswer, Timing, Usage, UsageLine
from app.schemas import FailedItem as FailedEntry

T = TypeVar("T")


@dataclass(frozen=True)
class Stamp:
    """What every document of one request shares.

    Attributes:
        start_s: monotonic clock when the request arrived.
        created_s: seconds since 1970.
    """

    id: str
    model: str
    start_s: float
    created_s: int


def entry(result: Result, stamp: Stamp, dtype: DtypeName) -> Embedding | FailedEntry:
    """One element of `data`, without the embedding itself."""
    if isinstance(result, FailedItem):
        problem = describe(result.error, stamp.id, result.index)
        return FailedEntry(index=result.index, type=result.item.kind, uuid=result.item.uuid, error=problem)
    stored = result.stored
    return Embedding(
        index=result.index,
        type=stored.kind,
        uuid=result.item.uuid,
        key=stored.key,
        original_size=stored.original_size,
        resized_size=stored.resized_size,
        grid_thw=list(stored.grids),
        num_tokens=result.num_tokens,
        segment_tokens=list(stored.segment_tokens),
        dtype=dtype,
        shape=(result.tensor.shape[0], result.tensor.shape[1]),
        cache=result.cache,
        prompt=result.prompt,
        timestamps=_list(stored.start_s),
        frame_indices=_list(stored.frame_indices),
    )


def _list(values: tuple[T, ...] | None) -> list[T] | None:
    return None if values is None else list(values)


def usage(results: Sequence[Result]) -> Usage:
    good = [result for result in results if isinstance(result, EncodedItem)]
    return Usage(
        items=len(results),
        patches=sum(grid.num_patches for result in good for grid in result.stored.grids),
        tokens=sum(result.num_tokens for result in good),
        media_bytes=sum(result.media_bytes for result in good),
    )


def timing(results: Sequence[Result], stamp: Stamp) -> Timing:
    """Milliseconds of the slowest item in each stage, and of the whole request so far."""

    def slowest(stage: str) -> float:
        times = [getattr(result.times, stage) for result in results if isinstance(result, EncodedItem)]
        return _ms(max(times, default=0.0))

    return Timing(
        fetch=slowest("fetch_s"),
        decode=slowest("decode_s"),
        queue=slowest("queue_s"),
        encode=slowest("encode_s"),
        total=_ms(time.monotonic() - stamp.start_s),
    )


def answer(results: Sequence[Result], stamp: Stamp, dtype: DtypeName) -> EncodeAnswer:
    """The whole answer but for its `embedding` fields; `results` in the order of the request."""
    return EncodeAnswer(
        id=stamp.id,
        model=stamp.model,
        created=stamp.created_s,
        data=[entry(result, stamp, dtype) for result in results],
        usage=usage(results),
        timing_ms=timing(results, stamp),
    )


def usage_line(results: Sequence[Result], stamp: Stamp) -> UsageLine:
    """The last line of a streamed answer."""
    return UsageLine(
        id=stamp.id,
        model=stamp.model,
        created=stamp.created_s,
        usage=usage(results),
        timing_ms=timing(results, stamp),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
