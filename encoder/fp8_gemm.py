# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""fc0 as a kernel of our own, whose epilogue applies the scales, the GELU, and rounds to 8 bits again."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from encoder.launch import launch
from encoder.ops import Quantized
from encoder.quantization import FP8


class Tiling(NamedTuple):
    rows: int
    channels: int
    depth: int
    stages: int
    warps: int
    flatten: bool = True


TILING = Tiling(128, 256, 64, 4, 8)
GROUP = 8  # row tiles that share the channels they read


@triton.jit(do_not_specialize=["num_rows"])
def gelu_product(
    row_ptr,
    channel_ptr,
    out_scale_ptr,
    x_desc,
    weight_desc,
    out_desc,
    out_scale,
    num_rows,
    num_channels,
    depth,
    block_rows: tl.constexpr,
    block_channels: tl.constexpr,
    block_depth: tl.constexpr,
    group: tl.constexpr,
    programs: tl.constexpr,
    flatten: tl.constexpr,
    out_dtype: tl.constexpr,
):
    """out = gelu((x @ weight.T) * row * channel) / out_scale; programs walk over tiles."""
    row_tiles, channel_tiles = tl.cdiv(num_rows, block_rows), tl.cdiv(num_channels, block_channels)
    for tile in tl.range(tl.program_id(0), row_tiles * channel_tiles, programs, flatten=flatten):
        first = (tile // (group * channel_tiles)) * group
        height = min(row_tiles - first, group)
        row = (first + (tile % (group * channel_tiles)) % height) * block_rows
        channel = ((tile % (group * channel_tiles)) // height) * block_channels
        acc = tl.zeros((block_rows, block_channels), tl.float32)
        for k in range(tl.cdiv(depth, block_depth)):
            x = x_desc.load([row, k * block_depth])
            weight = weight_desc.load([channel, k * block_depth])
            acc = tl.dot(x, weight.T, acc)
        rows = row + tl.arange(0, block_rows)
        inside = rows < num_rows
        acc *= tl.load(row_ptr + rows, mask=inside, other=0.0)[:, None]
        acc *= tl.load(channel_ptr + channel + tl.arange(0, block_channels))[None, :]
        acc *= tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))
        acc *= 1.0 / out_scale
        out_desc.store([row, channel], acc.to(out_dtype))
        tl.store(out_scale_ptr + rows, tl.zeros((block_rows,), tl.float32) + out_scale, mask=inside)


def linear_gelu_rows(x: Quantized, weight: Quantized, out_scale: float, tiling: Tiling = TILING) -> Quantized:
    """`encoder.quantization.linear_gelu_rows`; channels are a multiple of those of the tiling."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (num_rows, depth), num_channels = x.values.shape, weight.values.shape[0]
    if num_channels % tiling.channels:
        raise ValueError(f"{num_channels} channels: allowed are multiples of {tiling.channels}")
    # Triton's interpreter neither multiplies 8-bit numbers nor rounds to them: on a CPU all are float32 on the way.
    is_cpu = x.values.is_cpu
    rows, channels = (x.values.float(), weight.values.float()) if is_cpu else (x.values, weight.values)
    out = torch.empty((num_rows, num_channels), dtype=rows.dtype, device=rows.device)
    scale = torch.empty_like(x.scale)
    tiles = -(-num_rows // tiling.rows) * (num_channels // tiling.channels)
    cores = 2 if is_cpu else torch.cuda.get_device_properties(out.device).multi_processor_count
    programs = min(cores, tiles)
    launch(
        gelu_product,
        (programs,),
        (
            x.scale,
            weight.scale,
            scale,
            TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.depth]),
            TensorDescriptor.from_tensor(channels, [tiling.channels, tiling.depth]),
            TensorDescriptor.from_tensor(out, [tiling.rows, tiling.channels]),
            out_scale,
            num_rows,
            num_channels,
            depth,
        ),
        (
            *(tiling.rows, tiling.channels, tiling.depth, GROUP, programs, tiling.flatten),
            tl.float32 if is_cpu else tl.float8e4nv,
        ),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return Quantized(out.to(FP8) if is_cpu else out, scale)
