"""Every backend that can run on a CPU against the formula in float64; Triton's kernel runs under its interpreter."""

import numpy as np
import pytest
import torch

from encoder.attention import BACKENDS, Entry
from tests.ragged import attend, exact, packed_qkv, plain, relative_error

CPU = torch.device("cpu")
RAGGED = [4, 65, 1, 300]
ON_CPU = [entry for entry in BACKENDS if entry.name in ("triton", "sdpa", "reference")]


@pytest.fixture(params=ON_CPU, ids=lambda entry: entry.name)
def entry(request: pytest.FixtureRequest) -> Entry:
    return request.param


def test_each_of_them_can_run_here(entry):
    assert entry.why_not(CPU, torch.float32, 128) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 128), (2, 72), (3, 64), (2, 32), (1, 20)])
def test_ragged_segments(entry, num_heads, head_dim, dtype):
    backend = entry.load(CPU, dtype, num_heads, head_dim)
    q, k, v = packed_qkv(RAGGED, num_heads, head_dim, dtype)
    assert not q.is_contiguous()
    expected = exact(RAGGED, q, k, v)
    out = attend(backend, RAGGED, q, k, v)
    assert out.shape == q.shape
    assert out.dtype == dtype
    assert relative_error(out, expected) <= 2 * relative_error(plain(RAGGED, q, k, v), expected)


@pytest.mark.parametrize("lengths", [[1], [4], [36, 36, 36], [65, 65, 4, 4, 300], [300]], ids=str)
def test_other_layouts(entry, lengths):
    backend = entry.load(CPU, torch.float32, 2, 32)
    q, k, v = packed_qkv(lengths, 2, 32, torch.float32)
    assert relative_error(attend(backend, lengths, q, k, v), exact(lengths, q, k, v)) < 1e-6


def test_contiguous_inputs(entry):
    backend = entry.load(CPU, torch.float32, 2, 64)
    q, k, v = packed_qkv(RAGGED, 2, 64, torch.float32)
    from_views = attend(backend, RAGGED, q, k, v)
    from_copies = attend(backend, RAGGED, q.contiguous(), k.contiguous(), v.contiguous())
    torch.testing.assert_close(from_copies, from_views, rtol=0, atol=1e-6)


def test_no_segments(entry):
    backend = entry.load(CPU, torch.float32, 2, 64)
    q, k, v = packed_qkv([], 2, 64, torch.float32)
    assert attend(backend, [], q, k, v).shape == (0, 2, 64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("foreign", [float("nan"), float("inf"), 100.0])
def test_segments_do_not_see_each_other(entry, foreign):
    """Whatever the last but one segment holds, the others come out bit by bit the same."""
    backend = entry.load(CPU, torch.float32, 2, 64)
    q, k, v = packed_qkv(RAGGED, 2, 64, torch.float32)
    before = attend(backend, RAGGED, q, k, v)
    changed = slice(4, 69)
    for x in (q, k, v):
        x[changed] = foreign
    after = attend(backend, RAGGED, q, k, v)
    others = [i for i in range(sum(RAGGED)) if i not in range(changed.start, changed.stop)]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[changed], before[changed])


def test_a_segment_alone_equals_itself_in_company(entry):
    backend = entry.load(CPU, torch.float32, 2, 64)
    q, k, v = packed_qkv(RAGGED, 2, 64, torch.float32)
    together = attend(backend, RAGGED, q, k, v)[-300:]
    alone = attend(backend, [300], q[-300:], k[-300:], v[-300:])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


def test_scores_far_from_zero(entry):
    """exp(score) overflows float32 here unless the largest score is subtracted first."""
    backend = entry.load(CPU, torch.float32, 1, 64)
    q, k, v = packed_qkv([300, 4], 1, 64, torch.float32)
    q, k = q * 20, k + 10
    expected = exact([300, 4], q, k, v)
    assert relative_error(attend(backend, [300, 4], q, k, v), expected) < 1e-3


def test_reference_cuts_long_segments(monkeypatch):
    from encoder.attention import reference

    q, k, v = packed_qkv([300, 4], 2, 32, torch.float32)
    whole = attend(reference.ReferenceAttention(), [300, 4], q, k, v)
    monkeypatch.setattr(reference, "SCORE_BYTES", 4 * 2 * 300 * 7)  # seven queries at a time
    torch.testing.assert_close(attend(reference.ReferenceAttention(), [300, 4], q, k, v), whole, rtol=0, atol=1e-6)


def test_tiles_cover_every_query_once_longest_segment_first():
    from encoder.attention.triton_varlen import list_tiles

    tiles = list_tiles([4, 300, 65], 128)
    assert tiles.tolist() == [[4, 300, 0, 3], [4, 300, 0, 3], [4, 300, 0, 3], [304, 65, 3, 1], [0, 4, 4, 1]]
    assert tiles.dtype == np.int32
    assert list_tiles([], 128).shape == (0, 4)


@pytest.mark.parametrize(
    ("head_dim", "columns", "itemsize", "lengths", "shared_kib", "expected"),
    [
        (128, 128, 2, [256] * 64, 227, (64, 64, 4, 3)),
        (128, 128, 2, [16384], 227, (128, 128, 8, 3)),
        (128, 128, 2, [16384], 163, (64, 64, 4, 3)),  # an A100 has too little on-chip memory for the larger one
        (128, 128, 2, [16384], 99, (64, 64, 4, 2)),  # and so have cards for graphics
        (72, 128, 2, [256] * 64, 227, (64, 64, 4, 3)),
        (72, 128, 2, [1024] * 4, 227, (128, 128, 8, 3)),
        (64, 64, 2, [16384], 227, (64, 64, 4, 3)),
        (128, 128, 4, [16384], 227, (32, 64, 4, 2)),
        (256, 256, 4, [256], 227, (32, 32, 4, 2)),
        (256, 256, 4, [256], 99, (16, 16, 4, 1)),
        (256, 256, 4, [256], 48, (16, 16, 4, 1)),  # nothing fits: the self-test will say so
        (128, 128, 2, [], 227, (64, 64, 4, 3)),
    ],
)
def test_tiling_fits_the_device(head_dim, columns, itemsize, lengths, shared_kib, expected):
    from encoder.attention.triton_varlen import choose_tiling

    assert choose_tiling(lengths, head_dim, columns, itemsize, shared_kib * 1024) == expected
