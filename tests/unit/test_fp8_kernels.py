"""The kernels that quantise against the plain steps, on a CPU under Triton's interpreter.

What they compute is tested here; that a GPU rounds it to 8 bits as PyTorch does is in tests/gpu/test_fp8.py, because
the interpreter does not.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from encoder import Engine, Grid, Segment, load_config, pack
from encoder.fusion import OWN_TOLERANCES, ROW_DIFFERENCES, TOLERANCES, choose_row_ops, names
from encoder.ops import PLAIN, Norm, Unscaled
from encoder.quantization import PLAIN_ROWS, linear_gelu_rows, quantize

pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")

from encoder.attention import TurningAttend
from encoder.attention.fp8_heads import (
    packed,
    plain_quantize_heads,
    plain_turn_and_quantize_heads,
    quantize_heads,
    turn_and_quantize_heads,
    turns_right,
)
from encoder.fp8 import FUSED_ROWS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: tests/gpu/test_fp8.py")

CPU = torch.device("cpu")
SPECS = ["demo:k3", "demo:k25", "demo:k3-tiny", "demo:k25-tiny"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(got, want):
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def turns(rows, pairs):
    return torch.polar(torch.ones(rows, pairs), 100 * random(rows, pairs, seed=5))


def meant(heads):
    return heads.values.float() * heads.scale[:, None, :, None]


def relative_error(got, want):
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", ROW_DIFFERENCES)
@pytest.mark.parametrize("spec", SPECS)
def test_fused_is_plain(spec, step, dtype):
    # In float32 one value in thousands may lie between two of 8 bits; in bfloat16 the interpreter cuts sums off.
    allowed = {torch.float32: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert ROW_DIFFERENCES[step](FUSED_ROWS, load_config(spec), CPU, dtype) <= allowed


def values_of(product):
    """Without the scales that are yet to be applied."""
    return product.values if isinstance(product, Unscaled) else product


@pytest.mark.parametrize("step", ROW_DIFFERENCES)
def test_a_wrong_step_is_told_from_the_right_one(step):
    mistakes = {
        "quantize_rows": lambda x: PLAIN_ROWS.quantize_rows(x)._replace(scale=PLAIN_ROWS.quantize_rows(x).scale * 1.02),
        "gelu_rows": lambda x: PLAIN_ROWS.gelu_rows(values_of(x)),
        "add_norm_rows": lambda x, delta, norm: PLAIN_ROWS.add_norm_rows(x, values_of(delta), norm),
        "linear_gelu_rows": lambda x, weight, scale: linear_gelu_rows(x, weight, 1.02 * scale)._replace(scale=scale),
    }
    # K3's layers have no bias, which the one kernel asks for; K2.5's norms have one.
    config = load_config("demo:k3-tiny" if step == "linear_gelu_rows" else "demo:k25-tiny")
    right = replace(PLAIN_ROWS, linear_gelu_rows=linear_gelu_rows)
    assert ROW_DIFFERENCES[step](right, config, CPU, torch.bfloat16) == 0
    wrong = replace(right, **{step: mistakes[step]})
    allowed = OWN_TOLERANCES.get(step, TOLERANCES[torch.bfloat16])
    assert ROW_DIFFERENCES[step](wrong, config, CPU, torch.bfloat16) > allowed


def test_a_step_that_fails_is_replaced_and_logged(monkeypatch, caplog):
    def failing(*_):
        raise RuntimeError("does not compile")

    monkeypatch.setattr("encoder.fp8.FUSED_ROWS", replace(FUSED_ROWS, gelu_rows=failing))
    chosen = choose_row_ops(load_config("demo:k3-tiny"), CPU, torch.float32)
    assert chosen == replace(FUSED_ROWS, gelu_rows=PLAIN_ROWS.gelu_rows)
    assert chosen.linear_gelu_rows is not None
    assert [record.getMessage() for record in caplog.records] == [
        "fused gelu_rows is out of service on cpu: failed: RuntimeError"
    ]


def test_a_row_need_not_be_side_by_side_with_the_next():
    x = random(7, 3, 64)[:, 1]
    assert x.stride() == (192, 1)
    for got in (FUSED_ROWS.quantize_rows(x), FUSED_ROWS.quantize_rows(x.t().contiguous().t())):
        assert same_bits(got.values, PLAIN_ROWS.quantize_rows(x).values)


@pytest.mark.parametrize("ops", [PLAIN_ROWS, FUSED_ROWS], ids=["plain", "fused"])
def test_a_norm_alone_leaves_the_stream_alone(ops):
    norm = Norm("rmsnorm", 64, 1e-6).requires_grad_(False)
    norm.weight.fill_(2.0)
    x = random(3, 64)
    before = x.clone()
    rows = ops.add_norm_rows(x, None, norm)
    assert torch.equal(x, before)
    want = norm(x)
    assert float((rows.values.float() * rows.scale - want).norm() / want.norm()) < 0.04


def test_scales_of_a_product_are_applied_on_the_way():
    values, row, channel = random(5, 64), 0.5 + random(5, 1, seed=1).abs(), 0.5 + random(64, 1, seed=2).abs()
    got = FUSED_ROWS.gelu_rows(Unscaled(values, row, channel))
    want = PLAIN_ROWS.gelu_rows(values * row * channel.t())
    assert torch.allclose(got.scale, want.scale, rtol=1e-5)
    assert (got.values.view(torch.uint8) != want.values.view(torch.uint8)).float().mean() < 0.02


def test_extremes_of_a_row():
    x = torch.zeros(5, 32)
    x[1] = 3e38
    x[2] = 1e-30
    x[3, 5] = float("inf")
    with np.errstate(invalid="ignore"):  # infinite over infinite, as it should be
        got, want = FUSED_ROWS.quantize_rows(x), PLAIN_ROWS.quantize_rows(x)
    assert torch.equal(got.scale, want.scale)
    assert same_bits(got.values[:3], want.values[:3])
    assert got.values.float()[3, 5].isnan()


@pytest.mark.parametrize("spec", ["demo:k3-tiny", "demo:k25-tiny"])
def test_the_fused_tower_is_the_plain_tower(spec):
    engine = Engine.load(spec, attention_backend="sdpa")
    grids = [Grid(1, 4, 6), Grid(4, 2, 4)]
    pixels = [torch.randint(0, 256, (grid.num_patches, 3, 14, 14), dtype=torch.uint8) for grid in grids]
    batch = pack([Segment(p, g) for p, g in zip(pixels, grids, strict=True)], engine.config)
    results = []
    for ops in (PLAIN_ROWS, FUSED_ROWS):
        model = copy.deepcopy(engine.model)
        quantize(model, ops)
        attend = engine.attention.plan(batch.lengths, torch.tensor(batch.cu_seqlens, dtype=torch.int32))
        with torch.inference_mode():
            results.append(model(batch.pixel_values, batch.grids, attend))
    plain, fused = results
    # A value between two of 8 bits may go either way, and what follows with it.
    assert float((fused - plain).norm() / plain.norm()) < 0.05
    assert set(names(model.ops).values()) == {"plain", "fused"}


class Turning(TurningAttend):
    """Attention in the numbers that 8 bits stand for."""

    def __init__(self, attend):
        self.attend = attend
        self.turned = 0

    def __call__(self, q, k, v):
        return self.attend(*meant(quantize_heads(q, k, v)))

    def turn(self, qkv, rope):
        self.turned += 1
        return self.attend(*meant(turn_and_quantize_heads(qkv, rope)))


def test_the_tower_lets_attention_rotate_where_it_can():
    engine = Engine.load("demo:k3-tiny", attention_backend="sdpa")
    grids = [Grid(1, 4, 6), Grid(4, 2, 4)]
    pixels = [torch.randint(0, 256, (grid.num_patches, 3, 14, 14), dtype=torch.uint8) for grid in grids]
    batch = pack([Segment(p, g) for p, g in zip(pixels, grids, strict=True)], engine.config)
    exact = engine.attention.plan(batch.lengths, torch.tensor(batch.cu_seqlens, dtype=torch.int32))
    turning = Turning(exact)
    with torch.inference_mode():
        got, one_by_one, want = (
            engine.model(batch.pixel_values, batch.grids, attend)
            for attend in (turning, lambda q, k, v: turning(q, k, v), exact)
        )
    assert turning.turned == engine.config.vision.num_layers
    assert 0.001 < relative_error(one_by_one, want) < 0.05
    assert relative_error(got, one_by_one) < relative_error(one_by_one, want)


class TestHeads:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_fused_is_plain(self, dtype):
        qkv = random(70, 3, 2, 128).to(dtype)
        qkv[:, 0] *= 3
        qkv[:, 1] *= 1e-3
        qkv[:, 2, 1] = 0
        got, want = quantize_heads(*qkv.unbind(1)), plain_quantize_heads(*qkv.unbind(1))
        assert torch.equal(got.scale, want.scale)
        assert same_bits(got.values, want.values)
        assert got.values.shape == (3, 70, 2, 128)

    @pytest.mark.parametrize("largest", [448.0, 448.5, 1.0, 3.5, 3.51, 1e-3, 60000.0])
    def test_a_scale_is_the_least_power_of_two_that_holds_the_head(self, largest):
        qkv = torch.full((5, 3, 1, 16), 1e-6)
        qkv[3, 2, 0, 2] = -largest
        heads = quantize_heads(*qkv.unbind(1))
        scale = float(heads.scale[2, 0])
        mantissa, _ = torch.frexp(heads.scale)
        assert (mantissa == 0.5).all()
        assert largest <= 448 * scale < 2 * largest
        assert float(heads.values[2, 3, 0, 2].float()) * scale == pytest.approx(-largest, rel=2**-4)

    @pytest.mark.parametrize("which", [0, 1])
    def test_scores_stay_far_above_that_of_a_key_that_is_not_there(self, which):
        for largest in (1e-3, 4.0, 1000.0):
            qkv = torch.full((5, 3, 1, 128), largest)
            scale = float(quantize_heads(*qkv.unbind(1)).scale[which, 0])
            assert scale == max(0.25, 2.0 ** math.ceil(math.log2(largest / 448)))
        missing = -5e4 * 0.25**2 / 128**0.5  # what FlashInfer's mask becomes at worst
        assert missing < -250

    def test_a_neighbour_does_not_change_what_counts(self):
        qkv, neighbour = random(9, 3, 2, 64), 300 * random(20, 3, 2, 64, seed=1)
        alone = quantize_heads(*qkv.unbind(1))
        together = quantize_heads(*torch.cat([qkv, neighbour]).unbind(1))
        assert not torch.equal(alone.scale, together.scale)
        a, b = (heads.values[:, :9].float() * heads.scale[:, None, :, None] for heads in (alone, together))
        counts = qkv.transpose(0, 1).abs() > 0.1
        assert torch.equal(a[counts], b[counts])

    @pytest.mark.parametrize("rows", [1, 16, 70])
    def test_rotated_on_the_way_is_rotated_before(self, rows):
        qkv, rope = random(rows, 3, 2, 128), turns(rows, 64)
        qkv[:, 1] *= 500
        before = qkv.clone()
        got = turn_and_quantize_heads(qkv, rope)
        assert torch.equal(qkv, before)
        want = meant(plain_quantize_heads(*PLAIN.rotate(qkv, rope), qkv[:, 2]))
        assert relative_error(meant(got), want) < 2e-3  # a last bit decides a rounding here and there
        plain = plain_turn_and_quantize_heads(qkv, rope)
        assert torch.equal(got.scale, plain.scale)
        assert relative_error(meant(got), meant(plain)) < 2e-3

    def test_no_rotation_leads_out_of_the_8_bits(self):
        qkv = torch.zeros(64, 3, 1, 16)
        qkv[..., :2] = 448.0  # its pair is 634 long, and some of these angles turn it onto an axis
        qkv[:, 2] = 448.0
        heads = turn_and_quantize_heads(
            qkv, torch.polar(torch.ones(64, 8), torch.linspace(0, 6.3, 64)[:, None] + torch.zeros(8))
        )
        assert heads.scale.flatten().tolist() == [2.0, 2.0, 1.0]
        lengths = meant(heads)[:2, :, 0, :2].norm(dim=-1)
        assert torch.allclose(lengths, torch.full((2, 64), 448 * 2**0.5), rtol=2**-4)

    def test_a_view_with_other_rows_between_is_read_right(self):
        wide, rope = random(9, 4, 2, 64), turns(9, 32)
        got = turn_and_quantize_heads(wide[:, 1:], rope)
        assert same_bits(got.values, turn_and_quantize_heads(wide[:, 1:].contiguous(), rope).values)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("part", [0, 1, 2])
    def test_what_is_not_finite_stays_so(self, part, value):
        qkv = random(5, 3, 2, 16)
        qkv[3, part, 1, 4] = value
        with np.errstate(invalid="ignore"):
            heads = turn_and_quantize_heads(qkv, turns(5, 8))
        assert not meant(heads)[part, 3, 1].isfinite().all()

    def test_a_rotation_that_is_wrong_or_fails_is_found_and_logged(self, monkeypatch, caplog):
        assert turns_right(CPU, torch.float32, 2, 64)
        wrong = {
            "off": lambda qkv, rope: turn_and_quantize_heads(qkv, rope.conj().resolve_conj()),
            "not finite": lambda qkv, rope: plain_turn_and_quantize_heads(qkv * math.nan, rope),
            "failing": lambda qkv, rope: turn_and_quantize_heads(qkv, None),
        }
        for mistake in wrong.values():
            with monkeypatch.context() as patch:
                patch.setattr("encoder.attention.fp8_heads.turn_and_quantize_heads", mistake)
                assert not turns_right(CPU, torch.float32, 2, 64)
        assert [record.getMessage().split(": ", 1)[1][:12] for record in caplog.records] == [
            "differs by 1",
            "differs by n",
            "failed: Type",
        ]

    def test_views_of_one_product_are_not_copied(self):
        qkv = random(6, 3, 2, 64)
        assert packed(*qkv.unbind(1)).data_ptr() == qkv.data_ptr()
        assert torch.equal(packed(*qkv.unbind(1)), qkv)
        inner = random(6, 5, 2, 64)[:, 1:4]
        assert packed(*inner.unbind(1)).data_ptr() == inner.data_ptr()

    def test_anything_else_is(self):
        qkv = random(6, 3, 2, 64)
        q, k, v = qkv.unbind(1)
        for other in ((k, q, v), (q, v, k), (q, k, v.clone()), (q.contiguous(), k.contiguous(), v.contiguous())):
            assert torch.equal(packed(*other), torch.stack(other, 1))
