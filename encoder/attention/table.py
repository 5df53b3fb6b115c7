"""The table of attention backends, in the order `auto` tries them, and what each needs to run.

A predicate looks only at the kind of device, its compute capability, the dtype, the head size and whether a library
is installed (`find_spec` imports nothing). Libraries and kernels are imported by the loaders.
"""

import importlib.util
import os
from collections.abc import Container
from pathlib import Path

import torch

from encoder.attention.contract import AttentionBackend, Entry
from encoder.attention.reference import ReferenceAttention
from encoder.attention.sdpa import SdpaAttention

HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
FP8_TOLERANCE = 0.11
"""Of attention in 8 bits. Rounding q, k, v and the weights to 3 bits of mantissa, 2.6e-2 each on average, and computing
the rest exactly gives 7.8e-2 on the longest segment of the self-test, 4e-2 on the shortest, and 5.4e-2 on the longest
with scores of half the size."""


def _torch_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return _absent(device) or _wrong_dtype(dtype, FLOATS)


def _triton_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _triton_no_device(device)
        or _not_installed("triton", "triton")
        or _wrong_dtype(dtype, FLOATS)
        or _wrong_head_dim(head_dim, range(1, 257), "up to 256")  # beyond, the tiles do not fit on the chip
    )


def _triton_no_device(device: torch.device) -> str | None:
    if device.type != "cpu":
        return _not_nvidia(device, (8, 0))
    if _triton_is_interpreted():
        return None
    return "compiles for GPUs only (TRITON_INTERPRET=1 runs its kernel on a CPU, to check it)"


def _triton_is_interpreted() -> bool:
    # Triton's own variable, read by it when a kernel is defined; asking Triton would import it.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _triton_by_name_only(device: torch.device) -> str | None:
    return "runs here under Triton's interpreter only, which is slow" if device.type == "cpu" else None


def _flashinfer_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _not_nvidia(device, (8, 0))
        or _not_installed("flashinfer", "flashinfer-python")
        or _wrong_dtype(dtype, HALF)
        or _wrong_head_dim(head_dim, (64, 128, 256), "64, 128 and 256")  # what both of its kernels are written for
    )


def _flashinfer_fp8_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _not_nvidia(device, (9, 0), (9, 9))
        or _not_installed("flashinfer", "flashinfer-python")
        or _not_installed("triton", "triton")
        or _wrong_dtype(dtype, (torch.bfloat16,))  # what its kernel writes
        or _wrong_head_dim(head_dim, (128,), "128")
    )


def _flashinfer_cudnn_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _not_nvidia(device, (8, 0))
        or _not_installed("flashinfer", "flashinfer-python")
        or _not_installed("cudnn", "nvidia-cudnn-frontend")
        or _wrong_dtype(dtype, HALF)
        or _wrong_head_dim(head_dim, range(8, 129, 8), "that are multiples of 8 up to 128")
    )


def _fa3_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _not_nvidia(device, (9, 0), (9, 9))
        or _not_installed("flash_attn_interface", "flash-attn-3")
        or _wrong_dtype(dtype, HALF)
        or _wrong_head_dim(head_dim, range(8, 257, 8), "that are multiples of 8 up to 256")
    )


def _fa4_why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return (
        _not_nvidia(device, (9, 0))
        or (None if _has_flash_attn_cute() else "not installed: flash-attn-4")
        or _wrong_dtype(dtype, HALF)
        or _wrong_head_dim(head_dim, range(8, 129, 8), "that are multiples of 8 up to 128")
    )


def _has_flash_attn_cute() -> bool:
    # find_spec("flash_attn.cute") would import flash_attn, so look for the folder.
    spec = importlib.util.find_spec("flash_attn")
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / "cute").is_dir() for place in places or ())


def _absent(device: torch.device) -> str | None:
    if device.type != "cuda" or (device.index or 0) < torch.cuda.device_count():
        return None
    return f"PyTorch sees {torch.cuda.device_count()} CUDA devices, none of them is {device}"


