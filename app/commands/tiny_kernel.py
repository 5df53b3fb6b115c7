"""A kernel of one line: whether Triton can compile for a device at all. Imported only where Triton is installed."""

import torch
import triton
import triton.language as tl

SIZE = 128


@triton.jit  # type: ignore[untyped-decorator]
def _add_one(x_ptr, y_ptr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, size)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + 1)


def compiles_and_runs(device: torch.device) -> bool:
    """Whether 1 + 1 is 2 on the device. Raises whatever Triton raises."""
    x = torch.ones(SIZE, device=device)
    y = torch.zeros_like(x)
    _add_one[(1,)](x, y, SIZE)
    return bool((y == 2).all().item())
