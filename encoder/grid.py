"""Geometry in integers: grids, sizes after the resize, video sampling, and what a segment costs. No pixels here.

Source: the released Kimi-K3 image processor and Kimi-K2.5 video processor (`navit_resize_image`, `sample_frames`).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from encoder.config import ROPE_MAX_SIDE, EncoderConfig, MediaConfig
from encoder.errors import InvalidSegment


class Grid(NamedTuple):
    """(t, h, w) of one segment, in patches: frames, rows, columns."""

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w


def check_grid(grid_thw: Sequence[int], config: EncoderConfig, where: str = "grid_thw") -> Grid:
    """Return the grid as a `Grid` if the tower can take it, else raise `InvalidSegment`."""
    t, h, w = grid_thw
    kh, kw = config.vision.merge_kernel_size
    max_t = config.vision.pos_emb_time
    if not 1 <= t <= max_t:
        raise InvalidSegment(f"{where}: {t} frames, allowed 1 to {max_t}")
    for name, side, kernel in (("height", h, kh), ("width", w, kw)):
        if not 1 <= side <= ROPE_MAX_SIDE:
            raise InvalidSegment(f"{where}: {name} of {side} patches, allowed {kernel} to {ROPE_MAX_SIDE}")
        if side % kernel:
            raise InvalidSegment(f"{where}: {name} of {side} patches, must be a multiple of {kernel}")
    return Grid(t, h, w)


def num_tokens(grid: Grid, config: EncoderConfig) -> int:
    """Output rows of a segment: the merge kernel divides h and w, time is averaged away."""
    kh, kw = config.vision.merge_kernel_size
    return (grid.h // kh) * (grid.w // kw)


def flops(grid: Grid, config: EncoderConfig) -> int:
    """Multiply-adds counted as 2, for tower and projector; norms, GELU, softmax and RoPE left out (below 2 %)."""
    v = config.vision
    patches = grid.num_patches
    block = v.hidden_size * 3 * v.qkv_hidden_size + v.qkv_hidden_size * v.hidden_size
    block += 2 * v.hidden_size * v.intermediate_size
    linears = 2 * (v.num_layers * block + v.hidden_size * 3 * v.patch_size**2)
    attention = 4 * v.num_layers * v.qkv_hidden_size
    merged = v.hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]
    projector = 2 * (merged * merged + merged * v.text_hidden_size)
    return patches * linears + patches * patches * attention + num_tokens(grid, config) * projector


@dataclass(frozen=True)
class ResizePlan:
    """Size of a picture after the resize, and the zeros added at its right and bottom, all in pixels."""

    width: int
    height: int
    pad_width: int
    pad_height: int
    patch_size: int

    @property
    def padded_width(self) -> int:
        return self.width + self.pad_width

    @property
    def padded_height(self) -> int:
        return self.height + self.pad_height

    def grid(self, num_frames: int = 1) -> Grid:
        return Grid(num_frames, self.padded_height // self.patch_size, self.padded_width // self.patch_size)


def plan_image(width: int, height: int, media: MediaConfig) -> ResizePlan:
    """Size of a decoded picture of `width` x `height` pixels after preprocessing. Pictures are never enlarged."""
    return _plan(width, height, media, media.in_patch_limit)


def plan_frames(width: int, height: int, num_frames: int, media: MediaConfig) -> ResizePlan:
    """Size of the frames of one chunk, from its first frame's size in pixels."""
    limit = media.in_patch_limit_each_frame
    if media.in_patch_limit_video is not None:
        # As released the limit of a whole video is applied to every chunk, so with the released numbers it never binds.
        limit = min(round(media.in_patch_limit_video / num_frames), limit)
    return _plan(width, height, media, limit)


