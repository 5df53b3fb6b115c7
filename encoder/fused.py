"""The steps of `encoder.ops` on a GPU: one pass over memory each, and none that waits for the device."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor, nn

from encoder import fused_kernels
from encoder.config import EncoderConfig
from encoder.grid import Grid
from encoder.launch import launch
from encoder.ops import Norm, Ops
from encoder.ops import patches as plain_patches

NORM_WARPS = 4  # for 1024 bfloat16 channels: 16 bytes a thread; 1 to 8 are level on an H200

ROTATE_ROWS = 8  # patches of a program
ROTATE_PARTS, ROTATE_PARTS_LONG, LONG_ROWS = 4, 2, 4096
"""Programs that share the heads of a patch, in short and long batches: few read the angles less often, many fill the
device. H200, 12 heads of 128, microseconds of 4 and of 2 parts: 4.7 and 6.5 for 256 patches, 5.7 and 6.8 for 1024, 17.2
and 14.9 for 5476, 158 and 150 for 43,056.
"""

LEVELS_ROWS = 4
ALIGNED = 8
"""Values of a patch are padded to a multiple: products read rows in units of 16 bytes. H200, 43,056 patches of K3: the
projection takes 304 us with 588 values and 88 us with 592.
"""


def patches(pixel_values: Tensor, config: EncoderConfig, dtype: torch.dtype) -> Tensor:
    """Each of the 3 * 256 possible values is computed once by the plain version, so the two agree to the last bit.

    Rows of bytes come out with zeros up to a multiple of 8 values.
    """
    if pixel_values.dtype != torch.uint8:
        return plain_patches(pixel_values, config, dtype)
    pixels = pixel_values.flatten(1).contiguous()
    num_rows, width = pixels.shape
    out_width = triton.cdiv(width, ALIGNED) * ALIGNED
    out = torch.empty((num_rows, out_width), dtype=dtype, device=pixels.device)
    launch(
        fused_kernels.look_up_levels,
        (triton.cdiv(num_rows, LEVELS_ROWS),),
        (pixels, _level_table(config, dtype, pixels.device), out, num_rows),
        (width, out_width, triton.next_power_of_2(out_width), LEVELS_ROWS),
    )
    return out


@lru_cache(maxsize=8)
def _level_table(config: EncoderConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(3, 256): what each level of each channel becomes."""
    levels = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1, 1, 1).expand(256, 3, 1, 1)
    return plain_patches(levels, config, dtype).t().contiguous()


def add_norm(x: Tensor, delta: Tensor, norm: Norm) -> Tensor:
    out = torch.empty_like(x)
    width = x.shape[-1]
    bias = norm.bias
    launch(
        fused_kernels.add_norm_row,
        (x.shape[0],),
        (x, delta, norm.weight, norm.weight if bias is None else bias, out, norm.eps),
        (width, triton.next_power_of_2(width), bias is not None),
        num_warps=NORM_WARPS,
    )
    return out


def rotate(qkv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrites q and k inside the packed product and returns views of it."""
    num_rows, _, num_heads, head_dim = qkv.shape
    wanted = ROTATE_PARTS_LONG if num_rows >= LONG_ROWS else ROTATE_PARTS
    parts = wanted if 2 * num_heads % wanted == 0 else 2
    launch(
        fused_kernels.rotate_rows,
        (triton.cdiv(num_rows, ROTATE_ROWS), parts),
        (qkv, torch.view_as_real(rope), num_rows, qkv.stride(0)),
        (head_dim, triton.next_power_of_2(head_dim), ROTATE_ROWS, 2 * num_heads // parts),
    )
    return qkv[:, 0], qkv[:, 1]


def linear_gelu(x: Tensor, linear: nn.Linear) -> Tensor:
    """The GELU happens in the product's epilogue, before the one rounding."""
    bias = linear.bias if linear.bias is not None else _no_bias(linear.out_features, x.dtype, x.device)
    return torch._addmm_activation(bias, x, linear.weight.t(), use_gelu=True)


@lru_cache(maxsize=8)
def _no_bias(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The epilogue wants a bias."""
    return torch.zeros(width, dtype=dtype, device=device)


def merge_patches(x: Tensor, grids: Sequence[Grid], kernel: tuple[int, int]) -> Tensor:
    sources = torch.from_numpy(_sources(grids, kernel))
    if x.device.type == "cuda":
        sources = sources.pin_memory()
    num_rows, width = len(sources), x.shape[-1]
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    launch(
        fused_kernels.merge_rows,
        (num_rows,),
        (x, sources.to(x.device, non_blocking=True), out),
        (width, triton.next_power_of_2(width)),
    )
    return out.view(-1, kernel[0] * kernel[1], width)


def _sources(grids: Sequence[Grid], kernel: tuple[int, int]) -> npt.NDArray[np.int32]:
    """(4M, 3): for each output row its first row of x, the step to the next frame's, and the number of frames."""
    parts, start = [], 0
    for t, h, w in grids:
        part = np.empty((h * w, 3), np.int32)
        part[:, 0] = _cells(h, w, kernel)
        part[:, 0] += start
        part[:, 1:] = h * w, t
        parts.append(part)
        start += t * h * w
    return np.concatenate(parts)


@lru_cache(maxsize=64)
def _cells(h: int, w: int, kernel: tuple[int, int]) -> npt.NDArray[np.int32]:
    """(h * w,) patches of one frame in the order of the merged cells."""
    kh, kw = kernel
    cells = np.arange(h * w, dtype=np.int32).reshape(h // kh, kh, w // kw, kw)
    return cells.transpose(0, 2, 1, 3).ravel()


FUSED = Ops(patches, add_norm, rotate, linear_gelu, merge_patches)
