"""`StoredEmbedding`: one item's embedding, and all an answer says of it, so that a hit needs no decoding."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from app.decode import Kind, Prepared
from encoder import Grid

T = TypeVar("T")

KEY = re.compile(r"emb-[0-9a-f]{64}")

# What an entry takes beside its tensor: Python objects as tracemalloc counts them on CPython 3.11
# (700 bytes, 240 a film's segment, 36 a frame) rounded up, with room for torch's own.
ENTRY_BYTES = 2048
SEGMENT_BYTES = 256
FRAME_BYTES = 40


@dataclass(frozen=True, eq=False)
class StoredEmbedding:
    """What the store holds under one key. Nobody writes to the tensor: hits share it.

    Attributes:
        tensor: (m, E) in the dtype the tower computed in, contiguous, on the host.
        grids: one (t, h, w) per segment, in patches.
        segment_tokens: rows of each segment; they add up to m.
        original_size, resized_size, frame_indices, start_s, timestamps: as in `Prepared`.
    """

    key: str
    tensor: Tensor
    kind: Kind
    grids: tuple[Grid, ...]
    segment_tokens: tuple[int, ...]
    original_size: tuple[int, int]
    resized_size: tuple[int, int]
    frame_indices: tuple[int, ...] | None = None
    start_s: tuple[float, ...] | None = None
    timestamps: tuple[str, ...] | None = None

    @classmethod
    def of(cls, key: str, prepared: Prepared, rows: Sequence[Tensor]) -> "StoredEmbedding":
        """The entry of a computed item; it copies memory, so call it in a thread.

        Args:
            rows: (m_i, E) of each segment, in order, on the host.
        """
        return cls(
            key=key,
            tensor=_compact(rows),
            kind=prepared.kind,
            grids=tuple(segment.grid_thw for segment in prepared.segments),
            segment_tokens=tuple(own.shape[0] for own in rows),
            original_size=prepared.original_size,
            resized_size=prepared.resized_size,
            frame_indices=_frozen(prepared.frame_indices),
            start_s=_frozen(prepared.start_s),
            timestamps=_frozen(prepared.timestamps),
        )

    @cached_property
    def num_bytes(self) -> int:
        """Memory it keeps in use: all of the tensor's storage (a view keeps more than its rows), and the objects."""
        frames = len(self.frame_indices or ())
        objects = ENTRY_BYTES + SEGMENT_BYTES * len(self.grids) + FRAME_BYTES * frames
        return self.tensor.untyped_storage().nbytes() + objects

    def is_sound(self, width: int, dtype: torch.dtype) -> bool:
        """Whether the tensor is what the rest says, and what a tower of this width and dtype makes."""
        tensor = self.tensor
        return (
            tensor.dtype == dtype
            and tensor.shape == (sum(self.segment_tokens), width)
            and len(self.grids) == len(self.segment_tokens) > 0
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
        )


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, row-major and little-endian; not a copy."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


def _compact(rows: Sequence[Tensor]) -> Tensor:
    """(m, E) that shares memory with nothing: rows are views of a whole batch, which must not stay with them."""
    if len(rows) > 1:
        return torch.cat(list(rows))
    only = rows[0].contiguous()
    # Memory pinned for a copy from the device is scarce: it goes back to be used again.
    own = only.untyped_storage().nbytes() == only.nbytes and not only.is_pinned()
    return only if own else only.clone(memory_format=torch.contiguous_format)


def _frozen(values: list[T] | None) -> tuple[T, ...] | None:
    return None if values is None else tuple(values)
