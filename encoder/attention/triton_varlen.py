"""This project's own ragged attention: one Triton kernel over a list of query tiles made on the host.

A program takes block_m queries of one head of one segment and walks over that segment's keys with an online softmax
in float32. The list holds only tiles that exist, so no program is idle however unequal the segments are, and it
starts with the longest segments, so that the device does not end on them.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.attention.contract import Attend
from encoder.attention.triton_kernel import attend_tile
from encoder.launch import launch

LOG2_E = math.log2(math.e)
PRECISION = "tf32x3"  # of float32 products: three of TF32, as exact as one of float32
OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Tiling(NamedTuple):
    """How a launch is cut: queries of a program, keys of a step, warps of a program, depth of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, columns: int, itemsize: int) -> int:
        """On-chip memory of a program: its queries (twice for three TF32 products), the keys and values in flight."""
        queries = self.block_m * (2 if itemsize == 4 else 1)
        return (queries + 2 * self.block_n * self.num_stages) * columns * itemsize


# Of each list the first that fits the device's memory is taken. Measured on an H200 in bfloat16; TFLOP/s of
# (64, 64, 4, 3) and (128, 128, 8, 3) with 12 heads of 128: 268 and 235 on 64 x 256 patches, 522 and 516 on 4 x 4096,
# 477 and 514 on 8 x 5476; with 16 heads of 72: 156 and 143, 261 and 271, 258 and 278; with 24 heads of 64 the
# smaller one is ahead everywhere: 281 and 183, 471 and 392, 454 and 399. In float32, 12 heads of 128, 12 mixed
# segments: (32, 64, 4, 2) 39, (32, 32, 4, 2) 32, (64, 32, 4, 2) 16, `sdpa` 42.
SHORT = (Tiling(64, 64, 4, 3), Tiling(64, 64, 4, 2), Tiling(64, 32, 4, 2), Tiling(32, 32, 4, 1))
LONG = (Tiling(128, 128, 8, 3), *SHORT)
LONG_PATCHES, LONG_PATCHES_PADDED = 5000, 1000  # patches that a patch attends to, on average
FLOAT32 = (Tiling(32, 64, 4, 2), Tiling(32, 32, 4, 2), Tiling(32, 32, 4, 1), Tiling(16, 16, 4, 1))


def choose_tiling(lengths: Sequence[int], head_dim: int, columns: int, itemsize: int, shared_bytes: int) -> Tiling:
    """For segments of these lengths and heads padded to `columns`; the smallest one if none fits the device."""
    mean = sum(n * n for n in lengths) / max(1, sum(lengths))
    is_long = columns >= 128 and mean >= (LONG_PATCHES if head_dim == columns else LONG_PATCHES_PADDED)
    tilings = FLOAT32 if itemsize == 4 else LONG if is_long else SHORT
    return next((each for each in tilings if each.shared_bytes(columns, itemsize) <= shared_bytes), tilings[-1])


def list_tiles(lengths: Sequence[int], block_m: int) -> npt.NDArray[np.int32]:
    """(tiles, 4): start and length of the tile's segment in patches, the segment's first tile and number of tiles.

    Longest segments first. A row stands for that tile of every head.
    """
    length = np.asarray(lengths, dtype=np.int64)
    start = np.cumsum(length) - length
    order = np.argsort(-length, kind="stable")
    count = -(-length[order] // block_m)
    segments = np.stack([start[order], length[order], np.cumsum(count) - count, count], axis=1)
    return np.repeat(segments, count, axis=0).astype(np.int32)


def _shared_bytes(device: torch.device) -> int:
    """On-chip memory that one program may take."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


class TritonAttention:
    """Reads q, k and v where they lie: any strides between patches and heads, channels of a head side by side."""

    def __init__(self, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
        self._device, self._num_heads, self._head_dim = device, num_heads, head_dim
        self._columns = max(16, triton.next_power_of_2(head_dim))  # 16: the smallest matrix product
        self._itemsize = dtype.itemsize
        # The interpreter multiplies the bit patterns of bfloat16 numbers as integers, so there they are widened.
        interpreted = device.type == "cpu"
        self._operand = tl.float32 if interpreted else OPERANDS[dtype]
        self._shared_bytes = 2**30 if interpreted else _shared_bytes(device)

    def plan(self, lengths: Sequence[int], cu_seqlens: Tensor) -> Attend:
        tiling = self.choose_tiling(lengths)
        host_tiles = torch.from_numpy(list_tiles(lengths, tiling.block_m))
        if self._device.type == "cuda":
            # A fresh pinned block for each plan: PyTorch hands it out again only once this copy has been made.
            host_tiles = host_tiles.pin_memory()
        tiles = host_tiles.to(self._device, non_blocking=True)
        return self.over(tiles, tiling)

    def choose_tiling(self, lengths: Sequence[int]) -> Tiling:
        """For this device and model, see the function of this name."""
        return choose_tiling(lengths, self._head_dim, self._columns, self._itemsize, self._shared_bytes)

    def over(self, tiles: Tensor, tiling: Tiling) -> Attend:
        """Attend over a list of `list_tiles` on the device; what it says when a launch runs counts."""
        return lambda q, k, v: self._launch(q, k, v, tiles, tiling)

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, tiling: Tiling) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not len(tiles):
            return out
        launch(
            attend_tile,
            (len(tiles) * self._num_heads,),
            (
                *(q, k, v, out, tiles),
                *(q.stride(0), k.stride(0), v.stride(0), out.stride(0)),
                LOG2_E / math.sqrt(self._head_dim),
            ),
            (
                *(q.stride(1), k.stride(1), v.stride(1), out.stride(1)),
                *(self._num_heads, self._head_dim, self._columns),
                *(tiling.block_m, tiling.block_n, self._operand, PRECISION),
            ),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        return out
