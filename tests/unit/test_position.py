"""Numbers a reader can recompute; the reference's own samples are in tests/golden/test_samples.py."""

import math

import pytest
import torch

from encoder.grid import Grid
from encoder.position import FrameTables, apply_rope, pos_emb, resample_table, rope_table, time_table

CPU = torch.device("cpu")


def test_bilinear_weights_are_half_pixel_centred_and_clamped() -> None:
    table = torch.tensor([0.0, 10.0]).view(2, 1, 1)
    resampled = resample_table(table, 4, 1, "bilinear").flatten()
    # Source rows -0.25 (clamped to 0), 0.25, 0.75, 1.25 (clamped to 1).
    assert resampled.tolist() == [0.0, 2.5, 7.5, 10.0]


def test_bicubic_uses_a_of_three_quarters() -> None:
    table = torch.zeros(8, 1, 1)
    table[3] = 1.0
    resampled = resample_table(table, 16, 1, "bicubic").flatten()
    a = -0.75

    def keys(d: float) -> float:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1 if d <= 1 else a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a

    # Target row i lies at source (i + 0.5) / 2 - 0.5, so row 6 is 0.25 before source row 3 and row 9 is 1.25 after it.
    assert resampled[6].item() == pytest.approx(keys(0.25), abs=1e-6)
    assert resampled[9].item() == pytest.approx(keys(1.25), abs=1e-6)


def test_shrinking_does_not_average() -> None:
    table = torch.arange(8.0).view(8, 1, 1) ** 2
    # Rows 1.5 and 5.5: only the two neighbours count, whatever lies between.
    assert resample_table(table, 2, 1, "bilinear").flatten().tolist() == [(1 + 4) / 2, (25 + 36) / 2]


def test_a_grid_of_the_tables_size_gets_the_table_itself() -> None:
    table = torch.randn(3, 5, 2)
    assert torch.equal(resample_table(table, 3, 5, "bicubic"), table.view(15, 2))


def test_a_bfloat16_table_is_resampled_in_float32_and_rounded_once() -> None:
    table = torch.randn(8, 8, 4).bfloat16()
    exact = resample_table(table.float(), 12, 10, "bicubic")
    rounded = resample_table(table, 12, 10, "bicubic")
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, exact.bfloat16())


def test_time_table_holds_sines_then_cosines() -> None:
    table = time_table(4, 8)
    assert table.dtype == torch.float32
    for frame in range(4):
        angles = [frame * 10_000 ** (-j / 4) for j in range(4)]
        want = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        assert table[frame].tolist() == pytest.approx(want, abs=1e-6)


def test_only_segments_of_two_frames_or_more_get_the_time_term() -> None:
    table, time = torch.randn(4, 4, 6), time_table(4, 6)
    grids = [Grid(1, 4, 4), Grid(3, 4, 4), Grid(1, 2, 6)]
    image, film, last = pos_emb(table, time, grids, "bilinear").split([16, 48, 12])
    assert torch.equal(image, table.flatten(0, 1))
    for frame, rows in enumerate(film.split(16)):
        assert torch.equal(rows, image + time[frame])
    assert torch.equal(last, resample_table(table, 2, 6, "bilinear"))


def test_even_pairs_turn_by_the_column_and_odd_pairs_by_the_row() -> None:
    rope = rope_table([Grid(1, 1, 2), Grid(2, 3, 4)], 8, CPU)
    assert rope.shape == (2 + 24, 4)
    assert rope.dtype == torch.complex64
    row, column = 2, 3
    patch = rope[2 + 12 + row * 4 + column]  # second frame of the second segment: counted from 0 again
    theta = [1.0, 10_000 ** (-4 / 8)]
    want = [column * theta[0], row * theta[0], column * theta[1], row * theta[1]]
    assert patch.angle().tolist() == pytest.approx(want, abs=1e-6)
    assert torch.equal(rope[2:14], rope[14:26])  # frames share their angles


def test_apply_rope_turns_neighbouring_channels() -> None:
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])  # one patch, one head, pairs (1, 0) and (0, 2)
    quarter, half = complex(0, 1), complex(-1, 0)
    turned = apply_rope(x, torch.tensor([[quarter, half]], dtype=torch.complex64))
    assert turned.flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, -2.0])


def test_apply_rope_takes_views_of_the_packed_product_and_leaves_them_alone() -> None:
    packed = torch.randn(6, 3, 2, 8, dtype=torch.bfloat16)
    before = packed.clone()
    rope = rope_table([Grid(1, 2, 3)], 8, CPU)
    together = apply_rope(packed[:, :2], rope)
    assert together.dtype == torch.bfloat16
    assert torch.equal(together[:, 1], apply_rope(packed[:, 1].contiguous(), rope))
    assert torch.equal(packed, before)


def test_tables_of_one_frame_are_kept_and_shared() -> None:
    table, time = torch.randn(4, 4, 6), time_table(4, 6)
    frames = FrameTables(max_bytes=2**20)
    grids = [Grid(1, 2, 6), Grid(2, 2, 6), Grid(1, 6, 2)]
    first = pos_emb(table, time, grids, "bilinear", frames)
    assert frames.num_bytes == 2 * 12 * 6 * 4  # two sizes
    assert torch.equal(pos_emb(torch.zeros_like(table), time, grids, "bilinear", frames), first)  # nothing is made anew
    frames.clear()
    assert pos_emb(torch.zeros_like(table), time, [Grid(1, 2, 6)], "bilinear", frames).abs().max() == 0


def test_kept_tables_change_nothing() -> None:
    frames = FrameTables(max_bytes=2**20)
    grids = [Grid(1, 2, 6), Grid(3, 4, 4), Grid(1, 2, 6)]
    for _ in range(2):
        assert torch.equal(rope_table(grids, 72, CPU, frames), rope_table(grids, 72, CPU))


def test_the_least_recently_used_table_goes_first() -> None:
    made: list[tuple[int, int]] = []

    def make(h: int, w: int) -> torch.Tensor:
        made.append((h, w))
        return torch.zeros(h * w, dtype=torch.float32)

    frames = FrameTables(max_bytes=4 * 20)
    for h, w in [(2, 4), (2, 2), (2, 4), (2, 6), (2, 4), (2, 2), (10, 10)]:
        assert frames.get(h, w, (), make).numel() == h * w
        assert frames.num_bytes <= 80 or (h, w) == (10, 10)
    # (2, 6) drives out (2, 2), the older one; one table beyond the bound is kept alone.
    assert made == [(2, 4), (2, 2), (2, 6), (2, 2), (10, 10)]
    assert frames.num_bytes == 400
