# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernel of `triton_varlen`: one tile of queries against all keys of its segment, softmax on the way."""

import triton
import triton.language as tl


@triton.jit
def _load(
    base,
    rows,
    stride,
    num_rows,
    columns: tl.constexpr,
    head_dim: tl.constexpr,
    operand: tl.constexpr,
    masked: tl.constexpr,
):
    """A tile (rows, columns) of one head; zero from column head_dim on and, if masked, from row num_rows on."""
    column = tl.arange(0, columns)
    pointers = base + rows[:, None] * stride + column[None, :]
    if masked:
        tile = tl.load(pointers, mask=(rows < num_rows)[:, None] & (column < head_dim)[None, :], other=0.0)
    elif head_dim < columns:
        tile = tl.load(pointers, mask=(column < head_dim)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile.to(operand)


@triton.jit
def _take_keys(
    largest,
    total,
    acc,
    q,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    num_keys,
    scale,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    block_n: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
    masked: tl.constexpr,
):
    """Take block_n more keys, or if masked the last num_keys, into the running softmax of each query.

    It consists of the largest score so far in units of log2, the sum of the weights and the weighted sum of the values.
    """
    keys = tl.arange(0, block_n)
    k = _load(k_ptr, keys, k_stride, num_keys, columns, head_dim, operand, masked)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    if masked:
        scores = tl.where((keys < num_keys)[None, :], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_largest[:, None])
    fade = tl.exp2(largest - new_largest)
    v = _load(v_ptr, keys, v_stride, num_keys, columns, head_dim, operand, masked)
    acc = tl.dot(weights.to(operand), v, acc * fade[:, None], input_precision=precision)
    return new_largest, total * fade + tl.sum(weights, 1), acc


@triton.jit
def attend_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tiles_ptr,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    scale,
    q_head: tl.constexpr,
    k_head: tl.constexpr,
    v_head: tl.constexpr,
    out_head: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    operand: tl.constexpr,
    precision: tl.constexpr,
):
    """One program. Strides count elements: `*_stride` from patch to patch, `*_head` from head to head.

    The head's head_dim columns are padded to a power of two with zeros on the chip. (Covering 72 by 64 + 16 columns
    would save work, but Triton 3.6 compiles that to wrong code for Hopper.) operand is the dtype of both sides of a
    product; sums are float32.
    """
    # The programs of a segment are its tiles for the first head, then for the second, and so on: those that run
    # together read the same keys and values.
    program = tl.program_id(0)
    tile = tiles_ptr + 4 * (program // num_heads)
    start, length = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first_tile, num_tiles = tl.load(tile + 2), tl.load(tile + 3)
    within = program - num_heads * first_tile
    head = within // num_tiles
    row = (within % num_tiles) * block_m

    q_ptr += (start + row) * q_stride + head * q_head
    k_ptr += start * k_stride + head * k_head
    v_ptr += start * v_stride + head * v_head
    out_ptr += (start + row) * out_stride + head * out_head

    queries = tl.arange(0, block_m)
    q = _load(q_ptr, queries, q_stride, length - row, columns, head_dim, operand, True)
    largest = tl.full((block_m,), float("-inf"), tl.float32)
    total = tl.zeros((block_m,), tl.float32)
    acc = tl.zeros((block_m, columns), tl.float32)
    for _ in range(length // block_n):
        largest, total, acc = _take_keys(
            largest,
            total,
            acc,
            q,
            k_ptr,
            v_ptr,
            k_stride,
            v_stride,
            0,
            scale,
            head_dim,
            columns,
            block_n,
            operand,
            precision,
            False,
        )
        k_ptr += block_n * k_stride
        v_ptr += block_n * v_stride
    rest = length % block_n
    if rest > 0:
        largest, total, acc = _take_keys(
            largest,
            total,
            acc,
            q,
            k_ptr,
            v_ptr,
            k_stride,
            v_stride,
            rest,
            scale,
            head_dim,
            columns,
            block_n,
            operand,
            precision,
            True,
        )

    column = tl.arange(0, columns)
    inside = (queries < length - row)[:, None] & (column < head_dim)[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + queries[:, None] * out_stride + column[None, :], out, mask=inside)
