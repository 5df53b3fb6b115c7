"""Small store entries whose every byte can be told from another entry's."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from app.store import DiskTier, EmbeddingStore, StoredEmbedding, codec
from encoder import Grid

if TYPE_CHECKING:
    from app.store.shared import SharedTier  # needs redis-py, which most tests do not

WIDTH = 8
DTYPE = torch.bfloat16


def key(number: int) -> str:
    return f"emb-{number:064x}"


def entry(number: int, rows: int = 4, dtype: torch.dtype = DTYPE) -> StoredEmbedding:
    """A picture of (rows, 8) embeddings, counting up from `number`."""
    values = torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH) + number
    return StoredEmbedding(
        key=key(number),
        tensor=values.to(dtype),
        kind="image",
        grids=(Grid(1, 2, 2 * rows),),
        segment_tokens=(rows,),
        original_size=(640, 480),
        resized_size=(28 * rows, 28),
    )


def film(number: int) -> StoredEmbedding:
    """A film of two chunks, 3 and 2 rows."""
    return StoredEmbedding(
        key=key(number),
        tensor=torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(number)).to(DTYPE),
        kind="video",
        grids=(Grid(4, 2, 6), Grid(3, 2, 4)),
        segment_tokens=(3, 2),
        original_size=(1920, 1080),
        resized_size=(84, 28),
        frame_indices=(0, 12, 25, 37, 50, 62, 75),
        start_s=(0.0, 2.0020000000000002),
        timestamps=("00:00:00.000", "00:00:02.002"),
    )


def same(one: StoredEmbedding | None, other: StoredEmbedding) -> bool:
    """Equal in every field, the tensor byte for byte."""
    if one is None:
        return False
    mine, theirs = dict(vars(one)), dict(vars(other))
    mine.pop("num_bytes", None), theirs.pop("num_bytes", None)
    a, b = mine.pop("tensor"), theirs.pop("tensor")
    bits = torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.dtype == b.dtype else False
    return bits and mine == theirs


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Work:
    """A computation that says when it starts, and ends when told to."""

    def __init__(self, number: int = 1, error: Exception | None = None) -> None:
        self.calls = 0
        self.cancelled = 0
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self._number = number
        self._error = error

    async def __call__(self) -> StoredEmbedding:
        self.calls += 1
        self.started.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._error is not None:
            raise self._error
        return entry(self._number)


def build_store(max_bytes: int = 1 << 20, **rest: object) -> EmbeddingStore:
    return EmbeddingStore(max_bytes, width=WIDTH, dtype=DTYPE, **rest)  # type: ignore[arg-type]


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def waiters(store: EmbeddingStore, work: Work, count: int) -> list["asyncio.Task[tuple[StoredEmbedding, str]]"]:
    """So many callers of key 1."""
    return [asyncio.create_task(store.fetch_or_compute(key(1), work)) for _ in range(count)]


def file_size(one: StoredEmbedding) -> int:
    """Bytes of the entry's file."""
    head, body = codec.dump(one)
    return len(head) + body.nbytes


def file_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def file_of(directory: Path, number: int) -> Path:
    return directory / f"{key(number)}.safetensors"


async def saved(tier: "DiskTier | SharedTier", *entries: StoredEmbedding) -> None:
    """Write the entries, and wait until that is done."""
    for one in entries:
        tier.save(one)
    async with asyncio.timeout(30):
        await tier._writer.idle()
