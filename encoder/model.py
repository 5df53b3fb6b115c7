"""MoonViT3d, top to bottom: patches in, embeddings out. Modules and parameters carry the checkpoint's own names.

Shapes: L patches of all segments back to back, M tokens, D tower width, Q attention width, H heads, Dh = Q / H,
E output width. Linears and residual sums run in the model's dtype (float32 accumulation inside a product); norms, GELU,
rotation, resampling and the mean over time run in float32 and round once.

Source: Kimi-K3 and Kimi-K2.5 `MoonViT3dPretrainedModel`, `PatchMergerMLP`, `PatchMergerMLPV2`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.attention import Attend
from encoder.config import EncoderConfig, VisionConfig
from encoder.grid import Grid
from encoder.position import apply_rope, pos_emb, rope_table, time_table
from encoder.segments import normalize

# On a CPU the MLP takes this many patches at a time: its wide middle then stays in memory that is used again. Taken
# whole it is fresh pages in every layer (345,000 page faults for 1,536 patches of the full K2.5 tower, none in blocks).
CPU_MLP_ROWS = 1024


class MoonViT3d(nn.Module):
    """Vision tower and projector of one checkpoint; `state_dict()` has the checkpoint's keys and no others."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config.vision)
        self.mm_projector = Projector(config.vision)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid], attend: Attend) -> Tensor:
        """Encode N >= 1 segments.

        Args:
            pixel_values: (L, 3, P, P) float32 normalised, or uint8 not yet; in (frame, row, column) order.
            grids: N host triples in patches.
            attend: attention within each segment, planned for these grids.
        Returns:
            (M, E) in the model's dtype, segment order kept.
        """
        x = self.vision_tower(normalize(pixel_values, self.config), grids, attend)
        merged = merge_patches(x, grids, self.config.vision.merge_kernel_size)
        projected: Tensor = self.mm_projector(merged)
        return projected


class VisionTower(nn.Module):
    """(L, 3, P, P) -> (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid], attend: Attend) -> Tensor:
        embedded: Tensor = self.patch_embed(pixel_values, grids)
        rope = rope_table(grids, self.head_dim, embedded.device)
        encoded: Tensor = self.encoder(embedded, rope, attend)
        return encoded


class PatchEmbed(nn.Module):
    """Project each patch to the tower's width and add its position: (L, 3, P, P) -> (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(config)
        self.pos_emb = PositionEmbedding(config)

    def forward(self, pixel_values: Tensor, grids: Sequence[Grid]) -> Tensor:
        embedded: Tensor = self.proj(pixel_values) + self.pos_emb(grids)
        return embedded


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel sees one patch at a time, so it is one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch, width = config.patch_size, config.hidden_size
        self.weight = nn.Parameter(torch.empty(width, 3, patch, patch))
        self.bias = nn.Parameter(torch.empty(width)) if config.patch_embed_proj_bias else None

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = pixel_values.flatten(1).to(self.weight.dtype)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class PositionEmbedding(nn.Module):
    """The learned table, and the fixed time term as a buffer so that it takes the model's dtype with the module."""

    time: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.mode = config.pos_emb_interpolation_mode
        self.weight = nn.Parameter(torch.empty(config.pos_emb_height, config.pos_emb_width, config.hidden_size))
        self.register_buffer("time", time_table(config.pos_emb_time, config.hidden_size), persistent=False)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        return pos_emb(self.weight, self.time, grids, self.mode)


class Encoder(nn.Module):
    """The blocks and the norm after them: (L, D) -> (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = make_norm(config)  # an RMSNorm in K3, despite its name

    def forward(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        for block in self.blocks:
            x = block(x, rope, attend)
        normed: Tensor = self.final_layernorm(x)
        return normed


class Block(nn.Module):
    """Pre-norm attention, then pre-norm MLP, each added to the residual stream (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, qkv = config.hidden_size, config.qkv_hidden_size
        self.num_heads = config.num_heads
        self.norm0 = make_norm(config)
        self.wqkv = nn.Linear(width, 3 * qkv, bias=config.attn_bias)
        self.wo = nn.Linear(qkv, width, bias=config.attn_bias)
        self.norm1 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """Adds to x in place and returns it."""
        x += self.attention(self.norm0(x), rope, attend)
        for rows in torch.split(x, CPU_MLP_ROWS if x.device.type == "cpu" else len(x)):
            rows += self.mlp(self.norm1(rows))
        return x

    def attention(self, x: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """(L, D) -> (L, D); v is a strided view of the packed projection, q and k come rotated."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k = apply_rope(qkv[:, :2], rope).unbind(1)
        out: Tensor = self.wo(attend(q, k, qkv[:, 2]).flatten(1))
        return out


class MLP(nn.Module):
    """fc0, tanh GELU, fc1."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc1(F.gelu(self.fc0(x), approximate="tanh"))
        return out


def merge_patches(x: Tensor, grids: Sequence[Grid], kernel: tuple[int, int]) -> Tensor:
    """Average each segment over time, then lay every kh x kw neighbourhood side by side.

    Args:
        x: (L, D), segments back to back, each in (frame, row, column) order.
        grids: N host triples; h and w are multiples of the kernel.
    Returns:
        (M, kh * kw, D), cells in row-major order, members of a cell too. Merge type "sd2_tpool".
    """
    kh, kw = kernel
    merged = []
    segments = torch.split(x, [grid.num_patches for grid in grids])
    for patches, (t, h, w) in zip(segments, grids, strict=True):
        frames = patches.view(t, h // kh, kh, w // kw, kw, -1)
        pooled = frames[0] if t == 1 else frames.mean(0, dtype=torch.float32).to(x.dtype)
        merged.append(pooled.transpose(1, 2).flatten(0, 1).flatten(1, 2))
    return torch.cat(merged)


class Projector(nn.Module):
    """(M, 4, D) -> (M, E): two linears with an erf GELU between.

    "patchmerger" (K2.5) normalises each of the four patches before and has biases; "patchmergerv2" (K3) normalises the
    result and has none.
    """

    pre_norm: nn.Module | None
    post_norm: nn.Module | None

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size * config.merge_kernel_size[0] * config.merge_kernel_size[1]
        v2 = config.mm_projector_type == "patchmergerv2"
        self.pre_norm = None if v2 else Norm("layernorm", config.hidden_size, config.projector_ln_eps)
        self.proj = nn.Sequential(
            nn.Linear(width, width, bias=not v2),
            nn.GELU(),
            nn.Linear(width, config.text_hidden_size, bias=not v2),
        )
        self.post_norm = Norm("rmsnorm", config.text_hidden_size, config.projector_ln_eps) if v2 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        x = self.proj(x.flatten(1))
        return x if self.post_norm is None else self.post_norm(x)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last axis; statistics and scaling in float32, rounded once."""

    def __init__(self, kind: Literal["rmsnorm", "layernorm"], width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = (width,), eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.width, self.weight, self.eps)
        return F.layer_norm(x, self.width, self.weight, self.bias, self.eps)


def make_norm(config: VisionConfig) -> Norm:
    """A norm of the tower's own width, kind and epsilon."""
    return Norm(config.norm_type, config.hidden_size, config.norm_eps)
