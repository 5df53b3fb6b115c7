"""What one graph reads for every mix of segments: a padded list of tiles; and when graphs serve, on a stand-in that
repeats launches. Capture and replay on a device are in tests/gpu."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ragged import attend, packed_qkv

pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")

from encoder import Engine, Segment, graphs
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


class Repeating:
    """Stands in for a device: repeats the launches into the memory of the first time."""

    def __init__(self, spoil=None, fail_at=()):
        self.spoil, self.fail_at, self.recorded = spoil, set(fail_at), 0

    def record(self, launches):
        self.recorded += 1
        if self.recorded in self.fail_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = launches().clone()

        def replay():
            out.copy_(launches())
            if self.spoil is not None:
                self.spoil(out)

        return replay, out


@pytest.fixture(scope="module")
def engine():
    found = Engine.load("demo:k3-tiny", attention_backend="triton")
    found.model.vision_tower.encoder.blocks = found.model.vision_tower.encoder.blocks[:1]  # the interpreter is slow
    return found


@pytest.fixture(scope="module", autouse=True)
def few_buckets():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(graphs, "BUCKETS", (32, 64))
        monkeypatch.setattr(graphs, "EXTRA_TILES", 3)
        yield


def captured(engine, **faults):
    with torch.inference_mode(), np.errstate(invalid="ignore"):
        blocks = graphs.BlockGraphs(engine.model, engine.device, engine.dtype, Repeating(**faults))
        blocks.capture()
    return replace(engine, graphs=blocks)


def segments(*grids):
    generator = torch.Generator().manual_seed(0)
    sizes = [(t * h * w, 3, 14, 14) for t, h, w in grids]
    pixels = [torch.randint(0, 256, size, generator=generator, dtype=torch.uint8) for size in sizes]
    return [Segment(each, grid) for each, grid in zip(pixels, grids, strict=True)]


def encode(engine, batch):
    with np.errstate(invalid="ignore"):
        return engine.encode(batch)


@pytest.fixture(scope="module")
def fast(engine, few_buckets):
    return captured(engine)


class TestOnAStandInForADevice:
    def test_every_bucket_serves_and_gives_what_the_eager_blocks_give(self, engine, fast):
        assert fast.graphs.buckets == [32, 64]
        for grids in ([(1, 4, 6)], [(1, 4, 8)], [(1, 2, 2), (2, 2, 4), (1, 4, 4)], [(1, 8, 8)]):
            assert fast.graphs.fits([t * h * w for t, h, w in grids])
            for got, want in zip(encode(fast, segments(*grids)), engine.encode(segments(*grids)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_a_small_picture_after_a_large_one_reads_none_of_its_rows(self, fast):
        small, large = segments((1, 2, 2), (1, 8, 8))
        (alone,) = encode(fast, [small])
        encode(fast, [large])
        with torch.inference_mode():
            fast.graphs._x[4:].fill_(float("nan"))
            fast.graphs._rope[4:].fill_(float("nan"))
        (after,) = encode(fast, [small])
        assert torch.equal(after, alone)

    def test_what_does_not_fit_is_launched_one_by_one(self, engine, fast):
        assert not fast.graphs.fits([68])
        assert not fast.graphs.fits([4] * 17)
        assert fast.attention_for([68]) == "triton"
        assert fast.attention_rules() == [("up to 64 patches, as a CUDA graph", "triton"), ("all", "triton")]
        (got,), (want,) = encode(fast, segments((1, 2, 34))), engine.encode(segments((1, 2, 34)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("spoil", [lambda out: out.mul_(1.01), lambda out: out[3].fill_(float("nan"))])
    def test_one_that_differs_stays_out_of_service(self, engine, spoil, caplog):
        fast = captured(engine, spoil=spoil)
        assert fast.graphs.buckets == []
        assert "CUDA graph of 64 patches is out of service: differs by" in caplog.text

    def test_a_device_that_cannot_record_leaves_the_rest_to_eager_launches(self, engine, caplog):
        fast = captured(engine, fail_at=[2])
        assert fast.graphs.buckets == [64]
        assert "no CUDA graph of 32 patches: RuntimeError" in caplog.text
        assert fast.graphs.fits([4])

    def test_numbers_that_are_not_finite_end_its_service(self, engine, caplog):
        fast = captured(engine)
        found = fast.graphs._graphs[64]
        broken = found._replace(replay=lambda: found.out.fill_(float("nan")))
        fast.graphs._graphs[64] = broken
        (got,), (want,) = encode(fast, segments((1, 8, 8))), engine.encode(segments((1, 8, 8)))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert fast.graphs.buckets == []
        assert "CUDA graphs are out of service: gave values that are not finite" in caplog.text
