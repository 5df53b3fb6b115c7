"""q, k and v to 8 bits for `flashinfer_fp8`, one scale for each head of each; as kernels, and in plain PyTorch."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from encoder.attention import fp8_kernel
from encoder.launch import launch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
LEAST_SCORE_SCALE = 0.25
"""Of q and of k. The kernel gives a key beyond the end of its segment the score -5e4 before scales are applied
(FlashInfer 0.6.13, `math::inf`), so the two scales must leave that far below every score. These leave it at -276; with
scales that make the most of the 8 bits it came to -2, and segments that do not fill their last tile of 192 keys were
off by up to 0.9.
"""
LEAST_SCALE = 1e-30  # of a head of v that is all zeros
SEARCHED_ROWS, WRITTEN_ROWS = 64, 16  # patches of a program
TURNED_TOLERANCE = 6e-3  # relative L2; a sum in another order may round to another of the 8-bit numbers

logger = logging.getLogger(__name__)


class QuantizedHeads(NamedTuple):
    """q, k and v in 8 bits: what they stand for is values * scale.

    Attributes:
        values: (3, L, H, Dh) float8_e4m3fn.
        scale: (3, H) float32, powers of two.
    """

    values: Tensor
    scale: Tensor


def quantize_heads(q: Tensor, k: Tensor, v: Tensor) -> QuantizedHeads:
    """q, k, v: (L, H, Dh), views of one packed product or not; Dh a power of two.

    The scale of a head is the least power of two that keeps its largest magnitude in the batch within 448, but not less
    than `LEAST_SCORE_SCALE` of q and k. 8-bit floats round the same way under every such scale until they run out of
    exponents, 2**14 below the largest: so a neighbour in the batch does not change the bits of anything that counts.
    """
    return _quantize(packed(q, k, v), None)


def turn_and_quantize_heads(qkv: Tensor, rope: Tensor) -> QuantizedHeads:
    """The same of q and k rotated as `encoder.ops.rotate` does, without a rounding between; qkv is left as it is.

    The scales hold the longest pair of a head, which a rotation leaves as long: at most one power of two more.

    Args:
        qkv: (L, 3, H, Dh), heads side by side.
        rope: (L, Dh / 2) complex64.
    """
    return _quantize(qkv, torch.view_as_real(rope))


def _quantize(qkv: Tensor, rope: Tensor | None) -> QuantizedHeads:
    num_rows, _, num_heads, head_dim = qkv.shape
    row_stride, turns = qkv.stride(0), rope is not None
    # The interpreter rounds to 8 bits wrongly, PyTorch does it there.
    dtype = torch.float32 if qkv.is_cpu else FP8
    values = qkv.new_empty((3, num_rows, num_heads, head_dim), dtype=dtype)
    largest = qkv.new_zeros((3, num_heads), dtype=torch.float32)
    scale = torch.empty_like(largest)
    launch(
        fp8_kernel.largest_of_heads,
        (-(-num_rows // SEARCHED_ROWS), 3 * num_heads),
        (qkv, largest, num_rows, row_stride),
        (num_heads, head_dim, SEARCHED_ROWS, turns),
    )
    launch(
        fp8_kernel.quantize_heads,
        (-(-num_rows // WRITTEN_ROWS), 3),
        (qkv, largest if rope is None else rope, largest, scale, values, num_rows, row_stride),
        (num_heads, head_dim, WRITTEN_ROWS, turns, LARGEST, LEAST_SCORE_SCALE, LEAST_SCALE),
    )
    return QuantizedHeads(values.to(FP8) if qkv.is_cpu else values, scale)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(L, 3, H, Dh) with heads side by side: the product that the three are views of, or a copy."""
    _, num_heads, head_dim = q.shape
    step = num_heads * head_dim * q.element_size()
    if (
        q.stride() == k.stride() == v.stride()
        and q.stride()[1:] == (head_dim, 1)
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and (k.data_ptr() - q.data_ptr(), v.data_ptr() - q.data_ptr()) == (step, 2 * step)
    ):
        strides = (q.stride(0), num_heads * head_dim, head_dim, 1)
        return q.as_strided((q.shape[0], 3, num_heads, head_dim), strides)
    return torch.stack((q, k, v), dim=1)


def plain_quantize_heads(q: Tensor, k: Tensor, v: Tensor) -> QuantizedHeads:
    """`quantize_heads` in plain PyTorch."""
    heads = torch.stack((q, k, v)).float()
    return _plain(heads, heads.abs().amax((1, 3)))


def plain_turn_and_quantize_heads(qkv: Tensor, rope: Tensor) -> QuantizedHeads:
    """`turn_and_quantize_heads` in plain PyTorch."""
    wide = qkv.float()
    pairs = torch.view_as_complex(wide[:, :2].reshape(*qkv.shape[:1], 2, *qkv.shape[2:-1], -1, 2))
    turned = torch.view_as_real(pairs * rope[:, None, None]).flatten(-2)
    largest = torch.cat((pairs.abs().amax((0, 3)), wide[:, 2:].abs().amax((0, 3))))
    return _plain(torch.cat((turned, wide[:, 2:]), 1).transpose(0, 1), largest)


def _plain(heads: Tensor, largest: Tensor) -> QuantizedHeads:
    """(3, L, H, Dh) and (3, H), both float32."""
    floor = torch.tensor([LEAST_SCORE_SCALE, LEAST_SCORE_SCALE, LEAST_SCALE], device=heads.device)[:, None]
    scale = torch.exp2(torch.ceil(torch.log2(torch.maximum(largest / LARGEST, floor))))
    return QuantizedHeads((heads / scale[:, None, :, None]).to(FP8), scale)


def turns_right(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> bool:
    """Whether rotating and rounding in one pass does here what it should; if not, the two are done one by one."""
    generator = torch.Generator().manual_seed(0)
    qkv = (8 * torch.randn(77, 3, num_heads, head_dim, generator=generator)).to(device, dtype)
    angles = 100 * torch.rand(77, head_dim // 2, generator=generator)
    rope = torch.polar(torch.ones_like(angles), angles).to(device)
    try:
        got, want = (
            heads.values.float() * heads.scale[:, None, :, None]
            for heads in (turn_and_quantize_heads(qkv, rope), plain_turn_and_quantize_heads(qkv, rope))
        )
        difference = float((got - want).norm() / want.norm())
        problem = None if difference <= TURNED_TOLERANCE else f"differs by {difference:.2g} from the plain version"
    except Exception as error:  # whatever a kernel compiler raises
        logger.debug("rotation to 8 bits failed", exc_info=True)
        problem = f"failed: {type(error).__name__}"
    if problem:
        logger.warning("rotation to 8 bits is out of service on %s: %s", device, problem)
    return problem is None
