"""`split` undoes `pack`, for any mix of images and chunks, raw and normalised."""

from itertools import pairwise

import hypothesis.strategies as st
import torch
from hypothesis import given

from encoder.config import parse_config
from encoder.grid import Grid
from encoder.segments import Segment, normalize, pack, split

# Patches of 2 pixels: the layout does not depend on their side, and the arrays stay small.
CONFIG = parse_config(
    {"model_type": "kimi_k3", "vision_config": {"patch_size": 2}}, {"media_proc_cfg": {"patch_size": 2}}, source="k3"
)

even = st.integers(1, 4).map(lambda half: 2 * half)
grids = st.builds(Grid, st.integers(1, 4), even, even)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    grid = draw(grids)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    raw = torch.randint(0, 256, (grid.num_patches, 3, 2, 2), dtype=torch.uint8, generator=generator)
    return Segment(raw if draw(st.booleans()) else normalize(raw, CONFIG), grid)


@given(st.lists(segments(), max_size=6))
def test_packed_pixels_are_the_segments_in_order(items: list[Segment]) -> None:
    batch = pack(items, CONFIG)
    assert batch.grids == [item.grid_thw for item in items]
    raw = all(item.pixel_values.dtype == torch.uint8 for item in items)
    assert batch.pixel_values.dtype == (torch.uint8 if raw else torch.float32)
    for item, (start, end) in zip(items, pairwise(batch.cu_seqlens), strict=True):
        expected = item.pixel_values if raw else normalize(item.pixel_values, CONFIG)
        assert torch.equal(batch.pixel_values[start:end], expected)


@given(st.lists(segments(), max_size=6))
def test_offsets_are_the_running_sum_of_lengths(items: list[Segment]) -> None:
    batch = pack(items, CONFIG)
    assert len(batch) == len(items)
    assert batch.lengths == [item.grid_thw.t * item.grid_thw.h * item.grid_thw.w for item in items]
    assert batch.cu_seqlens[0] == 0
    assert [end - start for start, end in pairwise(batch.cu_seqlens)] == batch.lengths
    assert batch.cu_seqlens[-1] == len(batch.pixel_values)


@given(st.lists(segments(), max_size=6))
def test_split_gives_every_row_to_its_segment(items: list[Segment]) -> None:
    batch = pack(items, CONFIG)
    # A stand-in for the tower: each output row holds the number of the segment it came from, and its own position.
    rows = [
        (float(i), float(j))
        for i, item in enumerate(items)
        for j in range((item.grid_thw.h // 2) * (item.grid_thw.w // 2))
    ]
    parts = split(torch.tensor(rows).view(len(rows), 2), batch)
    assert len(parts) == len(items)
    for i, (item, part) in enumerate(zip(items, parts, strict=True)):
        tokens = item.grid_thw.h * item.grid_thw.w // 4
        assert part.tolist() == [[float(i), float(j)] for j in range(tokens)]


@given(st.lists(segments(), max_size=4), st.lists(segments(), max_size=4))
def test_packing_in_company_changes_no_segment(some: list[Segment], others: list[Segment]) -> None:
    alone, together = pack(some, CONFIG), pack(some + others, CONFIG)
    shared = together.pixel_values[: sum(alone.lengths)]
    assert torch.equal(normalize(shared, CONFIG), normalize(alone.pixel_values, CONFIG))
    assert together.num_tokens[: len(some)] == alone.num_tokens
