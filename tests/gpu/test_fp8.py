"""Products and attention in 8 bits on a GPU: kernels against their plain versions, the tower against bfloat16."""

import copy
import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from encoder import Engine, Grid, NonFiniteResult, Segment, SetupError, load_config, pack, split
from encoder.attention import BACKENDS, TurningAttend, resolve, start
from encoder.fusion import OWN_TOLERANCES, ROW_DIFFERENCES, choose_row_ops, names
from encoder.ops import PLAIN, Norm
from encoder.quantization import (
    FP8,
    PLAIN_ROWS,
    check_quantization,
    emulated_product,
    gelu_scale,
    linear_gelu_rows,
    product,
    quantize,
    quantize_rows,
    unscaled_product,
)
from tests.ragged import attend, exact, packed_qkv, relative_error

GPU = torch.device("cuda", 0)


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        check_quantization("fp8", GPU, torch.bfloat16)
    except SetupError as error:
        return str(error)
    return None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # FlashInfer compiles its kernels on first use
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SPECS = ["demo:k3", "demo:k25", "demo:k3-tiny", "demo:k25-tiny"]
TINY = SPECS[2:]
SMALL = [Grid(1, 16, 16), Grid(4, 4, 6), Grid(1, 2, 2), Grid(1, 8, 12)]
FP8_ATTENTION = next(entry for entry in BACKENDS if entry.name == "flashinfer_fp8")
BUDGET = 0.1  # relative L2 error of an item of a tiny tower against bfloat16, as in tests/unit/test_quantization.py


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def turns(rows):
    """As `rope_table`, for heads of 128."""
    angles = 100 * random(rows, 64, dtype=torch.float32, seed=9)
    return torch.polar(torch.ones_like(angles), angles)


def offsets(lengths):
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=GPU)


def random_batch(engine, grids, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(grid.num_patches, 3, 14, 14) for grid in grids]
    pixels = [torch.randint(0, 256, size, generator=generator, dtype=torch.uint8) for size in sizes]
    return pack([Segment(p, g) for p, g in zip(pixels, grids, strict=True)], engine.config)


@pytest.mark.parametrize("step", ROW_DIFFERENCES)
@pytest.mark.parametrize("spec", SPECS)
def test_fused_steps_are_plain_steps(spec, step):
    from encoder.fp8 import FUSED_ROWS

    allowed = OWN_TOLERANCES.get(step, 2e-3)
    assert ROW_DIFFERENCES[step](FUSED_ROWS, load_config(spec), GPU, torch.bfloat16) <= allowed


@pytest.mark.parametrize("spec", SPECS)
def test_every_step_is_fused(spec):
    from encoder.fp8 import FUSED_ROWS

    assert choose_row_ops(load_config(spec), GPU, torch.bfloat16) == FUSED_ROWS


@pytest.mark.parametrize("width", [16, 72, 1024, 1536, 4096, 4304])
def test_a_row_is_rounded_as_pytorch_rounds_it(width):
    from encoder.fp8 import FUSED_ROWS

    x = random(300, width) * torch.logspace(-20, 20, 300, device=GPU)[:, None].bfloat16()
    x[7] = 0
    got, want = FUSED_ROWS.quantize_rows(x), quantize_rows(x)
    assert torch.allclose(got.scale, want.scale, rtol=1e-6, atol=0)
    different = got.values.view(torch.uint8) != want.values.view(torch.uint8)
    assert different.float().mean() < 1e-3  # a division may differ in its last bit, where that decides a rounding
    steps = got.values.view(torch.uint8).int() - want.values.view(torch.uint8).int()
    assert steps.abs().max() <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_stays_in_its_row(value):
    from encoder.fp8 import FUSED_ROWS

    x = random(5, 64)
    x[2, 3] = value
    weight = quantize_rows(random(32, 64))
    out = product(FUSED_ROWS.quantize_rows(x), weight, None, torch.bfloat16)
    assert not out[2].isfinite().any()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 64, 300, 5476])
