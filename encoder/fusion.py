"""Choose for each step between the products its fused version, where the device runs it and it is right."""

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.config import EncoderConfig
from encoder.grid import Grid
from encoder.ops import PLAIN, Norm, Ops
from encoder.position import rope_table

logger = logging.getLogger(__name__)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest relative L2 difference from the plain version: the two differ by one rounding here and there."""

GRIDS = [Grid(1, 4, 6), Grid(3, 2, 8), Grid(1, 2, 2)]  # an image, frames, and a number of patches that is no power of 2


def choose_ops(config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """The plain steps on a CPU; on a GPU each one fused, unless it fails or differs, which is logged."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return PLAIN
    from encoder.fused import FUSED

    return checked(FUSED, config, device, dtype)


def checked(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """`fused` with every step that fails or differs on this device replaced by the plain one."""
    chosen = fused
    for name, difference in DIFFERENCES.items():
        try:
            found = difference(fused, config, device, dtype)
            problem = None if found <= TOLERANCES[dtype] else f"differs by {found:.2g} from the plain version"
        except Exception as error:  # whatever a kernel compiler raises, the plain version serves
            logger.debug("fused %s failed", name, exc_info=True)
            problem = f"failed: {type(error).__name__}"
        if problem:
            logger.warning("fused %s is out of service on %s: %s", name, device, problem)
            chosen = replace(chosen, **{name: getattr(PLAIN, name)})
    return chosen


def _patches(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    patch = config.vision.patch_size
    levels = torch.arange(256 * 3 * patch * patch, device=device) % 256
    pixels = levels.view(256, 3, patch, patch).to(torch.uint8)
    width = fused.patches(pixels, config, dtype).shape[1]
    return _difference(lambda ops: _widened(ops.patches(pixels, config, dtype), width), fused)


def _widened(rows: Tensor, width: int) -> Tensor:
    return F.pad(rows, (0, width - rows.shape[1]))


def _add_norm(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    vision = config.vision
    width = vision.hidden_size
    norm = Norm(vision.norm_type, width, vision.norm_eps)
    for parameter in norm.parameters():
        parameter.data = _random((width,), device, dtype, seed=3)
    x, delta = _random((13, width), device, dtype), _random((13, width), device, dtype, seed=1)

    def both(ops: Ops) -> Tensor:
        stream = x.clone()
        return torch.stack([ops.add_norm(stream, delta, norm), stream])

    return _difference(both, fused)


def _rotate(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    vision = config.vision
    rope = rope_table(GRIDS, vision.head_dim, device)
    qkv = _random((len(rope), 3, vision.num_heads, vision.head_dim), device, dtype)

    def both(ops: Ops) -> Tensor:
        packed = qkv.clone()
        return torch.stack([*ops.rotate(packed, rope), packed[:, 2]])

    return _difference(both, fused)


def _linear_gelu(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    vision = config.vision
    linear = nn.Linear(vision.hidden_size, vision.intermediate_size, vision.linear_bias, device="meta")
    linear.weight = nn.Parameter(_random(tuple(linear.weight.shape), device, dtype) / vision.hidden_size**0.5)
    if vision.linear_bias:
        linear.bias = nn.Parameter(_random((vision.intermediate_size,), device, dtype, seed=1))
    x = _random((72, vision.hidden_size), device, dtype, seed=2)
    return _difference(lambda ops: ops.linear_gelu(x, linear), fused)


def _merge_patches(fused: Ops, config: EncoderConfig, device: torch.device, dtype: torch.dtype) -> float:
    x = _random((sum(grid.num_patches for grid in GRIDS), config.vision.hidden_size), device, dtype)
    return _difference(lambda ops: ops.merge_patches(x, GRIDS, config.vision.merge_kernel_size), fused)


DIFFERENCES: dict[str, Callable[[Ops, EncoderConfig, torch.device, torch.dtype], float]] = {
    "patches": _patches,
    "add_norm": _add_norm,
    "rotate": _rotate,
    "linear_gelu": _linear_gelu,
    "merge_patches": _merge_patches,
}
"""For each step of `Ops` how far the fused version is from the plain one on random numbers; NaN counts as different."""


def _difference(step: Callable[[Ops], Tensor], fused: Ops) -> float:
    with torch.inference_mode():
        got, want = step(fused).float(), step(PLAIN).float()
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
