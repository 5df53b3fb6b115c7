"""Where a patch is: the learned 2-D table resampled to each grid, the fixed time term, and 2-D rotary angles.

Source: Kimi-K3 and Kimi-K2.5 `Learnable2DInterpPosEmbDivided_fixed`, `Rope2DPosEmbRepeated`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.config import ROPE_BASE
from encoder.grid import Grid

InterpolationMode = Literal["bilinear", "bicubic"]

KEPT_BYTES = 256 * 2**20
"""Of the tables of one kind that are kept. The largest picture of K3 takes 128 MiB (positions) and 32 (rotation)."""


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


class FrameTables:
    """One table for each (h, w) that was asked for, kept where it was made; the least recently used go first.

    Args:
        max_bytes: of all tables together; one alone may exceed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._tables: OrderedDict[tuple[Hashable, ...], Tensor] = OrderedDict()

    def get(self, h: int, w: int, like: tuple[Hashable, ...], make: Callable[[int, int], Tensor]) -> Tensor:
        """The table of (h, w), made if there is none; `like` tells devices and dtypes apart."""
        key = (h, w, *like)
        if (table := self._tables.get(key)) is not None:
            self._tables.move_to_end(key)
            return table
        table = make(h, w)
        self._tables[key] = table
        self.num_bytes += table.nbytes
        while self.num_bytes > self.max_bytes and len(self._tables) > 1:
            _, oldest = self._tables.popitem(last=False)
            self.num_bytes -= oldest.nbytes
        return table

    def clear(self) -> None:
        self._tables.clear()
        self.num_bytes = 0


def pos_emb(
    table: Tensor, time: Tensor, grids: Sequence[Grid], mode: InterpolationMode, frames: FrameTables | None = None
) -> Tensor:
    """What is added to the projected patches.

    Args:
        table: (H0, W0, D), the learned table.
        time: (T, D) in the table's dtype; used by grids of two frames or more, a single frame gets no time term at all.
        grids: N host triples, t <= T.
        frames: where resampled tables are kept from call to call, for this learned table only.
    Returns:
        (L, D) in the table's dtype, in (frame, row, column) order.
    """
    kept = FrameTables(KEPT_BYTES) if frames is None else frames
    like = (table.device, table.dtype)
    parts = []
    for t, h, w in grids:
        frame = kept.get(h, w, like, lambda rows, columns: resample_table(table, rows, columns, mode))
        parts.append(frame if t == 1 else (frame + time[:t, None]).flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def rope_table(grids: Sequence[Grid], head_dim: int, device: torch.device, frames: FrameTables | None = None) -> Tensor:
    """The turn of every channel pair of every patch, as unit complex numbers.

    Even pairs turn by the column, odd pairs by the row, both counted from 0 in every segment; frames share them. (The
    reference's comment says rows first; its code, and so the released weights, do columns first.)

    Args:
        frames: where the tables of one frame are kept from call to call.
    Returns:
        (L, head_dim / 2) complex64. Angles are formed in float32: near column 511 bfloat16 would be a radian off.
    """
    kept = FrameTables(KEPT_BYTES) if frames is None else frames
    parts = []
    for t, h, w in grids:
        frame = kept.get(h, w, (device, head_dim), lambda rows, columns: _turns(rows, columns, head_dim, device))
        parts += [frame] * t
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _turns(h: int, w: int, head_dim: int, device: torch.device) -> Tensor:
    """(h * w, head_dim / 2) complex64, the turns of one frame."""
    rows, columns = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
    column_row = torch.stack([columns, rows], dim=-1).flatten(0, 1).float()
    num_frequencies = head_dim // 4
    exponents = torch.arange(num_frequencies, dtype=torch.float32, device=device) / num_frequencies
    angles = column_row[:, None, :] * (1.0 / ROPE_BASE**exponents)[:, None]
    return torch.complex(angles.cos(), angles.sin()).flatten(1)


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
