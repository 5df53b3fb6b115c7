"""Each fused step against its plain twin, under Triton's interpreter on a CPU; tests/gpu runs the same on a GPU."""

from dataclasses import replace

import pytest
import torch

from encoder import Grid, load_config
from encoder.fusion import DIFFERENCES, TOLERANCES, checked, choose_ops, names
from encoder.model import PatchProjection
from encoder.ops import PLAIN, Norm

pytest.importorskip("triton", reason="needs triton, from the extra gpu or dev")

from encoder.fused import FUSED

CPU = torch.device("cpu")
SPECS = ["demo:k3-tiny", "demo:k25-tiny"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: tests/gpu/test_tower.py")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [name for name in DIFFERENCES if name != "linear_gelu"])  # that is PyTorch's own
@pytest.mark.parametrize("spec", SPECS)
def test_fused_is_plain(spec, step, dtype):
    # The interpreter cuts bfloat16 off where a GPU rounds.
    allowed = {torch.float32: 1e-6, torch.float16: 1e-5, torch.bfloat16: 5e-3}[dtype]
    assert DIFFERENCES[step](FUSED, load_config(spec), CPU, dtype) <= allowed


@pytest.mark.parametrize("step", DIFFERENCES)
def test_a_wrong_step_is_told_from_the_right_one(step):
    """Plain against plain is exact; the smallest mistake of its kind is not within any tolerance."""
    mistakes = {
        "patches": lambda pixels, config, dtype: PLAIN.patches(pixels.flip(1), config, dtype) + 0.02,
        "add_norm": lambda x, delta, norm: PLAIN.add_norm(x, 1.05 * delta, norm),
        "rotate": lambda qkv, rope: PLAIN.rotate(qkv, rope.conj().resolve_conj()),
        "linear_gelu": lambda x, linear: torch.relu(linear(x)),
        "merge_patches": lambda x, grids, kernel: PLAIN.merge_patches(x, grids, kernel).flip(1),
    }
    config = load_config("demo:k25-tiny")
    assert DIFFERENCES[step](PLAIN, config, CPU, torch.bfloat16) == 0
    wrong = replace(PLAIN, **{step: mistakes[step]})
    assert DIFFERENCES[step](wrong, config, CPU, torch.bfloat16) > TOLERANCES[torch.bfloat16]


def test_a_step_that_fails_or_differs_is_replaced_and_logged(caplog):
    def failing(*_):
        raise RuntimeError("does not compile")

    def in_place_is_forgotten(x, delta, norm):
        return norm(x + delta)

    fused = replace(FUSED, linear_gelu=PLAIN.linear_gelu, rotate=failing, add_norm=in_place_is_forgotten)
    chosen = checked(fused, load_config("demo:k3-tiny"), CPU, torch.float32)
    assert names(chosen) == {
        "patches": "fused",
        "add_norm": "plain",
        "rotate": "plain",
        "linear_gelu": "plain",
        "merge_patches": "fused",
    }
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("fused add_norm is out of service on cpu: differs by ")
    assert messages[1] == "fused rotate is out of service on cpu: failed: RuntimeError"


def test_a_cpu_takes_the_plain_steps():
    assert choose_ops(load_config("demo:k3-tiny"), CPU, torch.float32) is PLAIN


def test_the_sum_is_rounded_before_its_norm():
    norm = Norm("rmsnorm", 2, 0.0).requires_grad_(False)
    norm.weight.fill_(1.0)
    x, delta = torch.tensor([[2048.0, 1.0]]).half(), torch.tensor([[1.0, 0.0]]).half()
    normed = FUSED.add_norm(x, delta, norm.half())
    assert x.tolist() == [[2048.0, 1.0]]  # 2049 is no float16 number, the nearest even one is 2048
    assert normed[0, 0].item() == pytest.approx(2**0.5, rel=1e-3)


def test_rotation_in_place_leaves_values_alone():
    qkv = torch.randn(6, 3, 2, 72)
    before = qkv.clone()
    quarter = torch.full((6, 36), 1j, dtype=torch.complex64)
    q, k = FUSED.rotate(qkv, quarter)
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, 2], before[:, 2])
    assert torch.equal(k[..., 0::2], -before[:, 1, :, 1::2])
    assert torch.equal(k[..., 1::2], before[:, 1, :, 0::2])


def test_merging_many_grids():
    grids = [Grid(1, 2, 2), Grid(4, 6, 4), Grid(1, 2, 8), Grid(2, 4, 2), Grid(1, 2, 2)]
    x = torch.randn(sum(grid.num_patches for grid in grids), 24)
    want = PLAIN.merge_patches(x, grids, (2, 2))
    got = FUSED.merge_patches(x, grids, (2, 2))
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= 1e-6


def test_patches_are_padded_with_zeros_that_the_projection_ignores():
    config = load_config("demo:k25-tiny")
    pixels = torch.randint(0, 256, (7, 3, 14, 14), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    padded = FUSED.patches(pixels, config, torch.float32)
    assert padded.shape == (7, 592)
    assert torch.equal(padded[:, :588], PLAIN.patches(pixels, config, torch.float32))
    assert not padded[:, 588:].any()
    projection = PatchProjection(config.vision).requires_grad_(False)
    for scale in (0.05, 0.5):  # the padded weight follows the weights that are loaded
        state = {name: scale * torch.randn(value.shape) for name, value in projection.state_dict().items()}
        projection.load_state_dict(state)
        want = projection(padded[:, :588])
        assert (projection(padded) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("parts", [2, 4])
def test_rotation_does_not_depend_on_how_it_is_shared_out(monkeypatch, parts):
    monkeypatch.setattr("encoder.fused.ROTATE_PARTS", parts)
    assert DIFFERENCES["rotate"](FUSED, load_config("demo:k3-tiny"), CPU, torch.float32) <= 1e-6
    monkeypatch.setattr("encoder.fused.LONG_ROWS", 1)
    monkeypatch.setattr("encoder.fused.ROTATE_PARTS_LONG", parts)
    assert DIFFERENCES["rotate"](FUSED, load_config("demo:k25-tiny"), CPU, torch.float32) <= 1e-6
