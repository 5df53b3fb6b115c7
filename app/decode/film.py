"""One film, top to bottom: header, plan, frames, chunks of patches. Runs inside a film worker."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from app.decode import film_decord, film_pyav
from app.decode.facts import Facts
from app.decode.film_facts import FilmHeader
from app.decode.film_header import read_header
from app.decode.media import DecodeLimits, MediaOptions
from app.errors import CorruptMedia, LimitExceeded
from encoder import EncoderConfig, Segment, VideoPlan, plan_video, preprocess_frames
from encoder.grid import plan_frames, timestamp

Frame = NDArray[np.uint8]  # (H, W, 3) RGB, as displayed


def prepare_film(
    path: str,
    options: MediaOptions,
    limits: DecodeLimits,
    config: EncoderConfig,
    keep: Callable[[Segment], None],
) -> Facts:
    """Decode and preprocess the film in the file at `path`, a chunk at a time: memory does not grow with its length.

    Args:
        keep: takes each chunk's segment, in order.
    Raises:
        UnsupportedMedia, LimitExceeded, CorruptMedia: see `read_header`; and `CorruptMedia` for sampled frames that do
            not decode, unless `options.allow_partial` and at least one does.
    """
    started = time.perf_counter()
    preprocess_s = 0.0
    header = read_header(path, limits)
    plan = plan_video(header.num_frames, header.fps, config, sample_fps=options.fps, max_frames=options.max_frames)
    _check_plan(plan, header, limits, config)
    size = config.media.temporal_merge_kernel_size
    grids: list[tuple[int, int, int]] = []
    indices: list[int] = []
    chunk: list[Frame] = []

    def finish_chunk() -> None:
        nonlocal preprocess_s
        before = time.perf_counter()
        segment = preprocess_frames(chunk, config)
        keep(segment)
        grids.append((segment.grid_thw.t, segment.grid_thw.h, segment.grid_thw.w))
        chunk.clear()
        preprocess_s += time.perf_counter() - before

    for index, frame in _frames(path, header, plan.frame_indices, limits):
        indices.append(index)
        chunk.append(frame)
        if len(chunk) == size:
            finish_chunk()
    num_wanted = len(plan.frame_indices)
    if len(indices) < num_wanted and not (options.allow_partial and indices):
        raise CorruptMedia(f"{len(indices)} of {num_wanted} sampled frames decoded")
    if chunk:
        finish_chunk()
    width, height = header.turned_size
    resized = plan_frames(width, height, grids[0][0], config.media)
    starts = [index / header.fps for index in indices[::size]]
    return Facts(
        grids=grids,
        original_size=(width, height),
        resized_size=(resized.width, resized.height),
        frame_indices=indices,
        start_s=starts,
        timestamps=[timestamp(start, config.media.timestamp_mode) for start in starts],
        decode_s=time.perf_counter() - started - preprocess_s,
        preprocess_s=preprocess_s,
    )


def _frames(path: str, header: FilmHeader, indices: Sequence[int], limits: DecodeLimits) -> Iterator[tuple[int, Frame]]:
    """From decord where it is known to be right and its one big batch fits, else, and if it fails, from PyAV."""
    batch_bytes = len(indices) * header.width * header.height * 3
    if header.not_for_decord is None and batch_bytes <= limits.decord_batch_bytes:
        try:
            return film_decord.frames(path, header, indices)
        except film_decord.DecordFailed:
            pass
    return film_pyav.frames(path, header, indices, limits.max_pixels)


def _check_plan(plan: VideoPlan, header: FilmHeader, limits: DecodeLimits, config: EncoderConfig) -> None:
    num_frames = len(plan.frame_indices)
    if num_frames > limits.max_sampled_frames:
        raise LimitExceeded(f"film of {num_frames} sampled frames, limit {limits.max_sampled_frames}")
    width, height = header.turned_size
    counts = [len(chunk) for chunk in plan.chunks]
    num_patches = sum(plan_frames(width, height, t, config.media).grid(t).num_patches for t in counts)
    if num_patches > limits.max_patches:
        raise LimitExceeded(f"film of {num_patches} patches, limit {limits.max_patches}")
