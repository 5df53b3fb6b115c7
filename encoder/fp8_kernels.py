# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `encoder.fp8`: one program a row; a `columns` is a width rounded up to a power of two.

`has_scales`: what is read is an unscaled product, and its scales of rows and of channels are float32.
"""

import triton
import triton.language as tl


@triton.jit
def _store_quantized(
    x,
    values_ptr,
    scale_ptr,
    row,
    width: tl.constexpr,
    columns: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
):
    """Write one float32 row, zero beyond its width, over the scale that makes its largest magnitude `largest`."""
    column = tl.arange(0, columns)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / largest, least_scale)
    tl.store(scale_ptr + row, scale)
    values = (x / scale).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * width + column, values, mask=column < width)


@triton.jit
def quantize_row(
    x_ptr,
    x_row_ptr,
    x_channel_ptr,
    values_ptr,
    scale_ptr,
    x_stride,
    width: tl.constexpr,
    columns: tl.constexpr,
    has_scales: tl.constexpr,
    gelu: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
):
    """The row, or its tanh GELU."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
    if has_scales:
        x *= tl.load(x_row_ptr + row) * tl.load(x_channel_ptr + column, mask=column < width, other=0.0)
    if gelu:
        # x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    _store_quantized(x, values_ptr, scale_ptr, row, width, columns, largest, least_scale)


@triton.jit
def add_norm_quantize_row(
    x_ptr,
    delta_ptr,
    delta_row_ptr,
    delta_channel_ptr,
    weight_ptr,
    bias_ptr,
    values_ptr,
    scale_ptr,
    eps,
    width: tl.constexpr,
    columns: tl.constexpr,
    has_delta: tl.constexpr,
    has_scales: tl.constexpr,
    is_layernorm: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
):
    """x += delta where there is one, then its RMSNorm or LayerNorm quantised, with float32 sums over the rounded x."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    offset = row * width + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if has_delta:
        delta = tl.load(delta_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if has_scales:
            delta *= tl.load(delta_row_ptr + row) * tl.load(delta_channel_ptr + column, mask=inside, other=0.0)
        x += delta
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offset, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if is_layernorm:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    out *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if is_layernorm:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _store_quantized(out, values_ptr, scale_ptr, row, width, columns, largest, least_scale)
