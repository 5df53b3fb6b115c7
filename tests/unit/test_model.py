"""Counts, names and shapes on the meta device; merger and norms with numbers a reader can recompute."""

import pytest
import torch
from torch.nn.functional import gelu

from encoder import EncoderConfig, Grid, load_config
from encoder.attention.reference import ReferenceAttention
from encoder.model import CPU_MLP_ROWS, Block, MoonViT3d
from encoder.ops import PLAIN, Norm, merge_patches
from encoder.position import rope_table


def on_meta(config: EncoderConfig) -> MoonViT3d:
    with torch.device("meta"):
        return MoonViT3d(config)


@pytest.mark.parametrize(
    ("spec", "num_tensors", "tower", "projector"),
    [("demo:k3", 168, 401_214_464, 46_144_512), ("demo:k25", 335, 416_866_032, 54_277_888)],
)
def test_full_size_counts(spec: str, num_tensors: int, tower: int, projector: int) -> None:
    model = on_meta(load_config(spec))
    assert len(model.state_dict()) == num_tensors
    assert sum(p.numel() for p in model.vision_tower.parameters()) == tower
    assert sum(p.numel() for p in model.mm_projector.parameters()) == projector


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        (
            "demo:k3",
            {
                "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
                "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
                "vision_tower.encoder.blocks.26.wqkv.weight": (4608, 1024),
                "vision_tower.encoder.blocks.0.wo.weight": (1024, 1536),
                "vision_tower.encoder.blocks.0.mlp.fc0.weight": (4096, 1024),
                "vision_tower.encoder.final_layernorm.weight": (1024,),
                "mm_projector.proj.2.weight": (7168, 4096),
                "mm_projector.post_norm.weight": (7168,),
            },
        ),
        (
            "demo:k25",
            {
                "vision_tower.patch_embed.proj.bias": (1152,),
                "vision_tower.encoder.blocks.26.wqkv.bias": (3456,),
                "vision_tower.encoder.blocks.0.norm1.bias": (1152,),
                "vision_tower.encoder.blocks.0.mlp.fc1.weight": (1152, 4304),
                "mm_projector.pre_norm.bias": (1152,),
                "mm_projector.proj.0.weight": (4608, 4608),
                "mm_projector.proj.2.bias": (7168,),
            },
        ),
    ],
)
def test_names_and_shapes_are_the_checkpoints(spec: str, shapes: dict[str, tuple[int, ...]]) -> None:
    state = on_meta(load_config(spec)).state_dict()
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_k3_has_no_bias_at_all() -> None:
    assert not [name for name in on_meta(load_config("demo:k3")).state_dict() if name.endswith("bias")]


def test_merger_averages_frames_and_reads_cells_row_by_row() -> None:
    grid = Grid(2, 2, 4)
    first = torch.arange(8.0)[:, None]
    x = torch.cat([first, first + 100])  # frame 1 is 100 more everywhere
    merged = merge_patches(x, [grid], (2, 2))
    assert merged.shape == (2, 4, 1)
    # Cell 0 holds columns 0 and 1 of rows 0 and 1, that is patches 0, 1, 4, 5; each averaged with its later frame.
    assert merged[..., 0].tolist() == [[50, 51, 54, 55], [52, 53, 56, 57]]


def test_merger_keeps_the_order_of_segments() -> None:
    x = torch.arange(12.0)[:, None]
    merged = merge_patches(x, [Grid(1, 2, 2), Grid(1, 4, 2)], (2, 2))
    assert merged[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_time_is_averaged_in_float32() -> None:
    frames = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    merged = merge_patches(frames.repeat_interleave(4)[:, None], [Grid(4, 2, 2)], (2, 2))
    assert merged.flatten().tolist() == [65.0] * 4  # 259 / 4 = 64.75, rounded once; 64.0 if summed in bfloat16


@pytest.mark.parametrize("eps", [2.0**-23, 2.0**-7])
def test_rms_norm_takes_its_epsilon(eps: float) -> None:
    norm = Norm("rmsnorm", 2, eps)
    norm.weight.data = torch.tensor([2.0, 4.0])
    x = torch.tensor([[3e-3, 4e-3]])
    scale = (12.5e-6 + eps) ** -0.5  # mean of squares 12.5e-6
    assert norm(x).tolist()[0] == pytest.approx([6e-3 * scale, 16e-3 * scale], rel=1e-6)


def test_layer_norm_has_biased_variance() -> None:
    norm = Norm("layernorm", 2, 1e-5)
    norm.weight.data, norm.bias.data = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 10.0])
    assert norm(torch.tensor([[1.0, 3.0]])).tolist()[0] == pytest.approx([-1.0, 11.0], abs=1e-5)


def test_mlp_in_blocks_of_rows_is_the_mlp() -> None:
    config = load_config("demo:k25-tiny").vision
    torch.manual_seed(0)
    block = Block(config).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.05)
    grid = Grid(2, 26, 24)
    assert grid.num_patches > CPU_MLP_ROWS
    x, rope = (
        torch.randn(grid.num_patches, config.hidden_size),
        rope_table([grid], config.head_dim, torch.device("cpu")),
    )
    attend = ReferenceAttention().plan([grid.num_patches], torch.tensor([0, grid.num_patches]))
    normed = block.norm0(x)
    attended = x + block.attention(normed, rope, attend, PLAIN)
    want = attended + block.mlp.fc1(gelu(block.mlp.fc0(block.norm1(attended)), approximate="tanh"))
    following = Norm("layernorm", config.hidden_size, 1e-5).requires_grad_(False)
    following.weight.fill_(2.0)
    following.bias.fill_(1.0)
    out = block(x, normed, following, rope, attend, PLAIN)
    assert (x - want).abs().max().item() <= 1e-5
    assert (out - following(want)).abs().max().item() <= 1e-5
