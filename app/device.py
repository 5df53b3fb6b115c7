"""The settings' device and dtype names, resolved."""

import torch

from app.settings import InvalidSettings

ALLOWED_DEVICES = "auto, cpu, cuda, cuda:N"


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, or the CPU where there is none.

    Raises:
        InvalidSettings: no such device name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidSettings(f"--device {name!r} is no device; allowed: {ALLOWED_DEVICES}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidSettings(f"--device {name!r} is not supported; allowed: {ALLOWED_DEVICES}")
    return device


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