def _plan(width: int, height: int, media: MediaConfig, limit: int) -> ResizePlan:
    if width < 1 or height < 1:
        raise InvalidSegment(f"picture of {width}x{height} pixels: both sides must be at least 1")
    patch = media.patch_size
    side_px = media.patch_limit_on_one_side * patch
    factor = patch * media.merge_kernel_size
    scale = min(
        1.0,
        math.sqrt(limit / (max(1.0, width // patch) * max(1.0, height // patch))),
        side_px / width,
        side_px / height,
    )
    new_width = min(max(1, int(width * scale)), side_px)
    new_height = min(max(1, int(height * scale)), side_px)
    return ResizePlan(new_width, new_height, -new_width % factor, -new_height % factor, patch)


@lru_cache(maxsize=16)
def largest_segment(media: MediaConfig) -> int:
    """Patches of the largest segment that preprocessing can produce, for sizing batches and buffers.

    The limits look at whole patches before padding, so the padded grid exceeds them. The worst picture of each patch
    count has the most pixels that still count as that many patches; those are searched, on sides up to twice the
    legal one (beyond, the excess of a partial patch only shrinks with the scale).
    """

    def worst(limit: int) -> int:
        patch, side = media.patch_size, media.patch_limit_on_one_side
        patches = np.arange(1, 2 * side + 1, dtype=np.float64)
        w, h = np.meshgrid(patches * patch + patch - 1, patches * patch + patch - 1)
        by_count = np.sqrt(limit / (patches[None, :] * patches[:, None]))
        s = np.minimum.reduce([np.ones_like(w), by_count, side * patch / w, side * patch / h])
        factor = patch * media.merge_kernel_size
        cells = np.ceil(np.maximum(1, np.floor(w * s)) / factor) * np.ceil(np.maximum(1, np.floor(h * s)) / factor)
        return int(cells.max()) * media.merge_kernel_size**2

    frames = range(1, media.temporal_merge_kernel_size + 1)
    video = media.in_patch_limit_video
    per_frame = media.in_patch_limit_each_frame
    chunks = [t * worst(per_frame if video is None else min(round(video / t), per_frame)) for t in frames]
    return max(worst(media.in_patch_limit), *chunks)


MIN_FPS, MAX_FPS = 1e-6, 1e6  # frames per second; one frame in eleven days is no video, and no clock ticks faster


@dataclass(frozen=True)
class VideoPlan:
    """Which frames of a video are read, and how they are cut into chunks (one segment each).

    `frame_indices` are positions in the decoded video; `chunks` the same, cut; `start_s` the time of each chunk's
    first frame in seconds, `timestamps` the same as the model's prompt prints it.
    """

    frame_indices: list[int]
    chunks: list[list[int]]
    start_s: list[float]
    timestamps: list[str]


def plan_video(
    num_frames: int,
    fps: float,
    config: EncoderConfig,
    *,
    sample_fps: float | None = None,
    max_frames: int | None = None,
) -> VideoPlan:
    """Choose frames spread evenly over the whole video, ends included, and cut them into chunks.

    Args:
        num_frames: frames the decoder can deliver.
        fps: average frame rate, frames per second.
        sample_fps: frames per second to keep; default the checkpoint's.
        max_frames: at most so many frames, still spread over the whole video.
    Raises:
        InvalidSegment: a count or rate that is not positive.
    """
    num_frames, max_frames = _integer(num_frames, "num_frames"), max_frames and _integer(max_frames, "max_frames")
    # In double whatever came: a Fraction, as some decoders give, would print other milliseconds.
    fps = _double(fps, "frame rate")
    rate = _double(config.media.sample_fps if sample_fps is None else sample_fps, "sample rate")
    if num_frames < 1:
        raise InvalidSegment(f"video of {num_frames} frames: at least 1 is needed")
    for name, value in (("frame rate", fps), ("sample rate", rate)):
        if not MIN_FPS <= value <= MAX_FPS:
            raise InvalidSegment(f"video {name} of {value} frames per second, allowed {MIN_FPS:g} to {MAX_FPS:g}")
    if max_frames is not None and max_frames < 1:
        raise InvalidSegment(f"max_frames of {max_frames}: must be at least 1")
    kept = max(round((num_frames * min(rate, fps)) / fps), 1)
    if max_frames is not None:
        kept = min(kept, max_frames)
    indices = _linspace(num_frames, kept)
    size = config.media.temporal_merge_kernel_size
    chunks = [indices[i : i + size] for i in range(0, kept, size)]
    starts = [chunk[0] / fps for chunk in chunks]
    return VideoPlan(indices, chunks, starts, [timestamp(s, config.media.timestamp_mode) for s in starts])


def _integer(value: int, name: str) -> int:
    if isinstance(value, bool):
        raise InvalidSegment(f"video {name} must be an integer, got {value}")
    try:
        return operator.index(value)
    except TypeError as error:
        raise InvalidSegment(f"video {name} must be an integer, got {value!r}") from error


def _double(value: float, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSegment(f"video {name} must be a number, got {value!r}") from error


def _linspace(num_frames: int, kept: int) -> list[int]:
    """`kept` positions from 0 to num_frames - 1 inclusive, rounded half to even; the step comes first, in double."""
    if kept == 1:
        return [0]
    step = (num_frames - 1) / (kept - 1)
    return [round(i * step) for i in range(kept - 1)] + [num_frames - 1]


def timestamp(seconds: float, mode: str) -> str:
    """Print a chunk's time as the reference: clock fields of whole microseconds, milliseconds truncated in double."""
    clock = round(seconds * 1_000_000) // 1_000_000  # datetime.fromtimestamp rounds half to even, as round() does
    hours, minutes, secs = clock // 3600 % 24, clock // 60 % 60, clock % 60
    millis = int((seconds % 1) * 1000)
    if mode == "hh:mm:ss.fff":
        return f"{hours:02d}:{minutes:02d}:{secs:02d}.{millis:03d}"
    if mode == "mm:ss.fff":
        return f"{minutes:02d}:{secs:02d}.{millis:03d}"
    return f"{minutes:02d}:{secs:02d}"