def _not_nvidia(device: torch.device, lowest: tuple[int, int], highest: tuple[int, int] | None = None) -> str | None:
    """Why the device is not an NVIDIA GPU whose compute capability lies between the two."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, the device is {device.type}"
    if torch.version.hip:
        return "needs an NVIDIA GPU, this PyTorch is built for ROCm"
    if missing := _absent(device):
        return missing
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < lowest or (highest and (major, minor) > highest):
        wanted = f"{lowest[0]}.x" if highest else f"{lowest[0]}.{lowest[1]} or later"
        return f"needs compute capability {wanted}, the device has {major}.{minor}"
    return None


def _not_installed(module: str, distribution: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"not installed: {distribution}"


def _wrong_dtype(dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> str | None:
    names = " and ".join(str(each).removeprefix("torch.") for each in allowed)
    return None if dtype in allowed else f"computes in {names}, not in {str(dtype).removeprefix('torch.')}"


def _wrong_head_dim(head_dim: int, allowed: Container[int], words: str) -> str | None:
    return None if head_dim in allowed else f"takes head sizes {words}, the model has {head_dim}"


def _load_sdpa(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    no_varlen = (
        _not_nvidia(device, (8, 0))
        or _not_installed("torch.nn.attention.varlen", "torch 2.10")
        or _wrong_dtype(dtype, HALF)
        or _wrong_head_dim(head_dim, range(8, 257, 8), "that are multiples of 8 up to 256")
    )
    return SdpaAttention(has_varlen=no_varlen is None)


def _load_triton(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.triton_varlen import TritonAttention

    return TritonAttention(device, dtype, num_heads, head_dim)


def _load_flashinfer(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.flashinfer_ragged import FlashInferAttention

    return FlashInferAttention(device, dtype, num_heads, head_dim)


def _load_flashinfer_fp8(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.flashinfer_fp8 import FlashInferFp8Attention

    return FlashInferFp8Attention(device, dtype, num_heads, head_dim)


def _load_cudnn(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.flashinfer_cudnn import CudnnAttention

    return CudnnAttention(device, num_heads, head_dim)


def _load_fa3(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.flash_varlen import flash_attention_3

    return flash_attention_3()


def _load_fa4(device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> AttentionBackend:
    from encoder.attention.flash_varlen import flash_attention_4

    return flash_attention_4()


BACKENDS: tuple[Entry, ...] = (
    Entry(
        "flashinfer", "FlashInfer's ragged prefill: fa3 on Hopper, fa2 elsewhere", _flashinfer_why_not, _load_flashinfer
    ),
    Entry("fa3", "FlashAttention-3 for Hopper", _fa3_why_not, _load_fa3),
    Entry("flashinfer_cudnn", "cuDNN's attention through FlashInfer", _flashinfer_cudnn_why_not, _load_cudnn),
    Entry(
        "flashinfer_fp8",
        "FlashInfer's fa3 with q, k and v in 8 bits: less exact",
        _flashinfer_fp8_why_not,
        _load_flashinfer_fp8,
        lambda device: "rounds to 8 bits, so it is taken by name only",
        FP8_TOLERANCE,
    ),
    Entry("fa4", "FlashAttention-4 (CuTe DSL) for Hopper and Blackwell", _fa4_why_not, _load_fa4),
    Entry("triton", "this project's own ragged kernel", _triton_why_not, _load_triton, _triton_by_name_only),
    Entry("sdpa", "PyTorch's scaled_dot_product_attention, on any device", _torch_why_not, _load_sdpa),
    Entry(
        "reference",
        "the formula in plain float32, to compare with",
        _torch_why_not,
        lambda *_: ReferenceAttention(),
        lambda device: "the oracle: exact and slow, so it is taken by name only",
    ),
)

ALIASES = {"triton_attn": "triton"}
"""Other stacks' names for what is in the table."""

FOREIGN: dict[str, tuple[str, tuple[str, ...]]] = {
    "flash_attention_2": ("Hugging Face's name for FlashAttention-2", ("flashinfer", "triton", "sdpa")),
    "eager": ("Hugging Face's name for attention in plain PyTorch", ("reference",)),
    "torch_native": ("SGLang's name for PyTorch's own attention", ("sdpa",)),
    "ascend_attn": ("SGLang's backend for Ascend NPUs", ("sdpa",)),
    "aiter_attn": ("SGLang's backend for AMD GPUs (AITER)", ("sdpa",)),
    "amx_attn": ("SGLang's backend for CPUs with AMX", ("sdpa",)),
    "xpu_attn": ("SGLang's backend for Intel GPUs", ("sdpa",)),
}
"""Names that mean something elsewhere -> (what they are, ours from the closest on)."""