@pytest.mark.parametrize(("k", "n"), [(1024, 4608), (1536, 1024), (4304, 1152), (144, 432), (16, 16)])
def test_the_device_multiplies_what_the_8_bits_stand_for(rows, k, n, has_bias):
    x, weight = quantize_rows(random(rows, k)), quantize_rows(random(n, k, seed=1))
    bias = random(n, seed=2) if has_bias else None
    got = product(x, weight, bias, torch.bfloat16)
    assert relative_error(got, emulated_product(x, weight, bias, torch.float32)) < 5e-3


@pytest.mark.parametrize("rows", [1, 64, 300, 5476])
@pytest.mark.parametrize(("k", "n"), [(1536, 1024), (1024, 4096), (4096, 1024), (128, 256)])
def test_an_unscaled_product_stands_for_the_scaled_one(rows, k, n):
    x, weight = quantize_rows(random(rows, k)), quantize_rows(random(n, k, seed=1))
    got = unscaled_product(x, weight, torch.ones((), device=GPU), torch.bfloat16).wide()
    assert relative_error(got, emulated_product(x, weight, None, torch.float32)) < 5e-3


@pytest.fixture(scope="module", params=TINY)
def engines(request):
    return tuple(
        Engine.load(request.param, device=GPU, attention_backend="sdpa", quantization=name) for name in (None, "fp8")
    )


class TestTower:
    def test_items_stay_near_those_of_bfloat16(self, engines):
        exact_engine, engine = engines
        batch = random_batch(engine, SMALL)
        for got, want in zip(split(engine.run(batch), batch), split(exact_engine.run(batch), batch), strict=True):
            assert 0.01 < relative_error(got, want) < BUDGET

    def test_says_so(self, engines):
        exact_engine, engine = engines
        assert (exact_engine.quantization, engine.quantization) == (None, "fp8")
        assert exact_engine.fingerprint != engine.fingerprint
        assert exact_engine.weights_sha256 == engine.weights_sha256
        assert set(names(engine.model.ops).values()) == {"fused"}
        assert engine.model.state_dict().keys() == exact_engine.model.state_dict().keys()
        assert engine.model.vision_tower.encoder.blocks[0].wqkv.weight.dtype == FP8

    def test_fused_is_plain(self, engines):
        exact_engine, engine = engines
        model = copy.deepcopy(exact_engine.model)
        quantize(model, PLAIN_ROWS)
        batch = random_batch(engine, SMALL)
        assert relative_error(engine.run(batch), replace(exact_engine, model=model).run(batch)) < 0.05

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
    def test_nothing_waits_for_the_device(self, engines):
        engine = engines[1]
        batch = random_batch(engine, SMALL)
        engine.run(batch)
        try:
            torch.cuda.set_sync_debug_mode("error")
            engine.forward(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_numbers_that_are_not_finite_are_refused(self, engines):
        engine = engines[1]
        batch = random_batch(engine, SMALL)
        pixels = torch.zeros(batch.pixel_values.shape, dtype=torch.float32)
        pixels[0] = math.nan
        with pytest.raises(NonFiniteResult):
            engine.run(replace(batch, pixel_values=pixels))


def test_graphs_equal_eager():
    engine = Engine.load("demo:k3-tiny", device=GPU, attention_backend="triton", quantization="fp8")
    batches = [random_batch(engine, grids) for grids in (SMALL, SMALL[:1], [Grid(1, 2, 2)], [Grid(1, 30, 32)])]
    eager = [engine.run(batch).clone() for batch in batches]
    engine.warm_up()
    assert engine.graphs is not None
    assert engine.graphs.buckets
    for batch, want in zip(batches, eager, strict=True):
        assert engine.graphs.fits(batch.lengths)
        # The products of a graph have more rows, so their sums may run in another order; one rounding to 8 bits follows
        # another from there.
        assert relative_error(engine.run(batch), want) < 0.05


@pytest.mark.parametrize("rows", [1, 127, 300, 5476])
def test_fc0_as_one_kernel(rows):
    from encoder.fp8_gemm import linear_gelu_rows as fused

    norm = Norm("rmsnorm", 1024, 1e-6).to(GPU).requires_grad_(False)
    norm.weight.copy_(1 + 0.3 * random(1024, dtype=torch.float32))
    x, weight = PLAIN_ROWS.add_norm_rows(random(rows, 1024), None, norm), quantize_rows(random(4096, 1024, seed=1) / 32)
    scale = gelu_scale(norm, weight)
    got, want = fused(x, weight, scale), linear_gelu_rows(x, weight, scale)
    assert torch.equal(got.scale, want.scale)
    assert relative_error(got.values.float(), want.values.float()) < 1e-2
    again = fused(x, weight, 2 * scale)  # by the compiled kernel that the first call left
    assert relative_error(again.values.float() * 2, want.values.float()) < 1e-2
    with pytest.raises(ValueError, match="4080 channels: allowed are multiples of 256"):
        fused(x, quantize_rows(random(4080, 1024)), scale)


def test_the_tower_with_fc0_as_one_kernel():
    from encoder.fp8 import FUSED_ROWS
    from encoder.fp8_gemm import linear_gelu_rows as fused

    engine = Engine.load("demo:k3", device=GPU, attention_backend="sdpa")
    batch = random_batch(engine, SMALL)
    results = []
    for ops in (FUSED_ROWS, replace(FUSED_ROWS, linear_gelu_rows=fused, one_kernel_from=0)):
        model = copy.deepcopy(engine.model)
        with torch.inference_mode():
            quantize(model, ops)
        results.append(replace(engine, model=model).run(batch))
    assert 0 < relative_error(*results) < 0.1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SetupError, match=f"goes with dtype bfloat16, not {dtype}"):
        Engine.load("demo:k3-tiny", device=GPU, dtype=dtype, quantization="fp8")


