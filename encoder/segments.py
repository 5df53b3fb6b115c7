"""The ragged layout: a `Segment` is the patches that attend to each other, a `PackedBatch` many back to back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from encoder.config import EncoderConfig
from encoder.errors import InvalidSegment
from encoder.grid import Grid, check_grid, num_tokens


@dataclass(frozen=True, eq=False)
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

    def __post_init__(self) -> None:
        grid = tuple(self.grid_thw)
        if len(grid) != 3 or not all(_is_integer(side) for side in grid):
            raise InvalidSegment(f"grid_thw must be three integers (t, h, w), got {self.grid_thw!r}")
        object.__setattr__(self, "grid_thw", Grid(*(int(side) for side in grid)))
        if not isinstance(self.pixel_values, Tensor):
            raise InvalidSegment(f"pixel_values must be a torch tensor, got {type(self.pixel_values).__name__}")
        shape = tuple(self.pixel_values.shape)
        if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3]:
            raise InvalidSegment(f"pixel_values must be (L, 3, P, P) patches, got {shape}")
        if self.pixel_values.dtype not in (torch.float32, torch.uint8):
            raise InvalidSegment(f"pixel_values must be float32 or uint8, got {self.pixel_values.dtype}")
        if min(self.grid_thw) < 1 or shape[0] != self.grid_thw.num_patches:
            raise InvalidSegment(f"grid_thw {tuple(self.grid_thw)} does not describe {shape[0]} patches")

    @property
    def num_patches(self) -> int:
        return self.grid_thw.num_patches


def _is_integer(value: object) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


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


def pack(segments: Sequence[Segment], config: EncoderConfig) -> PackedBatch:
    """Lay segments back to back, in order.

    Raises:
        InvalidSegment: a segment this model cannot take, or pixels that are not finite; names its position.
    """
    patch = config.vision.patch_size
    for i, segment in enumerate(segments):
        check_grid(segment.grid_thw, config, f"segments[{i}]: grid_thw")
        if segment.pixel_values.shape[-1] != patch:
            raise InvalidSegment(
                f"segments[{i}]: patches of {segment.pixel_values.shape[-1]} pixels a side, the model has {patch}"
            )
        if segment.pixel_values.is_floating_point() and not bool(segment.pixel_values.isfinite().all()):
            raise InvalidSegment(f"segments[{i}]: pixel_values holds values that are not finite")
    pixels = [segment.pixel_values for segment in segments]
    if not all(p.dtype == torch.uint8 for p in pixels):
        pixels = [normalize(p, config) for p in pixels]
    grids = [segment.grid_thw for segment in segments]
    empty = torch.empty((0, 3, patch, patch), dtype=torch.uint8)
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
    device = pixel_values.device
    mean = torch.tensor(config.media.image_mean, dtype=torch.float32, device=device).view(1, 3, 1, 1)
    # The reciprocal is rounded to float32 before the product, as numpy does it in the reference.
    inverse_std = torch.tensor([1.0 / s for s in config.media.image_std], dtype=torch.float32, device=device)
    # A tensor, not the number 255.0: on a GPU PyTorch replaces division by a number with a product, rounded otherwise.
    levels = torch.full((), 255.0, dtype=torch.float32, device=device)
    return pixel_values.to(torch.float32).div_(levels).sub_(mean).mul_(inverse_std.view(1, 3, 1, 1))
