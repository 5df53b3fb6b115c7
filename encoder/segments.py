"""The ragged layout: a `Segment` is the patches that attend to each other, a `PackedBatch` many back to back."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoder.config import EncoderConfig
from encoder.errors import InvalidSegment
from encoder.grid import Grid, check_grid, num_tokens

MAX_NORMALIZED = 1e4  # far beyond any mean and deviation in use, far below what overflows inside the tower


@dataclass(frozen=True, eq=False, init=False)
class Segment:
    """One image, or one chunk of video frames.

    Attributes:
        pixel_values: (L, 3, P, P) patches in (frame, row, column) order; float32 already normalised to [-1, 1], or
            uint8 not yet normalised.
        grid_thw: (t, h, w) in patches with t*h*w = L.
    Raises:
        InvalidSegment: a shape, dtype or grid that do not fit each other.
    """

    pixel_values: Tensor
    grid_thw: Grid

    def __init__(self, pixel_values: Tensor, grid_thw: Sequence[int]) -> None:
        grid = _grid(grid_thw)
        if not isinstance(pixel_values, Tensor) or pixel_values.layout != torch.strided or pixel_values.is_meta:
            raise InvalidSegment(f"pixel_values must be a dense torch tensor, got {type(pixel_values).__name__}")
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise InvalidSegment(f"pixel_values must be (L, 3, P, P) patches, got {shape}")
        if pixel_values.dtype not in (torch.float32, torch.uint8):
            raise InvalidSegment(f"pixel_values must be float32 or uint8, got {pixel_values.dtype}")
        if min(grid) < 1 or shape[0] != grid.num_patches:
            raise InvalidSegment(f"grid_thw {tuple(grid)} does not describe {shape[0]} patches")
        object.__setattr__(self, "pixel_values", pixel_values)
        object.__setattr__(self, "grid_thw", grid)

    @property
    def num_patches(self) -> int:
        return self.grid_thw.num_patches


def _grid(grid_thw: Any) -> Grid:
    """Three integers of any kind (Python's, numpy's, a row of an integer tensor) as a `Grid`."""
    try:
        values = grid_thw.tolist() if isinstance(grid_thw, Tensor) else list(grid_thw)
        sides: list[Any] = [value.item() if isinstance(value, Tensor | np.ndarray) else value for value in values]
        if any(isinstance(side, bool | np.bool_) for side in sides):
            raise TypeError
        t, h, w = (operator.index(side) for side in sides)
    except (TypeError, ValueError) as error:
        raise InvalidSegment(f"grid_thw must be three integers (t, h, w), got {grid_thw!r}") from error
    return Grid(t, h, w)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Segments back to back, with no padding between them.

    Attributes:
        pixel_values: (L, 3, P, P), all uint8 if every segment is, else float32 normalised.
        grids: N host triples.
        num_tokens: output rows of each segment.
    """

    pixel_values: Tensor
    grids: list[Grid]
    num_tokens: list[int]

    @property
    def lengths(self) -> list[int]:
        """Patches of each segment."""
        return [grid.num_patches for grid in self.grids]

    @property
    def cu_seqlens(self) -> list[int]:
        """(N + 1) patch offsets from 0 to L; the engine puts them on the device as int32."""
        return list(accumulate(self.lengths, initial=0))

    def __len__(self) -> int:
        return len(self.grids)


def pack(segments: Iterable[Segment], config: EncoderConfig) -> PackedBatch:
    """Lay segments back to back, in order.

    Raises:
        InvalidSegment: a segment this model cannot take, or pixels that are not finite; names its position.
    """
    segments = list(segments)
    patch = config.vision.patch_size
    for i, segment in enumerate(segments):
        if not isinstance(segment, Segment):
            raise InvalidSegment(f"segments[{i}] must be a Segment, got {type(segment).__name__}")
        check_grid(segment.grid_thw, config, f"segments[{i}]: grid_thw")
        if segment.pixel_values.shape[-1] != patch:
            raise InvalidSegment(
                f"segments[{i}]: patches of {segment.pixel_values.shape[-1]} pixels a side, the model has {patch}"
            )
        if segment.pixel_values.is_floating_point():
            largest = float(segment.pixel_values.abs().amax())
            if not largest <= MAX_NORMALIZED:  # also true for NaN
                raise InvalidSegment(
                    f"segments[{i}]: pixel_values holds values that are not finite or not normalised "
                    f"(magnitude {largest:g}, allowed up to {MAX_NORMALIZED:g})"
                )
    pixels = [segment.pixel_values for segment in segments]
    if not all(p.dtype == torch.uint8 for p in pixels):
        pixels = [normalize(p, config) for p in pixels]
    grids = [segment.grid_thw for segment in segments]
    empty = torch.empty((0, 3, patch, patch), dtype=torch.uint8, device="cpu")
    return PackedBatch(
        pixel_values=torch.cat(pixels) if pixels else empty,
        grids=grids,
        num_tokens=[num_tokens(grid, config) for grid in grids],
    )


def split(embeddings: Tensor, batch: PackedBatch) -> list[Tensor]:
    """(M, E) -> one (m_i, E) view per segment; the inverse of `pack` on the output side."""
    return list(torch.split(embeddings, batch.num_tokens)) if len(batch) else []


def normalize(pixel_values: Tensor, config: EncoderConfig) -> Tensor:
    """uint8 (L, 3, P, P) -> float32 in [-1, 1], step by step as the reference; float32 input is returned unchanged."""
    if pixel_values.dtype != torch.uint8:
        return pixel_values
    levels, mean, inverse_std = _constants(config.media.image_mean, config.media.image_std, pixel_values.device)
    return pixel_values.to(torch.float32).div_(levels).sub_(mean).mul_(inverse_std)


@lru_cache(maxsize=16)
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Number of levels, mean and reciprocal deviation of each channel, float32 on the device.

    The reciprocal is rounded to float32 before the product, as numpy does it in the reference. The number of levels is
    a tensor, not 255.0: on a GPU PyTorch replaces division by a number with a product, rounded otherwise.
    """
    levels = torch.full((), 255.0, dtype=torch.float32, device=device)
    means, deviations = torch.tensor(mean, dtype=torch.float32), torch.tensor([1.0 / s for s in std])
    return levels, means.view(1, 3, 1, 1).to(device), deviations.view(1, 3, 1, 1).to(device)
