"""Launches of Triton kernels that cost the host little.

Triton finds the compiled kernel of a launch anew each time, from names, types, alignments and options. A forward pass
launches hundreds of small kernels with the same few answers, so they are kept here.
"""

from typing import Any

from torch import Tensor

_MULTIPLE = 16  # Triton compiles pointers and integers that are multiples of it differently
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: tuple[Any, ...], **options: int
) -> None:
    """Launch on the current stream of the current device, which is that of the first argument, a tensor.

    Args:
        kernel: a `triton.jit` function whose parameters are those of `args`, then its constants.
        grid: programs along one to three axes.
        args: tensors, integers and floats.
        options: num_warps, num_stages.
    """
    key = (id(kernel), args[0].get_device(), constants, *options.values(), *map(_kind, args))
    found = _compiled.get(key)
    if found is None:
        found = kernel[grid](*args, *constants, **options)
        if found is not None:  # nothing is compiled under the interpreter
            _compiled[key] = found
    else:
        found[(*grid, 1, 1)[:3]](*args, *constants)


def _kind(arg: Any) -> Any:
    """What of an argument a compiled kernel depends on."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % _MULTIPLE == 0
    if isinstance(arg, int):
        return arg == 1, arg % _MULTIPLE == 0, arg.bit_length() > 31
    return None
