"""What one graph reads for every mix of segments: a padded list of tiles. Capture and replay are in tests/gpu."""

import itertools

import numpy as np
import pytest
import torch

from tests.ragged import attend, packed_qkv

pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")

from encoder.attention.triton_varlen import TritonAttention, list_tiles
from encoder.graphs import BUCKETS, EXTRA_TILES, padded_tiles

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: tests/gpu/test_tower.py")


def test_padding_follows_the_real_tiles():
    tiles = padded_tiles([4, 100], 64, 5)
    assert tiles[:3].tolist() == list_tiles([4, 100], 64).tolist() == [[4, 100, 0, 2], [4, 100, 0, 2], [0, 4, 2, 1]]
    assert tiles[3:].tolist() == [[0, 0, 3, 1], [0, 0, 4, 1]]


def test_a_padded_list_gives_the_same_and_reads_nothing_beyond_the_batch():
    lengths = [36, 4, 20]
    backend = TritonAttention(torch.device("cpu"), torch.float32, 2, 72)
    want = attend(backend, lengths, *packed_qkv(lengths, 2, 72, torch.float32))
    bucket = 128
    padded = torch.full((bucket, 3, 2, 72), float("nan"))
    for i, part in enumerate(packed_qkv(lengths, 2, 72, torch.float32)):
        padded[: sum(lengths), i] = part
    tiling = backend.choose_tiling([bucket])
    tiles = torch.from_numpy(padded_tiles(lengths, tiling.block_m, bucket // tiling.block_m + EXTRA_TILES))
    with np.errstate(invalid="ignore"):  # an empty tile divides 0 by 0 and stores nothing of it
        got = backend.over(tiles, tiling)(*padded.unbind(1))
    assert torch.equal(got[: sum(lengths)], want)


def test_buckets_waste_at_most_half():
    assert list(BUCKETS) == sorted(BUCKETS)
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(BUCKETS))
