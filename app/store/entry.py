"""`StoredEmbedding`: one item's embedding, and all an answer says of it, so that a hit needs no decoding."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        is_lent: the tensor is memory that its tower wants back: to answer from, not to keep.
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
    is_lent: bool = False

    @classmethod
    def of(cls, key: str, prepared: Prepared, rows: Sequence[Tensor]) -> "StoredEmbedding":
        """The entry of a computed item; it copies memory, so call it in a thread.

        Args:
            rows: (m_i, E) of each segment, in order, on the host.
        """
        # Always a copy: of a tensor's memory one cannot see whose it is, and it must share none.
        return cls._of(key, prepared, rows, torch.cat(list(rows)))

    @classmethod
    def lent(cls, key: str, prepared: Prepared, rows: Sequence[Tensor], tensor: Tensor) -> "StoredEmbedding":
        """The entry of a computed item in the tower's own memory, see `Loans`; copies nothing."""
        return cls._of(key, prepared, rows, tensor, is_lent=True)

    @classmethod
    def _of(
        cls, key: str, prepared: Prepared, rows: Sequence[Tensor], tensor: Tensor, *, is_lent: bool = False
    ) -> "StoredEmbedding":
        return cls(
            key=key,
            tensor=tensor,
            kind=prepared.kind,
            grids=tuple(segment.grid_thw for segment in prepared.segments),
            segment_tokens=tuple(own.shape[0] for own in rows),
            original_size=prepared.original_size,
            resized_size=prepared.resized_size,
            frame_indices=_frozen(prepared.frame_indices),
            start_s=_frozen(prepared.start_s),
            timestamps=_frozen(prepared.timestamps),
            is_lent=is_lent,
        )

    def copied(self) -> "StoredEmbedding":
        """The same in memory of its own, which may be kept; call it in a thread."""
        return replace(self, tensor=torch.cat([self.tensor]), is_lent=False)

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


def _frozen(values: list[T] | None) -> tuple[T, ...] | None:
    return None if values is None else tuple(values)
