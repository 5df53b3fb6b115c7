"""Sizes of any picture or frame up to 20000 x 20000, from integers alone: nothing is decoded."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from encoder.config import EncoderConfig, parse_config
from encoder.families import FAMILY_MEDIA, Family
from encoder.grid import ResizePlan, check_grid, largest_segment, plan_frames, plan_image, plan_video


def config(family: Family) -> EncoderConfig:
    return parse_config({"model_type": family}, {"media_proc_cfg": FAMILY_MEDIA[family]}, source=family)


CONFIGS = [config("kimi_k3"), config("kimi_k25")]
# Largest grids of one image over all sizes up to 20000 x 20000; test_grid.py names a picture that has each.
LARGEST_IMAGE = {"kimi_k3": 67_320, "kimi_k25": 17_856}

models = pytest.mark.parametrize("model", CONFIGS, ids=lambda model: model.family)
# Also drawn by ratio, as strips and near-squares at the limits are rare among independent sides.
sides = st.integers(1, 20_000)
sizes = st.one_of(
    st.tuples(sides, sides),
    st.builds(lambda side, ratio: (side, max(1, round(side * ratio))), sides, st.floats(0.001, 1.0)),
    st.builds(lambda side, ratio: (max(1, round(side * ratio)), side), sides, st.floats(0.001, 1.0)),
)


def check_plan(plan: ResizePlan, size: tuple[int, int], num_frames: int, model: EncoderConfig) -> None:
    width, height = size
    assert 1 <= plan.width <= width
    assert 1 <= plan.height <= height
    assert 0 <= plan.pad_width <= 27
    assert 0 <= plan.pad_height <= 27

    grid = plan.grid(num_frames)
    assert grid.t == num_frames
    assert (grid.w * 14, grid.h * 14) == (plan.width + plan.pad_width, plan.height + plan.pad_height)
    assert check_grid(grid, model) == grid  # even, and at most 512 a side
    assert grid.num_patches <= largest_segment(model.media)

    # One scale for both sides: each is its original times the scale, truncated (and at least 1), so some scale in the
    # common part of the two intervals explains both. The margin is double rounding at 7168.
    low = max(plan.width / width if plan.width > 1 else 0, plan.height / height if plan.height > 1 else 0)
    high = min((plan.width + 1) / width, (plan.height + 1) / height)
    assert low <= high + 1e-12


@models
@given(size=sizes)
@example(size=(1, 1))
@example(size=(20_000, 1))
@example(size=(20_000, 20_000))
@example(size=(7377, 1889))
def test_image_plan_keeps_its_bounds(model: EncoderConfig, size: tuple[int, int]) -> None:
    plan = plan_image(*size, model.media)
    check_plan(plan, size, 1, model)
    assert plan.grid().num_patches <= LARGEST_IMAGE[model.family]


@models
@given(size=sizes, num_frames=st.integers(1, 4))
@example(size=(7081, 489), num_frames=4)
@example(size=(153, 6731), num_frames=4)
def test_chunk_plan_keeps_its_bounds(model: EncoderConfig, size: tuple[int, int], num_frames: int) -> None:
    check_plan(plan_frames(*size, num_frames, model.media), size, num_frames, model)


@models
@given(size=sizes)
def test_a_picture_within_all_limits_is_left_alone(model: EncoderConfig, size: tuple[int, int]) -> None:
    width, height = size
    plan = plan_image(width, height, model.media)
    patches = max(1, width // 14) * max(1, height // 14)
    fits = patches <= model.media.in_patch_limit and max(size) <= 512 * 14
    assert ((plan.width, plan.height) == size) == fits


@models
@given(size=sizes)
def test_turning_a_picture_turns_its_plan(model: EncoderConfig, size: tuple[int, int]) -> None:
    width, height = size
    plan, turned = plan_image(width, height, model.media), plan_image(height, width, model.media)
    assert (plan.width, plan.height) == (turned.height, turned.width)


@models
@given(
    num_frames=st.integers(1, 5000),
    fps=st.floats(0.01, 240.0),
    sample_fps=st.none() | st.floats(0.01, 60.0),
    max_frames=st.none() | st.integers(1, 3000),
)
def test_video_plan_covers_the_clip_in_order(
    model: EncoderConfig, num_frames: int, fps: float, sample_fps: float | None, max_frames: int | None
) -> None:
    plan = plan_video(num_frames, fps, model, sample_fps=sample_fps, max_frames=max_frames)
    indices = plan.frame_indices
    assert 1 <= len(indices) <= min(num_frames, max_frames or num_frames)
    assert indices[0] == 0
    assert len(indices) == 1 or indices[-1] == num_frames - 1
    assert all(a < b for a, b in pairwise(indices))
    assert [i for chunk in plan.chunks for i in chunk] == indices
    assert {len(chunk) for chunk in plan.chunks[:-1]} <= {4}
    assert len(plan.start_s) == len(plan.timestamps) == len(plan.chunks)
