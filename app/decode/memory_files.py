"""Anonymous files in memory: how media and pixels cross between processes. Without a name, none can be left behind,
and unlike /dev/shm, which containers get 64 MB of, only memory bounds them.
"""

import asyncio
import fcntl
import mmap
import os
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SLICE_BYTES: Final = 4 << 20  # copied in about 2 ms
_KEPT_BYTES: Final = 8 << 20  # a result of a picture of 1024x1024 has 3 MB
_KEPT_FILES: Final = 2


class InputFile:
    """One item's bytes at a time, for a worker that holds it open, too."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("input", os.MFD_CLOEXEC)

    async def fill(self, data: bytes) -> None:
        """Make `data` its content, letting the event loop go on between slices."""
        at = 0
        view = memoryview(data)
        while at < len(data):
            at += os.pwrite(self.descriptor, view[at : at + _SLICE_BYTES], at)
            if at < len(data):
                await asyncio.sleep(0)
        os.ftruncate(self.descriptor, len(data))

    def shrink(self) -> None:
        """Give the memory of a large item back: a worker may be idle for long."""
        if os.fstat(self.descriptor).st_size > _KEPT_BYTES:
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)


class ResultFile:
    """A file for a worker to write to, and its pages as this process sees them."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("result", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        # Nobody may cut it short under a reader, nor add another seal.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        self._mapped: mmap.mmap | None = None

    def mapped(self, num_bytes: int) -> mmap.mmap:
        """Memory of at least so many bytes.

        Raises:
            ValueError: the file is shorter.
        """
        if os.fstat(self.descriptor).st_size < num_bytes:
            raise ValueError("a result that is shorter than it says")
        if self._mapped is None or len(self._mapped) < num_bytes:
            self._mapped = mmap.mmap(self.descriptor, num_bytes)
        return self._mapped

    @property
    def is_small(self) -> bool:
        return os.fstat(self.descriptor).st_size <= _KEPT_BYTES


class ResultFiles:
    """The result files of one worker: used again once nothing refers to what was read from them.

    Making, filling and mapping a new one costs about 1 ms for 3 MB. A worker gets its own only, so that one that was
    taken over cannot reach the results of others.
    """

    def __init__(self) -> None:
        self._spare: deque[ResultFile] = deque(maxlen=_KEPT_FILES)

    def take(self) -> ResultFile:
        try:
            return self._spare.pop()
        except IndexError:
            return ResultFile()

    def give_back(self, file: ResultFile) -> None:
        """Called from whichever thread drops the last reference."""
        if file.is_small:
            self._spare.append(file)

    def read(self, file: ResultFile, num_bytes: int, extra_bytes: int) -> tuple[NDArray[np.uint8], bytes]:
        """(num_bytes,) uint8 without a copy, and a copy of the extra bytes behind them; `file` comes back by itself.

        Raises:
            ValueError: the file is shorter.
        """
        mapped = file.mapped(num_bytes + extra_bytes)
        extra = mapped[num_bytes : num_bytes + extra_bytes]
        pixels: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8, count=num_bytes)
        # Every view of the array, and every tensor made of it, holds on to it.
        weakref.finalize(pixels, self.give_back, file).atexit = False
        return pixels, extra


def write_all(descriptor: int, data: Any, at: int) -> int:
    """Write a buffer at an offset; returns the offset behind it."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    return at
