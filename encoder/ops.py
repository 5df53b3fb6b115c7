"""The steps between the matrix products, in plain PyTorch; `encoder.fused` has the same in one pass each.

Shapes: L patches, M tokens, D width of the residual stream, H heads, Dh head width, C * P * P values of a patch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import EncoderConfig
from encoder.grid import Grid
from encoder.position import apply_rope
from encoder.segments import normalize


class Quantized(NamedTuple):
    """Rows in 8 bits: what they stand for is values * scale.

    Attributes:
        values: (L, K) float8_e4m3fn.
        scale: (L, 1) float32.
    """

    values: Tensor
    scale: Tensor


Rows = Tensor | Quantized
"""What a product takes: numbers in the model's dtype, or quantised already by the step before."""


class Unscaled(NamedTuple):
    """A product of quantised rows whose scales the step after it applies: it stands for values * row * channel.

    Attributes:
        values: (L, N) in the model's dtype.
        row: (L, 1) float32.
        channel: (N, 1) float32.
    """

    values: Tensor
    row: Tensor
    channel: Tensor

    def wide(self) -> Tensor:
        """(L, N) in float32."""
        return self.values.float() * self.row * self.channel.t()


Product = Tensor | Unscaled


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


def patches(pixel_values: Tensor, config: EncoderConfig, dtype: torch.dtype) -> Tensor:
    """(L, C, P, P) uint8, or float32 normalised already -> (L, C * P * P) normalised, in dtype.

    Another version may append zeros to the rows.
    """
    return normalize(pixel_values, config).flatten(1).to(dtype)


def add_norm(x: Tensor, delta: Tensor, norm: Norm) -> Rows:
    """Add delta to x in place, rounded to x's dtype, and return the norm of the sum; all (L, D)."""
    x += delta
    normed: Rows = norm(x)
    return normed


def rotate(qkv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated q and k, (L, H, Dh) each, of the packed product (L, 3, H, Dh), which may be overwritten.

    rope: (L, Dh / 2) complex64, see `encoder.position.rope_table`.
    """
    q, k = apply_rope(qkv[:, :2], rope).unbind(1)
    return q, k


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """The linear layer, rounded, then the tanh GELU."""
    return F.gelu(linear(x), approximate="tanh")


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
    for rows, (t, h, w) in zip(segments, grids, strict=True):
        frames = rows.view(t, h // kh, kh, w // kw, kw, -1)
        pooled = frames[0] if t == 1 else frames.mean(0, dtype=torch.float32).to(x.dtype)
        merged.append(pooled.transpose(1, 2).flatten(0, 1).flatten(1, 2))
    return torch.cat(merged)


@dataclass(frozen=True)
class Ops:
    """One implementation of every step above, under its name and with its contract."""

    patches: Callable[[Tensor, EncoderConfig, torch.dtype], Tensor] = patches
    add_norm: Callable[[Tensor, Any, Norm], Rows] = add_norm  # of a Product where the linear layer gives one
    rotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = rotate
    linear_gelu: Callable[[Any, nn.Linear], Rows] = linear_gelu  # of Rows where the linear layer takes them
    merge_patches: Callable[[Tensor, Sequence[Grid], tuple[int, int]], Tensor] = merge_patches


PLAIN = Ops()
