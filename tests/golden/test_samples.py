"""Position table, rotation, norms and GELUs against the reference's samples; tolerances are those of README.md."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import RMS_NORM_EPS
from encoder.grid import Grid
from encoder.ops import Norm
from encoder.position import apply_rope, pos_emb, resample_table, rope_table, time_table
from tests.golden import goldens

POSITIONS = goldens.tensors("pos_emb_samples.safetensors")
ROPE = goldens.tensors("rope_samples.safetensors")
NORMS = goldens.tensors("norm_gelu_samples.safetensors")
CPU = torch.device("cpu")
HEADS = [pytest.param("k3_hd128", 128, id="k3"), pytest.param("k25_hd72", 72, id="k25")]
DTYPES = [pytest.param("fp32", torch.float32, id="fp32"), pytest.param("bf16", torch.bfloat16, id="bf16")]


def position_keys(mode: str) -> list[str]:
    return sorted(key for key in POSITIONS if key.startswith(mode) and "video" not in key)


def one_bfloat16_step(want: Tensor) -> float:
    """At the size of the sample's largest value: the kernel that made the bicubic samples rounds between its passes,
    so that values near zero carry the error of the large ones they were summed from."""
    return float(2 ** (want.abs().max().float().log2().floor() - 7))


@pytest.mark.parametrize("key", [*position_keys("bilinear"), *position_keys("bicubic")])
def test_resampled_table(key: str) -> None:
    want = POSITIONS[key]
    mode, size = key.split("/")[:2]
    h, w = map(int, size.split("x"))
    got = resample_table(POSITIONS["table"].to(want.dtype), h, w, mode)
    allowed = one_bfloat16_step(want) if want.dtype == torch.bfloat16 else 4e-5
    assert got.dtype == want.dtype
    assert (got.float() - want.float()).abs().max().item() <= allowed


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_position_of_a_video(mode: str) -> None:
    table = POSITIONS["table"]
    got = pos_emb(table, time_table(4, 4), [Grid(3, 4, 6)], mode)
    assert (got - POSITIONS[f"{mode}/video_3x4x6"]).abs().max().item() <= 4e-5
    want = POSITIONS[f"{mode}/video_3x4x6/bf16"]
    rounded = pos_emb(table.bfloat16(), time_table(4, 4).bfloat16(), [Grid(3, 4, 6)], mode)
    assert (rounded.float() - want.float()).abs().max().item() <= one_bfloat16_step(want)


@pytest.mark.parametrize("key", ["k3_dim1024", "k25_dim1152", "small_dim4"])
def test_time_table(key: str) -> None:
    want = POSITIONS[f"time/{key}"]
    assert (time_table(*want.shape) - want).abs().max().item() <= 1e-6


@pytest.mark.parametrize(("key", "head_dim"), HEADS)
def test_angles_and_rotation(key: str, head_dim: int) -> None:
    sample = {name.removeprefix(f"{key}/"): value for name, value in ROPE.items() if name.startswith(key)}
    rows, columns = sample["yx"].unbind(1)
    rope = rope_table([Grid(1, 512, 512)], head_dim, CPU).view(512, 512, -1)[rows, columns]
    assert (rope.real - sample["cos"]).abs().max().item() <= 1e-4
    assert (rope.imag - sample["sin"]).abs().max().item() <= 1e-4
    assert (apply_rope(sample["q"], rope) - sample["q_rot"]).abs().max().item() <= 2e-4
    assert (apply_rope(sample["k"], rope) - sample["k_rot"]).abs().max().item() <= 2e-4
    rotated, want = apply_rope(sample["q_bf16"], rope).float(), sample["q_rot_bf16"].float()
    assert (rotated - want).abs().max().item() <= one_bfloat16_step(want)


@pytest.mark.parametrize(("key", "head_dim"), HEADS)
def test_angles_of_packed_grids(key: str, head_dim: int) -> None:
    rope = rope_table([Grid(*grid) for grid in ROPE[f"{key}/packed_grid_thws"].tolist()], head_dim, CPU)
    assert (rope.real - ROPE[f"{key}/packed_cos"]).abs().max().item() <= 1e-4
    assert (rope.imag - ROPE[f"{key}/packed_sin"]).abs().max().item() <= 1e-4


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
@pytest.mark.parametrize(
    ("key", "kind", "eps"),
    [
        ("rmsnorm_default_eps", "rmsnorm", RMS_NORM_EPS),
        ("rmsnorm_eps_1e-5", "rmsnorm", 1e-5),
        ("layernorm_default_eps", "layernorm", 1e-5),
    ],
)
def test_norms(key: str, kind: str, eps: float, name: str, dtype: torch.dtype) -> None:
    suffix = "" if name == "fp32" else "_bf16"
    norm = Norm(kind, 64, eps).to(dtype)
    norm.weight.data = NORMS[f"weight{suffix}"]
    if norm.bias is not None:
        norm.bias.data = NORMS[f"bias{suffix}"]
    got, want = norm(NORMS[f"x{suffix}"]), NORMS[f"{key}/{name}"]
    assert got.dtype == dtype
    worst = ((got.float() - want.float()).abs().amax(1) / want.float().abs().amax(1)).max().item()
    assert worst <= (1e-6 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
@pytest.mark.parametrize(("key", "approximate"), [("gelu_tanh", "tanh"), ("gelu_erf", "none")])
def test_gelus(key: str, approximate: str, name: str, dtype: torch.dtype) -> None:
    """PyTorch's two GELUs, which the model calls, are the reference's."""
    got = F.gelu(NORMS["gelu_x" if name == "fp32" else "gelu_x_bf16"], approximate=approximate).float()
    want = NORMS[f"{key}/{name}"].float()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    assert (got - want).abs().max().item() <= tolerance * want.abs().max().item()
