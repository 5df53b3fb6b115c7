"""Geometry in integers; the expected values are those of the specification's tables or recomputable in the comment."""

import json
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from encoder import load_config
from encoder.config import EncoderConfig, parse_config
from encoder.errors import InvalidSegment
from encoder.families import FAMILY_MEDIA, Family
from encoder.grid import (
    Grid,
    check_grid,
    flops,
    largest_segment,
    num_tokens,
    plan_frames,
    plan_image,
    plan_video,
    timestamp,
)


def config(family: Family, **media: Any) -> EncoderConfig:
    return parse_config({"model_type": family}, {"media_proc_cfg": FAMILY_MEDIA[family] | media}, source=family)


K3, K25 = config("kimi_k3"), config("kimi_k25")


@pytest.mark.parametrize(
    ("size", "resized", "padding", "grid", "tokens"),
    [
        ((1, 1), (1, 1), (27, 27), (1, 2, 2), 1),
        ((28, 28), (28, 28), (0, 0), (1, 2, 2), 1),
        ((29, 28), (29, 28), (27, 0), (1, 2, 4), 2),
        ((1920, 1080), (1920, 1080), (12, 12), (1, 78, 138), 2691),
        ((4200, 3900), (3723, 3457), (1, 15), (1, 248, 266), 16492),
        ((7300, 20), (7168, 19), (0, 9), (1, 2, 512), 256),
        ((3584, 3584), (3584, 3584), (0, 0), (1, 256, 256), 16384),
        ((7040, 1861), (7001, 1850), (27, 26), (1, 134, 502), 16817),
        ((100_000, 1), (7167, 1), (1, 27), (1, 2, 512), 256),  # 100000 * 0.07168 is just below 7168 in double
    ],
)
def test_plan_image_of_kimi_k3(
    size: tuple[int, int],
    resized: tuple[int, int],
    padding: tuple[int, int],
    grid: tuple[int, int, int],
    tokens: int,
) -> None:
    plan = plan_image(*size, K3.media)
    assert (plan.width, plan.height) == resized
    assert (plan.pad_width, plan.pad_height) == padding
    assert plan.grid() == grid
    assert num_tokens(plan.grid(), K3) == tokens


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (-3, 5)])
def test_plan_image_refuses_a_picture_without_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidSegment, match=f"{size[0]}x{size[1]} pixels"):
        plan_image(*size, K3.media)


def test_plan_frames_takes_the_limit_of_a_frame() -> None:
    # 1920x1080 has 137 * 77 = 10549 whole patches: sqrt(4096 / 10549) = 0.62312 gives 1196 x 672.
    plan = plan_frames(1920, 1080, 4, K25.media)
    assert (plan.width, plan.height, plan.grid(4)) == (1196, 672, Grid(4, 48, 86))
    assert plan_frames(1920, 1080, 4, K3.media).grid(4) == Grid(4, 78, 138)


def test_plan_frames_shares_the_limit_of_a_video_among_the_frames_of_a_chunk() -> None:
    # 400 patches over 4 frames leave 100 each: 280x280 pixels have 20 * 20, so the sides are halved.
    media = config("kimi_k3", in_patch_limit_video=400).media
    assert plan_frames(280, 280, 4, media).grid(4) == Grid(4, 10, 10)
    assert plan_frames(280, 280, 1, media).grid(1) == Grid(1, 20, 20)


def test_largest_segment_is_a_chunk_of_four_of_the_largest_frames() -> None:
    # The largest frame of K3 is the largest image of K2.5 (17,856 patches), that of K2.5 has 5,352.
    assert largest_segment(K3.media) == 4 * 17_856 == 71_424
    assert largest_segment(K25.media) == 4 * 5_352 == 21_408


@pytest.mark.parametrize(
    ("family", "size", "patches"),
    [
        ("kimi_k25", (489, 7081), 17_856),
        # 526 * 134 whole patches scale by sqrt(65536 / 70484) to 7113 x 1821, padded to 255 * 66 cells of 4 patches.
        ("kimi_k3", (7377, 1889), 67_320),
    ],
)
def test_largest_segment_of_one_image_alone(family: Family, size: tuple[int, int], patches: int) -> None:
    # One frame a chunk with the smallest limit takes the videos out of the search.
    media = config(family, temporal_merge_kernel_size=1, in_patch_limit_each_frame=1).media
    assert largest_segment(media) == patches
    assert plan_image(*size, media).grid().num_patches == patches


