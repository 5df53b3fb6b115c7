"""Where a patch is: the learned 2-D table resampled to each grid, the fixed time term, and 2-D rotary angles.

Source: Kimi-K3 and Kimi-K2.5 `Learnable2DInterpPosEmbDivided_fixed`, `Rope2DPosEmbRepeated`.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import ROPE_BASE
from encoder.grid import Grid

InterpolationMode = Literal["bilinear", "bicubic"]


def resample_table(table: Tensor, h: int, w: int, mode: InterpolationMode) -> Tensor:
    """Resample a position table to h rows and w columns: half-pixel centres, no antialiasing, edges clamped.

    Args:
        table: (H0, W0, D); an equal size returns it unchanged.
        mode: "bilinear", or "bicubic" with A = -0.75 (both are PyTorch's own).
    Returns:
        (h * w, D) in the table's dtype; source coordinates and sums are float32, rounded once.
    """
    if table.shape[:2] == (h, w):
        return table.flatten(0, 1)
    channels_first = table.float().permute(2, 0, 1)[None]
    resampled = F.interpolate(channels_first, size=(h, w), mode=mode, align_corners=False)
    return resampled[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)


def time_table(num_frames: int, dim: int) -> Tensor:
    """(num_frames, dim) float32 on the CPU: all sines first, then all cosines. There is no weight for it."""
    omega = ROPE_BASE ** (-torch.arange(dim // 2, dtype=torch.float32, device="cpu") / (dim // 2))
    angles = torch.arange(num_frames, dtype=torch.float32, device="cpu")[:, None] * omega
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def pos_emb(table: Tensor, time: Tensor, grids: Sequence[Grid], mode: InterpolationMode) -> Tensor:
    """What is added to the projected patches.

    Args:
        table: (H0, W0, D), the learned table.
        time: (T, D) in the table's dtype; used by grids of two frames or more, a single frame gets no time term at all.
        grids: N host triples, t <= T.
    Returns:
        (L, D) in the table's dtype, in (frame, row, column) order.
    """
    sizes = {(grid.h, grid.w) for grid in grids}
    spatial = {(h, w): resample_table(table, h, w, mode) for h, w in sizes}
    parts = []
    for t, h, w in grids:
        frame = spatial[h, w]
        parts.append(frame if t == 1 else (frame + time[:t, None]).flatten(0, 1))
    return torch.cat(parts)


def rope_table(grids: Sequence[Grid], head_dim: int, device: torch.device) -> Tensor:
    """The turn of every channel pair of every patch, as unit complex numbers.

    Even pairs turn by the column, odd pairs by the row, both counted from 0 in every segment; frames share them. (The
    reference's comment says rows first; its code, and so the released weights, do columns first.)

    Returns:
        (L, head_dim / 2) complex64. Angles are formed in float32: near column 511 bfloat16 would be a radian off.
    """
    sizes = {(grid.h, grid.w) for grid in grids}
    column_row = {size: _column_row(*size) for size in sizes}
    positions = torch.cat([column_row[h, w] for t, h, w in grids for _ in range(t)]).to(device)
    num_frequencies = head_dim // 4
    exponents = torch.arange(num_frequencies, dtype=torch.float32, device=device) / num_frequencies
    angles = positions[:, None, :] * (1.0 / ROPE_BASE**exponents)[:, None]
    return torch.complex(angles.cos(), angles.sin()).flatten(1)


def _column_row(h: int, w: int) -> Tensor:
    """(h * w, 2) float32 (column, row) of each patch of one frame."""
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack([columns, rows], dim=-1).flatten(0, 1).float()


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate adjacent channel pairs: (a, b) -> (a cos - b sin, a sin + b cos), in float32.

    Args:
        x: (L, ..., Dh), any strides with adjacent channels.
        rope: (L, Dh / 2) complex64 of `rope_table`.
    Returns:
        A new tensor of x's shape and dtype.
    """
    pairs = torch.view_as_complex(torch.unflatten(x.float(), -1, (-1, 2)))
    turns = rope.view(rope.shape[0], *(1,) * (x.dim() - 2), rope.shape[1])
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
