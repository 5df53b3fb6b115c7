"""MoonViT3d, top to bottom: patches in, embeddings out. Modules and parameters carry the checkpoint's own names.

Shapes: L patches of all segments back to back, M tokens, D tower width, Q attention width, H heads, Dh = Q / H,
E output width. Linears and residual sums run in the model's dtype (float32 accumulation inside a product); norms, GELU,
rotation, resampling and the mean over time run in float32 and round once.

Source: Kimi-K3 and Kimi-K2.5 `MoonViT3dPretrainedModel`, `PatchMergerMLP`, `PatchMergerMLPV2`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.attention import Attend, TurningAttend
from encoder.config import EncoderConfig, VisionConfig
from encoder.grid import Grid
from encoder.ops import PLAIN, Norm, Ops, Product, Quantized, Rows
from encoder.position import KEPT_BYTES, FrameTables, pos_emb, rope_table, time_table

# On a CPU the MLP takes this many patches at a time: its wide middle then stays in memory that is used again. Taken
# whole it is fresh pages in every layer (345,000 page faults for 1,536 patches of the full K2.5 tower, none in blocks).
CPU_MLP_ROWS = 1024


class MoonViT3d(nn.Module):
    """Vision tower and projector of one checkpoint; `state_dict()` has the checkpoint's keys and no others.

    Attributes:
        ops: how the steps between the products are done; the plain ones run everywhere.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.ops = PLAIN
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
        x, rope = self.embed(pixel_values, grids)
        return self.project(self.vision_tower.encoder(x, rope, attend, self.ops), grids)

    def embed(self, pixel_values: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, Tensor]:
        """(L, 3, P, P) -> what enters the blocks: the residual stream (L, D), and (L, Dh / 2) of `rope_table`."""
        patches = self.ops.patches(pixel_values, self.config, self.vision_tower.patch_embed.proj.weight.dtype)
        embedded: Tensor = self.vision_tower.patch_embed(patches, grids)
        return embedded, self.vision_tower.rope(grids, embedded.device)

    def project(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """(L, D) as it leaves the tower -> (M, E)."""
        projected: Tensor = self.mm_projector(self.ops.merge_patches(x, grids, self.config.vision.merge_kernel_size))
        return projected


class VisionTower(nn.Module):
    """What turns patches (L, 3 * P * P) into (L, D): the two parts, and the rotation that the blocks share."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)
        self._rope_frames = FrameTables(KEPT_BYTES)

    def rope(self, grids: Sequence[Grid], device: torch.device) -> Tensor:
        return rope_table(grids, self.head_dim, device, self._rope_frames)


class PatchEmbed(nn.Module):
    """Project each patch to the tower's width and add its position: (L, 3 * P * P) -> (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = PatchProjection(config)
        self.pos_emb = PositionEmbedding(config)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        embedded: Tensor = self.proj(patches) + self.pos_emb(grids)
        return embedded


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel sees one patch at a time, so it is one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch, width = config.patch_size, config.hidden_size
        self.weight = nn.Parameter(torch.empty(width, 3, patch, patch))
        self.bias = nn.Parameter(torch.empty(width)) if config.patch_embed_proj_bias else None
        self._padded: Tensor | None = None

    def _load_from_state_dict(self, *args: Any) -> None:
        self._padded = None
        super()._load_from_state_dict(*args)

    def forward(self, patches: Tensor) -> Tensor:
        """Rows of patches may go on with zeros."""
        weight = self.weight.flatten(1)
        missing = patches.shape[1] - weight.shape[1]
        return F.linear(patches, self._pad(weight, missing) if missing else weight, self.bias)

    def _pad(self, weight: Tensor, missing: int) -> Tensor:
        kept = self._padded
        if kept is None or (kept.dtype, kept.device) != (weight.dtype, weight.device):
            kept = self._padded = F.pad(weight, (0, missing))
        return kept


class PositionEmbedding(nn.Module):
    """The learned table, and the fixed time term as a buffer so that it takes the model's dtype with the module."""

    time: Tensor

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.mode = config.pos_emb_interpolation_mode
        self.weight = nn.Parameter(torch.empty(config.pos_emb_height, config.pos_emb_width, config.hidden_size))
        self.register_buffer("time", time_table(config.pos_emb_time, config.hidden_size), persistent=False)
        self._frames = FrameTables(KEPT_BYTES)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._frames.clear()
        super()._load_from_state_dict(*args)

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        return pos_emb(self.weight, self.time, grids, self.mode, self._frames)


class Encoder(nn.Module):
    """The blocks and the norm after them: (L, D) -> (L, D)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_layernorm = make_norm(config)  # an RMSNorm in K3, despite its name

    def forward(self, x: Tensor, rope: Tensor, attend: Attend, ops: Ops) -> Tensor:
        """Overwrites x, the residual stream."""
        # A sum and the norm that reads it are one step, so each block is given the norm that follows it.
        blocks = cast("Sequence[Block]", self.blocks)
        following = [*(block.norm0 for block in blocks[1:]), self.final_layernorm]
        normed: Rows = blocks[0].norm0(x)
        for block, norm in zip(blocks, following, strict=True):
            normed = block(x, normed, norm, rope, attend, ops)
        return cast("Tensor", normed)  # nothing quantises the last norm


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

    def forward(self, x: Tensor, normed: Rows, following: Norm, rope: Tensor, attend: Attend, ops: Ops) -> Rows:
        """Adds to x in place; takes norm0 of x as it comes, returns the following norm of x as it leaves."""
        normed = ops.add_norm(x, self.attention(normed, rope, attend, ops), self.norm1)
        return ops.add_norm(x, self.mlp(normed, ops), following)

    def attention(self, x: Rows, rope: Tensor, attend: Attend, ops: Ops) -> Product:
        """(L, D) -> (L, D); q, k and v are strided views of the packed projection where `ops` rotates in place."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.num_heads, -1))
        if isinstance(attend, TurningAttend):
            attended = attend.turn(qkv, rope)
        else:
            q, k = ops.rotate(qkv, rope)
            attended = attend(q, k, qkv[:, 2])
        out: Product = self.wo(attended.flatten(1))
        return out


class MLP(nn.Module):
    """fc0, tanh GELU, fc1."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x: Rows, ops: Ops) -> Product:
        if isinstance(x, Quantized) or x.device.type != "cpu":
            return cast("Product", self.fc1(ops.linear_gelu(x, self.fc0)))
        blocks = torch.split(x, CPU_MLP_ROWS)
        outputs = [self.fc1(ops.linear_gelu(rows, self.fc0)) for rows in blocks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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


def make_norm(config: VisionConfig) -> Norm:
    """A norm of the tower's own width, kind and epsilon."""
    return Norm(config.norm_type, config.hidden_size, config.norm_eps)