@pytest.mark.parametrize("grid", [(1, 2, 2), (4, 512, 512), (3, 2, 512)])
def test_check_grid_accepts_what_the_tower_can_take(grid: tuple[int, int, int]) -> None:
    assert check_grid(grid, K3) == Grid(*grid)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ((0, 2, 2), "0 frames, allowed 1 to 4"),
        ((5, 2, 2), "5 frames, allowed 1 to 4"),
        ((1, 0, 2), "height of 0 patches, allowed 2 to 512"),
        ((1, 2, -2), "width of -2 patches, allowed 2 to 512"),
        ((1, 514, 2), "height of 514 patches, allowed 2 to 512"),
        ((1, 2, 514), "width of 514 patches, allowed 2 to 512"),
        ((1, 3, 2), "height of 3 patches, must be a multiple of 2"),
        ((1, 2, 511), "width of 511 patches, must be a multiple of 2"),
    ],
)
def test_check_grid_refuses_what_the_tower_cannot_take(grid: tuple[int, int, int], said: str) -> None:
    with pytest.raises(InvalidSegment, match=f"^input: {said}"):
        check_grid(grid, K3, "input")


def test_tokens_do_not_depend_on_the_number_of_frames() -> None:
    assert [num_tokens(Grid(t, 26, 46), K3) for t in (1, 2, 3, 4)] == [299] * 4


@pytest.mark.parametrize(
    ("grid", "patches", "tokens", "k3_tflop", "k25_tflop"),
    [
        (Grid(1, 16, 16), 256, 64, "0.220", "0.226"),
        (Grid(1, 36, 46), 1_656, 414, "1.808", "1.750"),
        (Grid(1, 74, 74), 5_476, 1_369, "9.448", "8.389"),
        (Grid(1, 78, 138), 10_764, 2_691, "28.015", "23.571"),
        (Grid(1, 256, 256), 65_536, 16_384, "766.03", None),
        (Grid(4, 26, 46), 4_784, 299, "7.622", "6.820"),
        (Grid(4, 52, 92), 19_136, 1_196, "76.05", None),
    ],
)
def test_flops_of_the_specifications_table(
    grid: Grid, patches: int, tokens: int, k3_tflop: str, k25_tflop: str | None
) -> None:
    assert (grid.num_patches, num_tokens(grid, K3)) == (patches, tokens)
    for model, printed in ((K3, k3_tflop), (K25, k25_tflop)):
        if printed is not None:
            digits = len(printed.partition(".")[2])
            assert f"{flops(grid, model) / 1e12:.{digits}f}" == printed


@pytest.mark.parametrize(
    ("model", "linears", "attention", "projector"),
    [(K3, 793_927_680, 165_888, 92_274_688), (K25, 823_495_680, 124_416, 108_527_616)],
)
def test_flops_have_a_linear_a_square_and_a_token_term(
    model: EncoderConfig, linears: int, attention: int, projector: int
) -> None:
    # 4 patches and 1 token; then 16 patches, still 1 token.
    assert flops(Grid(1, 2, 2), model) == 4 * linears + 16 * attention + projector
    assert flops(Grid(4, 2, 2), model) == 16 * linears + 256 * attention + projector


def test_plan_video_spreads_frames_over_the_whole_clip() -> None:
    plan = plan_video(300, 30.0, K25)  # 10 s at 2 a second
    assert len(plan.frame_indices) == 20
    assert (plan.frame_indices[0], plan.frame_indices[-1]) == (0, 299)
    assert [len(chunk) for chunk in plan.chunks] == [4, 4, 4, 4, 4]
    assert [i for chunk in plan.chunks for i in chunk] == plan.frame_indices
    assert plan.start_s == [chunk[0] / 30.0 for chunk in plan.chunks]


def test_plan_video_forms_the_step_before_the_product() -> None:
    # Frame 7 of 15 out of 30: 7 * (29 / 14) is 14.500000000000002 in double; (7 * 29) / 14 would be 14.5, even 14.
    plan = plan_video(30, 2.0, K25, sample_fps=1.0)
    assert plan.frame_indices == [0, 2, 4, 6, 8, 10, 12, 15, 17, 19, 21, 23, 25, 27, 29]


