"""The steps of `encoder.quantization` on a GPU: rows in 8 bits are written by the kernel that computes them."""

from functools import lru_cache

import torch
from torch import Tensor

from encoder import fp8_gemm, fp8_kernels
from encoder.launch import launch
from encoder.ops import Norm, Product, Quantized, Unscaled
from encoder.quantization import FP8, LARGEST, LEAST_SCALE, RowOps

NORM_WARPS = 4  # as in `encoder.fused`
COLUMNS_OF_A_WARP = 512  # 16 values a thread

FUSED_FC0_FROM: int | None = 4096
"""Patches from which fc0, GELU and rounding are one kernel. H200, microseconds of it and of the best two: 60 and 63 for
5476 patches, 159 and 173 for 16,384, 410 and 491 for 43,056.
"""


def quantize_rows(x: Tensor) -> Quantized:
    return _rows(x, gelu=False)


def gelu_rows(x: Product) -> Quantized:
    return _rows(x, gelu=True)


def _rows(product: Product, *, gelu: bool) -> Quantized:
    has_scales = isinstance(product, Unscaled)
    x, row, channel = product if isinstance(product, Unscaled) else (product, product, product)
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    values, scale = _empty(x)
    columns, warps = _shape(width)
    launch(
        fp8_kernels.quantize_row,
        (num_rows,),
        (x, row, channel, values, scale, x.stride(0)),
        (width, columns, has_scales, gelu, LARGEST, LEAST_SCALE),
        num_warps=warps,
    )
    return Quantized(values.to(FP8) if x.is_cpu else values, scale)


def add_norm_rows(x: Tensor, delta: Product | None, norm: Norm) -> Quantized:
    has_scales = isinstance(delta, Unscaled)
    added, row, channel = delta if isinstance(delta, Unscaled) else (x if delta is None else delta, x, x)
    num_rows, width = x.shape
    values, scale = _empty(x)
    weight, bias = norm.weight, norm.bias
    launch(
        fp8_kernels.add_norm_quantize_row,
        (num_rows,),
        (x, added, row, channel, weight, weight if bias is None else bias, values, scale, norm.eps),
        (width, _shape(width)[0], delta is not None, has_scales, bias is not None, LARGEST, LEAST_SCALE),
        num_warps=NORM_WARPS,
    )
    return Quantized(values.to(FP8) if x.is_cpu else values, scale)


@lru_cache(maxsize=64)
def _shape(width: int) -> tuple[int, int]:
    """The width rounded up to a power of two, and warps for it."""
    columns = 1 << (width - 1).bit_length()
    return columns, min(16, max(1, columns // COLUMNS_OF_A_WARP))


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    # Triton's interpreter rounds to 8 bits wrongly (127.8 becomes 64), so on a CPU PyTorch rounds what a kernel gives.
    dtype = torch.float32 if x.is_cpu else FP8
    values = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return values, x.new_empty((x.shape[0], 1), dtype=torch.float32)


FUSED_ROWS = RowOps(
    quantize_rows,
    gelu_rows,
    add_norm_rows,
    linear_gelu_rows=None if FUSED_FC0_FROM is None else fp8_gemm.linear_gelu_rows,
    one_kernel_from=FUSED_FC0_FROM or 0,
)