@pytest.fixture(scope="module")
def backend():
    if reason := FP8_ATTENTION.why_not(GPU, torch.bfloat16, 128):
        pytest.skip(f"flashinfer_fp8: {reason}")
    return FP8_ATTENTION.load(GPU, torch.bfloat16, 12, 128)


class TestAttention:
    @pytest.mark.parametrize("lengths", [[5476], [4700, 300, 193], [4500, 4, 36], [4100, 4096]], ids=str)
    def test_long_segments_are_computed_in_8_bits(self, backend, lengths):
        q, k, v = packed_qkv(lengths, 12, 128, torch.bfloat16, GPU)
        out, want = attend(backend, lengths, q, k, v), exact(lengths, q, k, v)
        assert out.dtype == torch.bfloat16
        for got_part, want_part in zip(out.split(lengths), want.split(lengths), strict=True):
            assert 0.01 < relative_error(got_part, want_part) < FP8_ATTENTION.tolerance

    @pytest.mark.parametrize("lengths", [[4, 300, 65, 1, 2052, 576], [256] * 5, [4], [340, 96]], ids=str)
    def test_shorter_ones_are_not(self, backend, lengths):
        q, k, v = packed_qkv(lengths, 12, 128, torch.bfloat16, GPU)
        assert relative_error(attend(backend, lengths, q, k, v), exact(lengths, q, k, v)) < 0.01

    @pytest.mark.parametrize("lengths", [[5476], [4700, 300, 193]], ids=str)
    def test_rotating_on_the_way_is_rotating_before(self, backend, lengths):
        qkv = torch.stack(packed_qkv(lengths, 12, 128, torch.bfloat16, GPU), 1)
        rope = turns(len(qkv))
        plan = backend.plan(lengths, offsets(lengths))
        assert isinstance(plan, TurningAttend)
        out = plan.turn(qkv, rope)
        q, k = PLAIN.rotate(qkv, rope)
        for got_part, want_part in zip(out.split(lengths), exact(lengths, q, k, qkv[:, 2]).split(lengths), strict=True):
            assert 0.01 < relative_error(got_part, want_part) < FP8_ATTENTION.tolerance

    def test_heads_of_any_size_keep_their_precision(self, backend):
        lengths = [4500]
        q, k, v = packed_qkv(lengths, 12, 128, torch.bfloat16, GPU)
        # Scales of q and k are at least 1/4: heads whose queries are far below 1 lose them, whatever their keys are.
        sizes = torch.logspace(-1, 1, 12, device=GPU)[:, None].bfloat16()
        q, k, v = q / sizes, k * sizes, v * sizes
        out, want = attend(backend, lengths, q, k, v), exact(lengths, q, k, v)
        for head in range(12):
            assert relative_error(out[:, head], want[:, head]) < FP8_ATTENTION.tolerance

    def test_a_neighbour_changes_next_to_nothing(self, backend):
        q, k, v = packed_qkv([4500, 616], 12, 128, torch.bfloat16, GPU)
        alone = attend(backend, [4500], q[:4500], k[:4500], v[:4500])
        for x in (q, k, v):
            x[4500:] *= 20
        assert relative_error(attend(backend, [4500, 616], q, k, v)[:4500], alone) < 2e-3

    def test_auto_never_takes_it(self):
        resolution = resolve("auto", device=GPU, dtype=torch.bfloat16, head_dim=128, family="kimi_k3")
        assert "flashinfer_fp8" not in [entry.name for entry in resolution.candidates]

    def test_passes_its_own_self_test(self, backend):
        resolution = resolve("flashinfer_fp8", device=GPU, dtype=torch.bfloat16, head_dim=128, family="kimi_k3")
        started = start(resolution, num_heads=12, head_dim=128, device=GPU, dtype=torch.bfloat16)
        assert 0.01 < started.self_test["flashinfer_fp8"] < FP8_ATTENTION.tolerance

    def test_the_fingerprint_tells(self, backend):
        engines = [
            Engine.load("demo:k3-tiny", device=GPU, attention_backend=name, quantization=quantization)
            for name in ("sdpa", "flashinfer_fp8")
            for quantization in (None, "fp8")
        ]
        assert len({engine.fingerprint for engine in engines}) == 4


