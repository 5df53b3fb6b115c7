"""Pictures of any size and mode, and models with any limits: the deferred road ends at Pillow's bits."""

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from PIL import Image

from encoder import Picture, pack
from encoder.device_pixels_plain import expand
from encoder.preprocess import defer_frames, defer_image, preprocess_frames, preprocess_image
from encoder.resample import PRECISION_BITS, is_vertical_first, weights
from encoder.segments import Segment
from tests.modes import FAMILIES, MODES, config, picture

sides = st.integers(1, 260)
models = st.builds(config, st.sampled_from(FAMILIES), st.integers(1, 60), st.integers(2, 12))


def resampled(pixels: np.ndarray, axis: int, new_size: int) -> np.ndarray:
    """One pass, tap by tap, in int32 as Pillow."""
    table = weights(pixels.shape[axis], new_size)
    total = np.full(np.insert(np.delete(pixels.shape, axis), axis, new_size), 1 << (PRECISION_BITS - 1), np.int32)
    for tap, weight in enumerate(table[1:]):
        taken = np.take(pixels, np.minimum(table[0] + tap, pixels.shape[axis] - 1), axis=axis)
        total += np.moveaxis(np.moveaxis(taken.astype(np.int32), axis, -1) * weight, -1, axis)
    return np.clip(total >> PRECISION_BITS, 0, 255).astype(np.uint8)


@settings(max_examples=300)
@given(sides, sides, sides, sides, st.booleans(), st.integers(0, 2**32 - 1))
def test_weights_and_order_are_pillows_for_any_two_sizes(
    width: int, height: int, new_width: int, new_height: int, extreme: bool, seed: int
) -> None:
    """Enlarging too, which no plan does; hard edges make sums beyond 0 to 255, which either pass clips."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width), dtype=np.uint8)
    if extreme:
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
    want = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), Image.Resampling.BICUBIC))
    passes = [(1, new_width), (0, new_height)]
    got = pixels
    for axis, new_size in passes[::-1] if is_vertical_first(width, height, new_width, new_height) else passes:
        got = resampled(got, axis, new_size)
    np.testing.assert_array_equal(got, want)


@settings(max_examples=200)
@given(models, st.lists(st.tuples(st.sampled_from(MODES), sides, sides, st.booleans()), min_size=1, max_size=4))
def test_any_batch_of_pictures_is_that_of_the_cpu_path(model, items) -> None:
    segments, want = [], []
    for seed, (mode, width, height, is_ready) in enumerate(items):
        image = picture(mode, width, height, seed)
        want.append(preprocess_image(image, model))
        segments.append(want[-1] if is_ready else defer_image(image, model))
    batch = pack(segments, model)
    assert batch.grids == [segment.grid_thw for segment in want]
    staged = batch.staged
    got = batch.pixel_values if staged is None else expand(staged, model.media.transparent_background)
    assert torch.equal(got, torch.cat([segment.pixel_values for segment in want]))


@given(models, st.integers(1, 4), sides, sides, st.integers(0, 2**32 - 1))
def test_frames_survive_the_way_between_processes(model, num_frames: int, width: int, height: int, seed: int) -> None:
    frames = np.random.default_rng(seed).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)
    made = defer_frames(frames, model).picture
    assert made is not None
    received = Picture.from_facts(made.facts(), made.pixels.tobytes(), model)
    staged = pack([Segment.deferred(received)], model).staged
    assert staged is not None
    want = preprocess_frames(frames, model).pixel_values
    assert torch.equal(expand(staged, model.media.transparent_background), want)
