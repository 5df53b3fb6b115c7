# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `encoder.fused`. Rows are contiguous; a `columns` is a width rounded up to a power of two."""

import triton
import triton.language as tl


@triton.jit
def add_norm_row(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    width: tl.constexpr,
    columns: tl.constexpr,
    is_layernorm: tl.constexpr,
):
    """One program a row: x += delta, then its RMSNorm or LayerNorm, with float32 sums over the rounded x."""
    column = tl.arange(0, columns)
    inside = column < width
    offset = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + offset, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if is_layernorm:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    out = x * scale * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if is_layernorm:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rotate_rows(
    qkv_ptr,
    rope_ptr,
    num_rows,
    row_stride,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    heads: tl.constexpr,
):
    """One program turns block_rows patches of `heads` neighbouring heads, q's and k's counted as one list, in place.

    rope holds cosine and sine of each pair side by side, head_dim float32 a patch.
    """
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < head_dim)[None, :]
    turns = tl.load(rope_ptr + row[:, None] * head_dim + column[None, :], mask=inside, other=0.0)
    cosine, sine = tl.split(tl.reshape(turns, (block_rows, columns // 2, 2)))
    base = qkv_ptr + row[:, None] * row_stride + tl.program_id(1) * heads * head_dim + column[None, :]
    for head in tl.static_range(heads):
        pointers = base + head * head_dim
        pairs = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (block_rows, columns // 2, 2)))
        turned = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), (block_rows, columns))
        tl.store(pointers, turned.to(qkv_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def look_up_levels(
    pixels_ptr,
    table_ptr,
    out_ptr,
    num_rows,
    width: tl.constexpr,
    out_width: tl.constexpr,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
):
    """8-bit levels -> table[channel, level], a third of a row's width each channel; zeros up to out_width."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, columns)
    is_row = (row < num_rows)[:, None]
    is_level = is_row & (column < width)[None, :]
    level = tl.load(pixels_ptr + row[:, None] * width + column[None, :], mask=is_level, other=0).to(tl.int32)
    channel = (column // (width // 3))[None, :]
    value = tl.load(table_ptr + channel * 256 + level, mask=is_level, other=0.0)
    tl.store(out_ptr + row[:, None] * out_width + column[None, :], value, mask=is_row & (column < out_width)[None, :])


@triton.jit
def merge_rows(x_ptr, sources_ptr, out_ptr, width: tl.constexpr, columns: tl.constexpr):
    """One program an output row: the mean, in float32, of the rows first, first + step, ... of x.

    sources holds (first, step, number) for each output row.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    inside = column < width
    first = tl.load(sources_ptr + 3 * program).to(tl.int64)
    step = tl.load(sources_ptr + 3 * program + 1)
    number = tl.load(sources_ptr + 3 * program + 2)
    total = tl.zeros((columns,), tl.float32)
    for i in range(number):
        total += tl.load(x_ptr + (first + i * step) * width + column, mask=inside, other=0.0).to(tl.float32)
    mean = (total / number).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + program * width + column, mean, mask=inside)
