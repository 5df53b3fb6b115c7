"""Any value, tensors included, as one run of bytes: how many first, then written into memory that two processes share.

Pickle does the objects; what is large (tensors, arrays) is left out of its stream and laid behind it. Both ends are
processes of one service, so each may execute what the other pickled.
"""

import io
import pickle
import struct
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT: Final = 64  # of every part: a cache line, and more than any dtype needs
_NUMBER: Final = struct.Struct("<Q")


class Flat:
    """A value ready to be written. It refers to the value's own memory until then.

    Attributes:
        num_bytes: what `write` needs.
    """

    def __init__(self, value: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
        self._parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        # The table: how many parts, and where each begins and how long it is.
        table = [len(self._parts)]
        offset = _aligned(_NUMBER.size * (1 + 2 * len(self._parts)))
        for part in self._parts:
            table += [offset, part.nbytes]
            offset = _aligned(offset + part.nbytes)
        self._table = table
        self.num_bytes = offset

    def write(self, memory: memoryview) -> None:
        """Fill the first `num_bytes` of writable `memory`."""
        target = np.frombuffer(memory, np.uint8)
        table = np.array(self._table, "<u8").view(np.uint8)
        target[: table.size] = table
        for i, part in enumerate(self._parts):
            offset, size = self._table[1 + 2 * i : 3 + 2 * i]
            target[offset : offset + size] = np.frombuffer(part, np.uint8)


def restore(memory: memoryview) -> Any:
    """The value that was written into writable `memory`; its tensors and arrays are views of it."""
    (num_parts,) = _NUMBER.unpack_from(memory)
    table = struct.unpack_from(f"<{2 * num_parts}Q", memory, _NUMBER.size)
    stream, *buffers = (memory[begin : begin + size] for begin, size in zip(table[::2], table[1::2], strict=True))
    return pickle.loads(stream, buffers=buffers)  # noqa: S301 - from the other half of this service


class _Pickler(pickle.Pickler):
    """Tensors as their bytes and what those mean; PyTorch's own way would copy them into the stream."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        host = value.detach().to("cpu").contiguous()
        data = host.reshape(-1).view(torch.uint8).numpy().data
        return _tensor, (pickle.PickleBuffer(data), host.dtype, tuple(host.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(data).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
