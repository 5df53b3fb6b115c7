"""The ragged layout: what a segment may be, how segments are laid back to back, and how pixels are normalised."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encoder import load_config
from encoder.config import EncoderConfig, parse_config
from encoder.errors import InvalidSegment
from encoder.grid import Grid
from encoder.segments import Segment, normalize, pack, split

CONFIG = parse_config({"model_type": "kimi_k3"}, {"media_proc_cfg": {}}, source="k3")


def pixels(num_patches: int, value: int = 0, side: int = 14) -> Tensor:
    return torch.full((num_patches, 3, side, side), value, dtype=torch.uint8)


def test_segment_makes_a_grid_of_any_triple_of_integers() -> None:
    for triple in ([1, 2, 4], (np.int64(1), np.int64(2), np.int64(4)), torch.tensor([1, 2, 4])):
        grid = Segment(pixels(8), triple).grid_thw  # type: ignore[arg-type]
        assert grid == Grid(1, 2, 4)
        assert [type(side) for side in grid] == [int, int, int]
    assert Segment(pixels(8), Grid(1, 2, 4)).num_patches == 8


@pytest.mark.parametrize("grid", [(1, 2), (1, 2, 4, 1), (1.0, 2, 4), ("1", 2, 4), (True, 2, 4)])
def test_segment_refuses_a_grid_that_is_not_three_integers(grid: Any) -> None:
    with pytest.raises(InvalidSegment, match="three integers"):
        Segment(pixels(8), grid)


@pytest.mark.parametrize(
    "shape",
    [(8, 588), (8, 14, 14, 3), (8, 3, 14, 13), (3, 14, 14), (1, 8, 3, 14, 14)],
)
def test_segment_refuses_pixels_that_are_not_patches(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidSegment, match=r"must be \(L, 3, P, P\) patches"):
        Segment(torch.zeros(shape), Grid(1, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_segment_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidSegment, match="float32 or uint8"):
        Segment(pixels(8).to(dtype), Grid(1, 2, 4))


def test_segment_refuses_what_is_not_a_tensor() -> None:
    with pytest.raises(InvalidSegment, match="torch tensor, got ndarray"):
        Segment(np.zeros((8, 3, 14, 14), np.uint8), Grid(1, 2, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [(1, 2, 2), (2, 2, 4), (1, -2, -4), (0, 2, 4)])
def test_segment_refuses_a_grid_of_another_number_of_patches(grid: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidSegment, match="does not describe 8 patches"):
        Segment(pixels(8), Grid(*grid))


def test_pack_lays_segments_back_to_back_in_order() -> None:
    grids = [Grid(1, 2, 4), Grid(1, 2, 2), Grid(3, 4, 4)]
    batch = pack([Segment(pixels(grid.num_patches, i + 1), grid) for i, grid in enumerate(grids)], CONFIG)
    assert len(batch) == 3
    assert batch.lengths == [8, 4, 48]
    assert batch.cu_seqlens == [0, 8, 12, 60]
    assert batch.num_tokens == [2, 1, 4]
    assert batch.grids == grids
    assert batch.pixel_values.dtype == torch.uint8
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [1] * 8 + [2] * 4 + [3] * 48


def test_pack_of_nothing_is_an_empty_batch() -> None:
    batch = pack([], CONFIG)
    assert len(batch) == 0
    assert (batch.lengths, batch.cu_seqlens, batch.num_tokens) == ([], [0], [])
    assert batch.pixel_values.shape == (0, 3, 14, 14)
    assert split(torch.empty(0, 7168), batch) == []


def test_pack_normalises_raw_pixels_beside_normalised_ones() -> None:
    ready = torch.full((4, 3, 14, 14), 0.25)
    batch = pack([Segment(pixels(4, 255), Grid(1, 2, 2)), Segment(ready, Grid(1, 2, 2))], CONFIG)
    assert batch.pixel_values.dtype == torch.float32
    assert batch.pixel_values[:, 0, 0, 0].tolist() == [1.0] * 4 + [0.25] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_pack_refuses_pixels_that_are_not_finite_and_names_the_segment(value: float) -> None:
    bad = torch.zeros(4, 3, 14, 14)
    bad[3, 2, 13, 13] = value
    with pytest.raises(InvalidSegment, match=r"^segments\[1\]: .*not finite"):
        pack([Segment(pixels(4), Grid(1, 2, 2)), Segment(bad, Grid(1, 2, 2))], CONFIG)


def test_pack_refuses_a_grid_the_tower_cannot_take_and_names_the_segment() -> None:
    with pytest.raises(InvalidSegment, match=r"^segments\[1\]: grid_thw: height of 3 patches"):
        pack([Segment(pixels(4), Grid(1, 2, 2)), Segment(pixels(6), Grid(1, 3, 2))], CONFIG)


def test_pack_refuses_patches_of_another_size() -> None:
    with pytest.raises(InvalidSegment, match=r"^segments\[0\]: patches of 16 pixels a side, the model has 14"):
        pack([Segment(pixels(4, side=16), Grid(1, 2, 2))], CONFIG)


def test_split_gives_each_segment_its_rows() -> None:
    batch = pack([Segment(pixels(8), Grid(1, 2, 4)), Segment(pixels(48), Grid(3, 4, 4))], CONFIG)
    first, second = split(torch.arange(6).view(6, 1), batch)
    assert first.flatten().tolist() == [0, 1]
    assert second.flatten().tolist() == [2, 3, 4, 5]


def test_normalize_leaves_its_input_alone() -> None:
    raw, ready = pixels(4, 51), torch.full((4, 3, 14, 14), 0.5)
    assert torch.allclose(normalize(raw, CONFIG), torch.tensor(-0.6))  # (51/255 - 0.5) / 0.5
    assert torch.equal(raw, pixels(4, 51))
    assert normalize(ready, CONFIG) is ready


def test_normalize_takes_each_channels_own_mean_and_deviation() -> None:
    media = {"image_mean": [0.0, 0.2, 0.4], "image_std": [1.0, 0.5, 0.25]}
    config: EncoderConfig = parse_config({"model_type": "kimi_k3"}, {"media_proc_cfg": media}, source="k3")
    # 51 is 0.2 of 255: (0.2 - 0) / 1, (0.2 - 0.2) / 0.5, (0.2 - 0.4) / 0.25
    torch.testing.assert_close(normalize(pixels(1, 51), config)[0, :, 0, 0], torch.tensor([0.2, 0.0, -0.8]))


@pytest.mark.parametrize(
    "grid",
    [
        None,
        5,
        torch.tensor(3),
        torch.tensor([1.0, 2.0, 2.0]),
        torch.tensor([True, True, True]),
        (np.array(1.7), 2, 2),
        (torch.tensor(True), 2, 2),
        (np.bool_(True), 2, 2),
        (1.0, 2, 2),
        "122",
        (1, 2),
        (1, 2, 2, 1),
    ],
)
def test_a_grid_is_three_integers_and_nothing_that_rounds_to_them(grid: Any) -> None:
    with pytest.raises(InvalidSegment, match="grid_thw must be three integers"):
        Segment(torch.zeros(4, 3, 14, 14), grid)


@pytest.mark.parametrize("grid", [torch.tensor([1, 2, 2]), np.array([1, 2, 2]), [np.int64(1), torch.tensor(2), 2]])
def test_integers_of_any_kind_make_a_grid(grid: Any) -> None:
    made = Segment(torch.zeros(4, 3, 14, 14), grid).grid_thw
    assert made == Grid(1, 2, 2)
    assert all(type(side) is int for side in made)


@pytest.mark.parametrize("pixels", [np.zeros((4, 3, 14, 14)), torch.zeros(4, 3, 14, 14).to_sparse(), None])
def test_pixels_are_a_dense_tensor(pixels: Any) -> None:
    with pytest.raises(InvalidSegment, match="dense torch tensor"):
        Segment(pixels, (1, 2, 2))


def test_pack_takes_any_iterable_and_refuses_what_is_no_segment() -> None:
    config = load_config("demo:k3-tiny")
    pixels = torch.zeros(4, 3, 14, 14)
    assert len(pack((Segment(pixels, (1, 2, 2)) for _ in range(3)), config)) == 3
    with pytest.raises(InvalidSegment, match=r"segments\[1\] must be a Segment, got Tensor"):
        pack([Segment(pixels, (1, 2, 2)), pixels], config)  # type: ignore[list-item]


def test_pack_refuses_pixels_that_were_never_normalised() -> None:
    with pytest.raises(InvalidSegment, match=r"not normalised \(magnitude 3e\+38, allowed up to 10000\)"):
        pack([Segment(torch.full((4, 3, 14, 14), 3e38), (1, 2, 2))], load_config("demo:k3-tiny"))