@pytest.mark.parametrize(
    ("num_frames", "fps", "kept"),
    [
        (1, 30.0, 1),
        (5, 4.0, 2),  # 2.5, half to even
        (7, 4.0, 4),  # 3.5, half to even
        (10, 1.0, 10),  # slower than the sample rate: every frame
    ],
)
def test_plan_video_rounds_the_count_half_to_even(num_frames: int, fps: float, kept: int) -> None:
    assert len(plan_video(num_frames, fps, K25).frame_indices) == kept


def test_plan_video_takes_a_rate_and_a_cap() -> None:
    assert plan_video(5, 5.0, K25, sample_fps=5.0).chunks == [[0, 1, 2, 3], [4]]
    capped = plan_video(300, 30.0, K25, max_frames=3)
    assert capped.frame_indices == [0, 150, 299]  # 299/2 = 149.5, half to even
    assert plan_video(300, 30.0, K25, max_frames=1).frame_indices == [0]
    assert plan_video(300, 30.0, K25, max_frames=1000) == plan_video(300, 30.0, K25)


@pytest.mark.parametrize(
    ("num_frames", "fps", "options", "said"),
    [
        (0, 30.0, {}, "0 frames"),
        (10, 0.0, {}, "frame rate of 0.0"),
        (10, -1.0, {}, "frame rate of -1.0"),
        (10, float("nan"), {}, "frame rate of nan"),
        (10, float("inf"), {}, "frame rate of inf"),
        (10, 30.0, {"sample_fps": 0.0}, "sample rate of 0.0"),
        (10, 30.0, {"max_frames": 0}, "max_frames of 0"),
    ],
)
def test_plan_video_refuses(num_frames: int, fps: float, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSegment, match=said):
        plan_video(num_frames, fps, K25, **options)


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        (0.0, "00:00:00.000"),
        (71 / 30, "00:00:02.366"),
        (57 / 25, "00:00:02.279"),  # 2.28 is 2.2799999999999998 in double
        (123 / 60, "00:00:02.049"),  # 2.05 is 2.0499999999999998
        (3599.5, "00:59:59.500"),
        (3661.25, "01:01:01.250"),
        (86_399.0, "23:59:59.000"),
        (86_400.0, "00:00:00.000"),
        (90_061.5, "01:01:01.500"),
        # Rounded to whole microseconds the clock is at 3 s, while the milliseconds are cut from the time itself.
        (2.9999999, "00:00:03.999"),
    ],
)
def test_timestamp_truncates_milliseconds_and_wraps_after_a_day(seconds: float, printed: str) -> None:
    assert timestamp(seconds, "hh:mm:ss.fff") == printed


@pytest.mark.parametrize(("mode", "printed"), [("mm:ss.fff", "01:01.250"), ("mm:ss", "01:01")])
def test_timestamp_modes_without_hours(mode: str, printed: str) -> None:
    assert timestamp(3661.25, mode) == printed


def test_plan_video_prints_in_the_checkpoints_mode() -> None:
    plan = plan_video(8, 2.0, config("kimi_k25", timestamp_mode="mm:ss"))
    assert plan.timestamps == ["00:00", "00:02"]


def test_a_plan_is_in_double_and_plain_types_whatever_it_is_asked_with() -> None:
    config = load_config("demo:k25-tiny")
    plain = plan_video(100, 25.0, config)
    assert plain.timestamps[1] == "00:00:02.279"
    for num_frames, fps in ((np.int64(100), np.float64(25)), (100, Fraction(25)), (100, 25), (torch.tensor(100), "25")):
        plan = plan_video(num_frames, fps, config)  # type: ignore[arg-type]
        assert plan == plain
        assert json.loads(json.dumps(asdict(plan))) == asdict(plain)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((100.0, 25), {}),
        ((float("nan"), 25), {}),
        ((True, 25), {}),
        ((100, 5e-324), {}),
        ((100, 1e308), {"sample_fps": 1e308}),
        ((100, "fast"), {}),
        ((100, 10**400), {}),
        ((100, 25), {"max_frames": 2.5}),
        ((100, 25), {"max_frames": True}),
        ((100, 25), {"max_frames": 0}),
    ],
)
def test_a_plan_of_nonsense_is_refused(arguments: Any, options: Any) -> None:
    with pytest.raises(InvalidSegment):
        plan_video(*arguments, load_config("demo:k25-tiny"), **options)
