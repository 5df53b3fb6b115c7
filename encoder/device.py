"""Devices and dtypes by name, the current device, and PyTorch's device errors as ours."""

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from encoder.errors import DeviceFailed, DeviceOutOfMemory, SetupError

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: kernels are launched there, whatever device their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def device_errors() -> Iterator[None]:
    """The one place where PyTorch's device errors become ours; anything else passes through."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        _release_memory(error)
        raise DeviceOutOfMemory("the device ran out of memory") from error
    except RuntimeError as error:  # torch.AcceleratorError is one, and older PyTorch raises it bare
        text = str(error)
        if any(mark in text for mark in _OUT_OF_MEMORY):
            _release_memory(error)
            raise DeviceOutOfMemory("the device ran out of memory") from error
        if isinstance(error, _AcceleratorError) or any(mark in text for mark in _DEVICE_FAILURES):
            raise DeviceFailed("the device reported an error and cannot be used any more") from error
        raise


def _release_memory(error: BaseException) -> None:
    """Let go of the tensors that the failed computation's frames hold, and give their memory back to the device."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


_AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # since torch 2.8
_OUT_OF_MEMORY = ("CUDA error: out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
_DEVICE_FAILURES = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_device(device: str | torch.device) -> torch.device:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SetupError(f"device {device!r} is not one; examples: cpu, cuda, cuda:1") from error
    if parsed.type not in ("cpu", "cuda"):
        raise SetupError(f"device {device!r}: only cpu and cuda are supported")
    return parsed


def parse_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    parsed = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed is None or parsed not in DTYPES.values():
        raise SetupError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return parsed


def check_present(device: torch.device) -> None:
    if device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise SetupError(f"device {device} is not there: PyTorch {torch.__version__} sees {count} CUDA devices")
