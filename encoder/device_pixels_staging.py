"""One buffer for the pixels of a whole batch, decoded pictures and ready patches: what one copy takes to the device.

Besides pixels it holds what the kernels must know: for each frame a row of numbers, for each program of a launch the
frame it works on, and the weights of every resize in the batch. They are about one percent of the bytes, so they travel
along with every batch, and the device keeps nothing between batches.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from encoder.picture import Picture
from encoder.resample import is_vertical_first, weights

ALIGNMENT: Final = 16  # of every part, in bytes: kernels are compiled for pointers aligned so
TILE: Final = 1024  # pixels, each channel counted, that one program of a kernel makes


class Fact(IntEnum):
    """Columns of `Parts.frames`. Offsets of pixels are in bytes, those of weights in int32.

    The first pass reads the source and makes the middle: one axis resampled, channels as they were. The second pass
    makes patches of it. Steps lead from one tap to the next in bytes.
    """

    SOURCE = 0  # offset in the buffer
    CHANNELS = 1
    ROW = 2  # bytes of a row of the source
    VERTICAL_FIRST = 3
    PREMULTIPLY = 4
    MIDDLE = 5  # offset in the scratch memory between the passes
    MIDDLE_BYTES = 6
    MIDDLE_WIDTH = 7
    WEIGHTS_1 = 8
    NUM_OUT_1 = 9
    NUM_TAPS_1 = 10
    LAST_1 = 11  # the last source position on the axis
    FIRST_TILE_1 = 12
    WEIGHTS_2 = 13
    NUM_OUT_2 = 14
    NUM_TAPS_2 = 15
    LAST_2 = 16
    FIRST_TILE_2 = 17
    WIDTH = 18  # after the resize
    HEIGHT = 19
    PATCH_COLUMNS = 20
    OUT = 21  # offset in the patches
    OUT_BYTES = 22
    MIXING = 23  # kind of table that makes RGB of the channels; 0: none


class Parts(NamedTuple):
    """Views of a staged buffer, on the host or the device."""

    frames: Tensor  # (N, len(Fact)) int64
    tiles_1: Tensor  # int32: the frame of each program of the first pass
    tiles_2: Tensor  # the same of the second pass
    weights: Tensor  # int32: tables of `resample.weights`, back to back
    rows: Tensor  # (K,) int64: where the ready patches belong
    patches: Tensor  # (K, 3, P, P) uint8, ready


@dataclass(frozen=True, eq=False)
class StagedPixels:
    """Pixels of a batch before its pictures are resized; plain, so that it can be pickled.

    Attributes:
        buffer: (bytes,) uint8: the parts in the order of `Parts`, then the source pixels.
        lengths: rows of each part, in the order of `Parts`.
        num_patches: L, ready ones and those to be made.
        middle_bytes: scratch memory between the two passes.
    """

    buffer: Tensor
    lengths: tuple[int, ...]
    num_patches: int
    patch_size: int
    middle_bytes: int

    def parts(self, buffer: Tensor) -> Parts:
        """Views of `buffer`, a copy of `self.buffer` on any device."""
        views, at = [], 0
        for length, (dtype, row, row_bytes) in zip(self.lengths, _rows_of_parts(self.patch_size), strict=True):
            views.append(buffer[at : at + length * row_bytes].view(dtype).view(length, *row))
            at += _aligned(length * row_bytes)
        return Parts(*views)


def _rows_of_parts(patch: int) -> list[tuple[torch.dtype, tuple[int, ...], int]]:
    """Element type of each part, shape of one row and its bytes."""
    return [
        (torch.int64, (len(Fact),), 8 * len(Fact)),
        (torch.int32, (), 4),
        (torch.int32, (), 4),
        (torch.int32, (), 4),
        (torch.int64, (), 8),
        (torch.uint8, (3, patch, patch), 3 * patch * patch),
    ]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def stage(segments: Sequence[Picture | Tensor], patch: int, *, pin_memory: bool = False) -> StagedPixels:
    """Lay out segments of one batch, in order: pictures, and uint8 (L_i, 3, P, P) patches that are ready.

    Args:
        pin_memory: see `pack`.
    """
    plan = _Layout(patch)
    for segment in segments:
        if isinstance(segment, Picture):
            plan.add_picture(segment)
        else:
            plan.add_patches(segment)
    return plan.staged(pin_memory=pin_memory)


class _Layout:
    """Counts while segments are added, and copies once the size is known."""

    def __init__(self, patch: int) -> None:
        self._patch = patch
        self._frames: list[dict[Fact, int]] = []
        self._sources: list[NDArray[np.uint8]] = []
        self._tables: dict[tuple[int, int], int] = {}  # (size, new size) -> offset in int32
        self._num_weights = 0
        self._ready: list[NDArray[np.uint8]] = []
        self._rows: list[NDArray[np.int64]] = []
        self._num_tiles = [0, 0]
        self._middle_bytes = 0
        self._num_patches = 0

    def add_patches(self, patches: Tensor) -> None:
        self._ready.append(patches.numpy(force=True))
        self._rows.append(np.arange(self._num_patches, self._num_patches + len(patches)))
        self._num_patches += len(patches)

    def add_picture(self, picture: Picture) -> None:
        grid = picture.grid
        for frame in picture.pixels:
            self._add_frame(frame, picture, grid.w, grid.h * grid.w)

    def _add_frame(self, source: NDArray[np.uint8], picture: Picture, columns: int, num_patches: int) -> None:
        height, width, channels = source.shape
        plan = picture.plan
        vertical_first = is_vertical_first(width, height, plan.width, plan.height)
        axes = [(width, plan.width), (height, plan.height)]
        first, second = axes[::-1] if vertical_first else axes
        middle_width = width if vertical_first else plan.width
        middle_bytes = channels * (plan.height * width if vertical_first else height * plan.width)
        out_bytes = num_patches * 3 * self._patch**2
        self._frames.append(
            {
                Fact.CHANNELS: channels,
                Fact.ROW: width * channels,
                Fact.VERTICAL_FIRST: int(vertical_first),
                Fact.PREMULTIPLY: int(picture.mode in ("LA", "RGBA") and picture.needs_resize),
                Fact.MIDDLE: self._middle_bytes,
                Fact.MIDDLE_BYTES: middle_bytes,
                Fact.MIDDLE_WIDTH: middle_width,
                Fact.WEIGHTS_1: self._table(*first),
                Fact.NUM_OUT_1: first[1],
                Fact.NUM_TAPS_1: len(weights(*first)) - 1,
                Fact.LAST_1: first[0] - 1,
                Fact.FIRST_TILE_1: self._tiles(0, middle_bytes),
                Fact.WEIGHTS_2: self._table(*second),
                Fact.NUM_OUT_2: second[1],
                Fact.NUM_TAPS_2: len(weights(*second)) - 1,
                Fact.LAST_2: second[0] - 1,
                Fact.FIRST_TILE_2: self._tiles(1, out_bytes),
                Fact.WIDTH: plan.width,
                Fact.HEIGHT: plan.height,
                Fact.PATCH_COLUMNS: columns,
                Fact.OUT: self._num_patches * 3 * self._patch**2,
                Fact.OUT_BYTES: out_bytes,
                Fact.MIXING: picture.mixing,
            }
        )
        self._sources.append(source)
        self._middle_bytes += _aligned(middle_bytes)
        self._num_patches += num_patches

    def _table(self, size: int, new_size: int) -> int:
        """Offset of its weights, in int32."""
        at = self._tables.get((size, new_size))
        if at is None:
            at = self._tables[size, new_size] = self._num_weights
            self._num_weights += weights(size, new_size).size
        return at

    def _tiles(self, launch: int, num_bytes: int) -> int:
        """Number of its first tile."""
        first = self._num_tiles[launch]
        self._num_tiles[launch] += -(-num_bytes // TILE)
        return first

    def staged(self, *, pin_memory: bool) -> StagedPixels:
        num_ready = sum(map(len, self._rows))
        lengths = (len(self._frames), *self._num_tiles, self._num_weights, num_ready, num_ready)
        layout = _rows_of_parts(self._patch)
        start = sum(_aligned(length * row_bytes) for length, (_, _, row_bytes) in zip(lengths, layout, strict=True))
        sources = [*itertools.accumulate((_aligned(source.nbytes) for source in self._sources), initial=start)]
        buffer = torch.empty(sources[-1], dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
        staged = StagedPixels(buffer, lengths, self._num_patches, self._patch, self._middle_bytes)
        self._fill(staged, sources)
        return staged

    def _fill(self, staged: StagedPixels, sources: Sequence[int]) -> None:
        parts, pixels = staged.parts(staged.buffer), staged.buffer.numpy()
        frames = parts.frames.numpy()
        for row, facts, source, at in zip(frames, self._frames, self._sources, sources, strict=False):
            row[[*facts]] = [*facts.values()]
            row[Fact.SOURCE] = at
            pixels[at : at + source.nbytes] = source.reshape(-1)
        for tiles, column in ((parts.tiles_1, Fact.FIRST_TILE_1), (parts.tiles_2, Fact.FIRST_TILE_2)):
            ends = np.append(frames[1:, column], len(tiles))
            tiles.numpy()[:] = np.repeat(np.arange(len(frames)), ends - frames[:, column])
        for (size, new_size), at in self._tables.items():
            table = weights(size, new_size)
            parts.weights.numpy()[at : at + table.size] = table.reshape(-1)
        if self._ready:
            np.concatenate(self._rows, out=parts.rows.numpy())
            np.concatenate(self._ready, out=parts.patches.numpy())
