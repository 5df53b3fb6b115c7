"""Choose for each step between the products its fused version, where the device runs it and it is right."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import EncoderConfig
from encoder.errors import SetupError
from encoder.grid import Grid
from encoder.ops import PLAIN, Norm, Ops, Product, Quantized, Unscaled
from encoder.position import rope_table
from encoder.quantization import (
    PLAIN_ROWS,
    RowOps,
    emulated_product,
    linear_gelu_rows,
    product,
    quantize_rows,
)

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative L2 difference from the plain version: the two differ by one rounding here and there."""

OWN_TOLERANCES = {"linear_gelu_rows": 1.2e-2}
"""Of steps whose own sums differ: those of a product in 8 bits are cut short on a GPU, so one value in a hundred is
rounded to the next of 8 bits, a sixteenth away. An H200 gives 6.4e-3; a scale that is 2 % off gives 2e-2.
"""

GRIDS = [Grid(1, 4, 6), Grid(3, 2, 8), Grid(1, 2, 2)]  # an image, frames, and a number of patches that is no power of 2


def choose_ops(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """The plain steps on a CPU; on a GPU each one fused, unless it fails or differs, which is logged."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PLAIN
    from encoder.fused import FUSED

    return checked(FUSED, config, device, dtype)


def choose_row_ops(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> RowOps:
    """The same choice among the steps that quantise; the products themselves have no plain version to serve instead.

    Raises:
        SetupError: the device's own product in 8 bits fails or is wrong.
    """
    try:
        found = _product(config, device, dtype)
        problem = None if found <= TOLERANCES[dtype] else f"differ by {found:.2g} from float32 ones of the same numbers"
    except RuntimeError as error:
        logger.debug("products in 8 bits failed", exc_info=True)
        problem = f"failed: {type(error).__name__}"
    if problem:
        raise SetupError(f"quantization fp8: products on {device} {problem}")
    if importlib.util.find_spec("triton") is None:
        return PLAIN_ROWS
    from encoder.fp8 import FUSED_ROWS

    return _checked(FUSED_ROWS, PLAIN_ROWS, ROW_DIFFERENCES, config, device, dtype)


Steps = TypeVar("Steps", Ops, RowOps)


def checked(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """`fused` with every step that fails or differs on this device replaced by the plain one."""
    return _checked(fused, PLAIN, DIFFERENCES, config, device, dtype)


def _checked(
    fused: Steps,
    plain: Steps,
    differences: "dict[str, Callable[[Any, EncoderConfig, torch.device, torch.dtype], float]]",
    config: EncoderConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Steps:
    chosen = fused
    for name, difference in differences.items():
        try:
            found = difference(fused, config, device, dtype)
            allowed = OWN_TOLERANCES.get(name, TOLERANCES[dtype])
            problem = None if found <= allowed else f"differs by {found:.2g} from the plain version"
        except Exception as error:  # whatever a kernel compiler raises, the plain version serves
            logger.debug("fused %s failed", name, exc_info=True)
            problem = f"failed: {type(error).__name__}"
        if problem:
            logger.warning("fused %s is out of service on %s: %s", name, device, problem)
            chosen = replace(chosen, **{name: getattr(plain, name)})
    return chosen


def _patches(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    patch = config.vision.patch_size
    levels = torch.arange(256 * 3 * patch * patch, device=device) % 256
    pixels = levels.view(256, 3, patch, patch).to(torch.uint8)
    width = fused.patches(pixels, config, dtype).shape[1]
    return _difference(lambda ops: _widened(ops.patches(pixels, config, dtype), width), fused, PLAIN)


def _widened(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[1]))


def _add_norm(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x, delta, norm = _norm_and_rows(config, device, dtype)

    def both(ops: Ops) -> Tensor:
        stream = x.clone()
        return torch.stack([cast("Tensor", ops.add_norm(stream, delta, norm)), stream])

    return _difference(both, fused, PLAIN)


def _norm_and_rows(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Norm]:
    vision = config.vision
    width = vision.hidden_size
    norm = Norm(vision.norm_type, width, vision.norm_eps)
    for parameter in norm.parameters():
        parameter.data = _random((width,), device, dtype, seed=3)
    return _random((13, width), device, dtype), _random((13, width), device, dtype, seed=1), norm


def _rotate(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    vision = config.vision
    rope = rope_table(GRIDS, vision.head_dim, device)
    qkv = _random((len(rope), 3, vision.num_heads, vision.head_dim), device, dtype)

    def both(ops: Ops) -> Tensor:
        packed = qkv.clone()
        return torch.stack([*ops.rotate(packed, rope), packed[:, 2]])

    return _difference(both, fused, PLAIN)


def _linear_gelu(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    vision = config.vision
    linear = nn.Linear(vision.hidden_size, vision.intermediate_size, vision.linear_bias, device="meta")
    linear.weight = nn.Parameter(_random(tuple(linear.weight.shape), device, dtype) / vision.hidden_size**0.5)
    if vision.linear_bias:
        linear.bias = nn.Parameter(_random((vision.intermediate_size,), device, dtype, seed=1))
    x = _random((72, vision.hidden_size), device, dtype, seed=2)
    return _difference(lambda ops: cast("Tensor", ops.linear_gelu(x, linear)), fused, PLAIN)


def _merge_patches(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x = _random((sum(grid.num_patches for grid in GRIDS), config.vision.hidden_size), device, dtype)
    return _difference(lambda ops: ops.merge_patches(x, GRIDS, config.vision.merge_kernel_size), fused, PLAIN)


DIFFERENCES: dict[str, Callable[[Ops, EncoderConfig, torch.device, torch.dtype], float]] = {
    "patches": _patches,
    "add_norm": _add_norm,
    "rotate": _rotate,
    "linear_gelu": _linear_gelu,
    "merge_patches": _merge_patches,
}
"""For each step of `Ops` how far the fused version is from the plain one on random numbers; NaN counts as different."""


def _product(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    width, rows = config.vision.hidden_size, 72
    x, weight = (_random((size, width), device, dtype, seed=size) for size in (rows, 2 * width))
    arguments = quantize_rows(x), quantize_rows(weight), _random((2 * width,), device, dtype), dtype
    got, want = product(*arguments).float(), emulated_product(*arguments).float()
    return float((got - want).norm() / want.norm())


def _quantize_rows(fused: RowOps, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x = _random((13, 3 * config.vision.qkv_hidden_size), device, dtype)[:, : config.vision.qkv_hidden_size]
    return _difference(lambda ops: _meant(ops.quantize_rows(x)), fused, PLAIN_ROWS)


def _gelu_rows(fused: RowOps, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x = _random((13, config.vision.intermediate_size), device, dtype)
    products: tuple[Product, ...] = (x, _unscaled(x))

    def both(ops: RowOps) -> Tensor:
        return torch.cat([_meant(ops.gelu_rows(each)) for each in products])

    return _difference(both, fused, PLAIN_ROWS)


def _add_norm_rows(fused: RowOps, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x, delta, norm = _norm_and_rows(config, device, dtype)

    def both(ops: RowOps) -> Tensor:
        stream = x.clone()
        found = [_meant(ops.add_norm_rows(stream, each, norm)) for each in (None, delta, _unscaled(delta))]
        return torch.stack([*found, stream.float()])

    return _difference(both, fused, PLAIN_ROWS)


def _unscaled(x: Tensor) -> Unscaled:
    """What has scales between 0.5 and 1.5 yet to be applied to x."""
    row, channel = (torch.linspace(0.5, 1.5, size, device=x.device)[:, None] for size in x.shape)
    return Unscaled(x, row, channel)


def _meant(rows: Quantized) -> Tensor:
    return rows.values.float() * rows.scale


def _linear_gelu_rows(fused: RowOps, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    if fused.linear_gelu_rows is None or config.vision.linear_bias:  # which layers with a bias do not take
        return 0.0
    width, channels = config.vision.hidden_size, config.vision.intermediate_size
    # Of one seed, rows of both would be equal, and their products larger than the scale allows.
    x, weight = (quantize_rows(_random((rows, width), device, dtype, seed=rows)) for rows in (300, channels))
    arguments = x, weight._replace(scale=weight.scale / width**0.5), 0.02  # for values of up to 9, of variance 1
    got, want = _meant(fused.linear_gelu_rows(*arguments)), _meant(linear_gelu_rows(*arguments))
    return float((got - want).norm() / want.norm())


ROW_DIFFERENCES: dict[str, Callable[[RowOps, EncoderConfig, torch.device, torch.dtype], float]] = {
    "quantize_rows": _quantize_rows,
    "gelu_rows": _gelu_rows,
    "add_norm_rows": _add_norm_rows,
    "linear_gelu_rows": _linear_gelu_rows,
}
"""For each step of `RowOps` as `DIFFERENCES`."""


def _difference(step: Callable[[Steps], Tensor], fused: Steps, plain: Steps) -> float:
    with torch.inference_mode():
        got, want = step(fused).float(), step(plain).float()
        return float((got - want).norm() / want.norm()) if got.shape == want.shape else float("inf")


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def names(ops: Ops) -> dict[str, str]:
    """Step -> "plain" or "fused"."""
    return {
        field.name: "plain" if getattr(ops, field.name) is getattr(PLAIN, field.name) else "fused"
        for field in fields(Ops)
    }
