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
from encoder.device_pixels_plain import expand
from encoder.device_pixels_staging import StagedPixels, stage
from encoder.errors import InvalidSegment
from encoder.grid import Grid, check_grid, num_tokens
from encoder.picture import Picture

MAX_NORMALIZED = 1e4  # far beyond any mean and deviation in use, far below what overflows inside the tower


@dataclass(frozen=True, eq=False, init=False)
class Segment:
    """One image, or one chunk of video frames.

    Attributes:
        pixel_values: (L, 3, P, P) patches in (frame, row, column) order; float32 already normalised to [-1, 1], or
            uint8 not yet normalised. No rows where there is a picture instead.
        grid_thw: (t, h, w) in patches with t*h*w = L.
        picture: a decoded picture or chunk whose patches are made on the device.
    Raises:
        InvalidSegment: a shape, dtype or grid that do not fit each other.
    """

    pixel_values: Tensor
    grid_thw: Grid
    picture: Picture | None = None

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

    @classmethod
    def deferred(cls, picture: Picture) -> "Segment":
        """A segment whose patches are not made yet."""
        segment = cls.__new__(cls)
        object.__setattr__(segment, "pixel_values", _no_patches(picture.plan.patch_size))
        object.__setattr__(segment, "grid_thw", picture.grid)
        object.__setattr__(segment, "picture", picture)
        return segment

    @property
    def num_patches(self) -> int:
        return self.grid_thw.num_patches

    @property
    def num_bytes(self) -> int:
        """Of its pixels in host memory: a deferred picture may hold many times those of its patches."""
        return self.pixel_values.nbytes if self.picture is None else self.picture.pixels.nbytes


def _no_patches(patch: int) -> Tensor:
    return torch.empty((0, 3, patch, patch), dtype=torch.uint8, device="cpu")


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
        pixel_values: (L, 3, P, P), all uint8 if every segment is, else float32 normalised. No rows where the pixels of
            the whole batch are in `staged`.
        grids: N host triples.
        num_tokens: output rows of each segment.
        staged: pixels of a batch with pictures whose patches are made on the device, ready patches among them.
    """

    pixel_values: Tensor
    grids: list[Grid]
    num_tokens: list[int]
    staged: StagedPixels | None = None

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


def pack(segments: Iterable[Segment], config: EncoderConfig, *, pin_memory: bool = False) -> PackedBatch:
    """Lay segments back to back, in order.

    Args:
        pin_memory: into memory that a GPU copies from, which is used again and again: on the way to a GPU of this
            process it saves a copy, and fresh pages.
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
    grids = [segment.grid_thw for segment in segments]
    tokens = [num_tokens(grid, config) for grid in grids]
    pixels = [segment.picture or segment.pixel_values for segment in segments]
    is_raw = all(isinstance(p, Picture) or p.dtype == torch.uint8 for p in pixels)
    if is_raw and any(isinstance(p, Picture) for p in pixels):
        return PackedBatch(_no_patches(patch), grids, tokens, stage(pixels, patch, pin_memory=pin_memory))
    ready = [_ready(p, config) for p in pixels]
    if not is_raw:
        ready = [normalize(p, config) for p in ready]
    if not ready:
        return PackedBatch(_no_patches(patch), grids, tokens)
    shape = (sum(map(len, ready)), *ready[0].shape[1:])
    together = torch.empty(shape, dtype=ready[0].dtype, device="cpu", pin_memory=pin_memory) if pin_memory else None
    return PackedBatch(torch.cat(ready, out=together), grids, tokens)


def _ready(pixels: Picture | Tensor, config: EncoderConfig) -> Tensor:
    """Patches of a segment. A picture beside patches that are normalised already, which is rare, is prepared here."""
    if isinstance(pixels, Tensor):
        return pixels
    return expand(stage([pixels], config.vision.patch_size), config.media.transparent_background)


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
