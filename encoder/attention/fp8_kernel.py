# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `fp8_heads`: the packed product to 8 bits, with one scale for each head of q, of k and of v.

Heads count q's, then k's, then v's. `turns`: q and k are rotated on the way.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def largest_of_heads(
    qkv_ptr,
    largest_ptr,
    num_rows,
    row_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    turns: tl.constexpr,
):
    """Raise largest[head] to the largest magnitude of block_rows patches; one program a head.

    Of what is to be rotated to the length of a pair, which no rotation changes and neither of the two exceeds.
    """
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.program_id(1) * head_dim + tl.arange(0, head_dim)
    pointers = qkv_ptr + row[:, None] * row_stride + column[None, :]
    x = tl.load(pointers, mask=(row < num_rows)[:, None], other=0.0).to(tl.float32)
    found = tl.max(tl.max(tl.abs(x), 1), 0)
    if turns:
        a, b = tl.split(tl.reshape(x, (block_rows, head_dim // 2, 2)))
        lengths = tl.sqrt(a * a + b * b)
        found = tl.where(tl.program_id(1) < 2 * num_heads, tl.max(tl.max(lengths, 1), 0), found)
    tl.atomic_max(largest_ptr + tl.program_id(1), found)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_heads(
    qkv_ptr,
    rope_ptr,
    largest_ptr,
    scale_ptr,
    out_ptr,
    num_rows,
    row_stride,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    turns: tl.constexpr,
    bound: tl.constexpr,
    least_score_scale: tl.constexpr,
    least_scale: tl.constexpr,
):
    """out (3, rows, heads, head_dim) over scale[head], the least power of two that keeps largest[head] within `bound`.

    Of q and k it is at least least_score_scale, of v at least least_scale. One program takes block_rows patches of all
    heads of q, of k or of v. rope holds cosine and sine of each pair side by side, head_dim float32 a patch.
    """
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, head_dim)
    inside = (row < num_rows)[:, None]
    is_score = part < 2
    least = tl.where(is_score, least_score_scale, least_scale)
    if turns:
        turned = inside & (part * head_dim + column < 2 * head_dim)[None, :]  # v is not
        angles = tl.load(rope_ptr + row[:, None] * head_dim + column[None, :], mask=turned, other=0.0)
        cosine, sine = tl.split(tl.reshape(angles, (block_rows, head_dim // 2, 2)))
        cosine = tl.where(is_score, cosine, 1.0)
    first = part * num_heads * head_dim
    rows_in = qkv_ptr + row[:, None] * row_stride + first + column[None, :]
    rows_out = out_ptr + (part.to(tl.int64) * num_rows + row)[:, None] * (num_heads * head_dim) + column[None, :]
    for head in tl.static_range(num_heads):
        x = tl.load(rows_in + head * head_dim, mask=inside, other=0.0).to(tl.float32)
        if turns:
            a, b = tl.split(tl.reshape(x, (block_rows, head_dim // 2, 2)))
            x = tl.reshape(tl.join(a * cosine - b * sine, a * sine + b * cosine), (block_rows, head_dim))
        scale = tl.maximum(tl.load(largest_ptr + part * num_heads + head) / bound, least)
        # Rounded up to a power of two: any bit of the mantissa raises the exponent, then the mantissa is cleared.
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scale_ptr + part * num_heads + head, scale)
        tl.store(rows_out + head * head_dim, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)
