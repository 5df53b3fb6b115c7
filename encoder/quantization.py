"""Products in 8 bits: which ones, and what stands in for the modules around them.

A linear layer keeps its weights as float8_e4m3fn with one scale for each output channel, set once when the model is
loaded. What it multiplies gets one scale for each row, found as the row is made, so an embedding does not depend on
what shares its batch. Quantised are the products of the blocks. The patch projection, attention, the residual sums and
the projector, which would add to the error what it saves in 1 % of the time, stay in the model's dtype.

Every step has a plain version here; `encoder.fp8` has the same as kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from encoder.errors import SetupError
from encoder.model import Block, MoonViT3d
from encoder.ops import Norm, Ops, Product, Quantized, Rows, Unscaled

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
LEAST_SCALE = 1e-30  # of a row of zeros
SHORT_ROWS = 8192
"""Up to here the device multiplies faster without scales of rows and channels, if the step after applies them.

H200, microseconds of wo, fc0 and fc1 together, with and without: 28.4 and 15.9 for 256 patches, 30.9 and 24.4 for 1024,
95.4 and 87.3 for 5476, 244 and 256 for 16,384.
"""
ALIGNED = 16
"""Both sizes of a weight are a multiple of this, or the layer stays as it is: the product reads rows of 16 bytes."""


QUANTIZATIONS = ("fp8",)
LEAST_CAPABILITY = (8, 9)  # Ada; what is measured is Hopper


def check_quantization(name: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Look at names and capability only.

    Raises:
        SetupError: no such quantization, or this device or dtype does not go with it.
    """
    if name is None:
        return
    if name not in QUANTIZATIONS:
        raise SetupError(f"quantization {name!r:.80}: allowed are none, {', '.join(QUANTIZATIONS)}")
    if device.type != "cuda" or torch.version.hip:
        raise SetupError(f"quantization {name} needs an NVIDIA GPU, the device is {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise SetupError(f"quantization {name} needs compute capability {least} or later, the device has {found}")
    if dtype != torch.bfloat16:
        raise SetupError(f"quantization {name} goes with dtype bfloat16, not {str(dtype).removeprefix('torch.')}")


def quantize_rows(x: Tensor) -> Quantized:
    """(L, K) -> each row over the scale that makes its largest magnitude 448, rounded to nearest even.

    A row that holds a value that is not finite becomes one whose products are not.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return Quantized((wide / scale).to(FP8), scale)


def gelu_rows(x: Product) -> Quantized:
    """The tanh GELU in float32, then `quantize_rows`."""
    return quantize_rows(F.gelu(x.wide() if isinstance(x, Unscaled) else x.float(), approximate="tanh"))


def add_norm_rows(x: Tensor, delta: Product | None, norm: Norm) -> Quantized:
    """`encoder.ops.add_norm`, or the norm alone, quantised from float32 without a rounding between."""
    if delta is not None:
        x += delta.wide() if isinstance(delta, Unscaled) else delta
    weight = norm.weight.float()
    if norm.bias is None:
        return quantize_rows(F.rms_norm(x.float(), norm.width, weight, norm.eps))
    return quantize_rows(F.layer_norm(x.float(), norm.width, weight, norm.bias.float(), norm.eps))


def linear_gelu_rows(x: Quantized, weight: Quantized, out_scale: float) -> Quantized:
    """`gelu_rows` of the product, every row over the same scale, which is known before: see `gelu_scale`."""
    wide = F.gelu(emulated_product(x, weight, None, torch.float32), approximate="tanh")
    return Quantized((wide / out_scale).to(FP8), torch.full_like(x.scale, out_scale))


MARGIN = 9 / 8  # a value rounded to 8 bits is up to 1/16 larger


def gelu_scale(norm: Norm, weight: Quantized) -> float:
    """A scale that no value of the GELU of the product of a row of this norm exceeds 448 over.

    What a norm divides by leaves a row that is at most sqrt(D) long (Cauchy and Schwarz do the rest). An 8-bit float
    loses nothing by a bound that is too large until values are 2**14 times smaller than it.
    """
    channels, gain = weight.values.float() * weight.scale, norm.weight.float()
    most = norm.width[0] ** 0.5 * (channels * gain).norm(dim=1)
    if norm.bias is not None:
        most += channels.abs() @ norm.bias.float().abs()
    return float(most.max()) * MARGIN / LARGEST


@dataclass(frozen=True)
class RowOps:
    """One implementation of every step that quantises, under its name and with its contract.

    Attributes:
        linear_gelu_rows: product, GELU and rounding in one, for batches of at least `one_kernel_from` patches; or None.
    """

    quantize_rows: Callable[[Tensor], Quantized] = quantize_rows
    gelu_rows: Callable[[Product], Quantized] = gelu_rows
    add_norm_rows: Callable[[Tensor, Product | None, Norm], Quantized] = add_norm_rows
    linear_gelu_rows: Callable[[Quantized, Quantized, float], Quantized] | None = None
    one_kernel_from: int = 0


PLAIN_ROWS = RowOps()


class Turned(NamedTuple):
    """A weight as the device's product takes it: (K, N) and (1, N), views of what is (N, K) and (N, 1)."""

    values: Tensor
    scale: Tensor


def turn(weight: Quantized) -> Turned:
    return Turned(weight.values.t(), weight.scale.t())


def product(
    x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype, turned: Turned | None = None
) -> Tensor:
    """(L, K) x (N, K) -> (L, N) in dtype; the weight's scale is (N, 1). `turned` is `turn(weight)`, where kept."""
    values, scale = x
    if values.is_cpu:
        return emulated_product(x, weight, bias, dtype)
    other, channels = turned or turn(weight)
    return torch._scaled_mm(values, other, scale, channels, bias, None, dtype, True)  # fast accumulation


def unscaled_product(
    x: Quantized, weight: Quantized, one: Tensor, dtype: torch.dtype, turned: Turned | None = None
) -> Unscaled:
    """`product` without a bias, whose scales are yet to be applied; `one` is a scalar on the device."""
    values, scale = x
    if values.is_cpu:
        return Unscaled(F.linear(values.float(), weight.values.float()).to(dtype), scale, weight.scale)
    other, _ = turned or turn(weight)
    return Unscaled(torch._scaled_mm(values, other, one, one, None, None, dtype, True), scale, weight.scale)


def emulated_product(x: Quantized, weight: Quantized, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`product` of the numbers that the 8 bits stand for, in float32 on any device."""
    wide = None if bias is None else bias.float()
    return F.linear(x.values.float() * x.scale, weight.values.float() * weight.scale, wide).to(dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer in 8 bits. Takes (L, K) quantised already, or in the model's dtype; gives (L, N) in that dtype.

    Attributes:
        may_defer: the step after it takes an `Unscaled` product as well. A bias has to be added to a scaled one.
        gelu_scale: of fc0, where `RowOps.linear_gelu_rows` takes it.
    """

    scale: Tensor
    one: Tensor

    def __init__(self, linear: nn.Linear, ops: RowOps, *, may_defer: bool = False) -> None:
        nn.Module.__init__(self)  # no weights of its own to begin with
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.ops = linear.weight.dtype, ops
        weight = quantize_rows(linear.weight.detach())
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.register_buffer("scale", weight.scale, persistent=False)
        self.register_buffer("one", torch.ones((), device=weight.scale.device), persistent=False)
        self.bias = linear.bias
        self.may_defer = may_defer and linear.bias is None
        self.has_bias = linear.bias is not None
        self.gelu_scale: float | None = None
        self._hold()

    def _hold(self) -> None:
        # What every product needs. A module looks attributes up slowly, and a view costs the host two microseconds.
        weight = Quantized(self.weight.detach(), self.scale)
        self._held = weight, turn(weight), self.one, self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._hold()  # to another device, say
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._hold()  # a copy

    @property
    def held_weight(self) -> Quantized:
        return self._held[0]

    def forward(self, x: Rows) -> Product:  # type: ignore[override]  # deferred only where the step after takes it
        rows = x if isinstance(x, Quantized) else self.ops.quantize_rows(x)
        weight, turned, one, bias = self._held
        if self.may_defer and rows.values.shape[0] <= SHORT_ROWS:
            return unscaled_product(rows, weight, one, self.dtype, turned)
        return product(rows, weight, bias, self.dtype, turned)


class QuantizedNorm(Norm):
    """A norm whose result goes into a product and nowhere else."""

    def __init__(self, norm: Norm, ops: RowOps) -> None:
        super().__init__("rmsnorm" if norm.bias is None else "layernorm", norm.width[0], norm.eps)
        self.weight, self.bias, self.ops = norm.weight, norm.bias, ops

    def forward(self, x: Tensor) -> Quantized:  # type: ignore[override]  # the product after it takes both
        return self.ops.add_norm_rows(x, None, self)


def fits(linear: nn.Linear) -> bool:
    """Whether the product in 8 bits takes a layer of these sizes."""
    return linear.in_features % ALIGNED == 0 and linear.out_features % ALIGNED == 0


def quantize(model: MoonViT3d, ops: RowOps = PLAIN_ROWS) -> None:
    """Replace, in place, every linear layer of the blocks that fits, and the steps that feed it.

    The model keeps its keys. Its `ops` go on serving what is not quantised.
    """
    for block in model.vision_tower.encoder.blocks:
        _quantize_block(cast("Block", block), ops)
    model.ops = quantized_ops(model.ops, ops)


def _quantize_block(block: Block, ops: RowOps) -> None:
    mlp = block.mlp
    if fits(block.wqkv):
        block.norm0, block.wqkv = QuantizedNorm(block.norm0, ops), QuantizedLinear(block.wqkv, ops)
    if fits(block.wo):
        block.wo = QuantizedLinear(block.wo, ops, may_defer=True)
    if fits(mlp.fc0) and fits(mlp.fc1):  # the GELU between them quantises
        block.norm1 = QuantizedNorm(block.norm1, ops)
        fc0, fc1 = (QuantizedLinear(linear, ops, may_defer=True) for linear in (mlp.fc0, mlp.fc1))
        if ops.linear_gelu_rows is not None and not fc0.has_bias:
            fc0.gelu_scale = gelu_scale(block.norm1, Quantized(fc0.weight, fc0.scale))
        mlp.fc0, mlp.fc1 = fc0, fc1


def quantized_ops(ops: Ops, rows: RowOps) -> Ops:
    """`ops` for a model that `quantize` has changed: steps write rows in 8 bits where the next product takes them."""
    gelu_rows, add_norm_rows, one_kernel = rows.gelu_rows, rows.add_norm_rows, rows.linear_gelu_rows

    def add_norm(x: Tensor, delta: Product, norm: Norm) -> Rows:
        if isinstance(norm, QuantizedNorm):
            return add_norm_rows(x, delta, norm)
        return ops.add_norm(x, delta.wide().to(x.dtype) if isinstance(delta, Unscaled) else delta, norm)

    def linear_gelu(x: Rows, linear: nn.Linear) -> Rows:
        if isinstance(linear, QuantizedLinear):
            scale = linear.gelu_scale
            if (
                one_kernel is not None
                and scale is not None
                and isinstance(x, Quantized)
                and x.values.shape[0] >= rows.one_kernel_from
            ):
                return one_kernel(x, linear.held_weight, scale)
            return gelu_rows(linear.forward(x))
        return ops.linear_gelu(x, linear)

    return replace(ops, add_norm=add_norm, linear_gelu=linear_gelu)