def test_heads_are_rounded_as_pytorch_rounds_them():
    from encoder.attention.fp8_heads import plain_quantize_heads, quantize_heads

    qkv = random(1000, 3, 12, 128)
    qkv[:, 0] *= 37
    got, want = quantize_heads(*qkv.unbind(1)), plain_quantize_heads(*qkv.unbind(1))
    assert torch.equal(got.scale, want.scale)
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 1000, 5476])
def test_heads_are_rotated_on_the_way(rows):
    from encoder.attention.fp8_heads import (
        plain_turn_and_quantize_heads,
        turn_and_quantize_heads,
        turns_right,
    )

    assert turns_right(GPU, torch.bfloat16, 12, 128)
    qkv, rope = 3 * random(rows, 3, 12, 128), turns(rows)
    got, want = turn_and_quantize_heads(qkv, rope), plain_turn_and_quantize_heads(qkv, rope)
    assert torch.equal(got.scale, want.scale)
    different = got.values.view(torch.uint8) != want.values.view(torch.uint8)
    assert different.float().mean() < 1e-3  # products and sums in one rounding or in two


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_heads_that_are_not_finite_stay_so(part, value):
    from encoder.attention.fp8_heads import turn_and_quantize_heads

    qkv = random(100, 3, 2, 128)
    qkv[3, part, 1, 4] = value
    heads = turn_and_quantize_heads(qkv, turns(100))
    meant = heads.values.float() * heads.scale[:, None, :, None]
    assert not meant[part, 3, 1].isfinite().all()
