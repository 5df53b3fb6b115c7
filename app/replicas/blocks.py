"""Memory that the service and one worker both see: a few blocks, used again and again, freed when the last tensor in
them dies.

A block is an anonymous file, so a process that is killed leaves none behind.
"""

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_SMALLEST_BYTES: Final = 1 << 20
# A result never fills its memory: it is seen to be part of something larger, which a store copies without asking
# whether it is pinned. That question alone would make this process open the GPU.
_SPARE_BYTES: Final = 64


@dataclass(eq=False)
class Block:
    """One piece of memory, mapped into this process; `number` is its name at the other end."""

    number: int
    memory: mmap.mmap

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


class Blocks:
    """At most `most` blocks of one worker. One thread takes; any may give back, even while it collects garbage, which
    is why nothing here locks.

    Args:
        first_number: blocks are numbered from here, in steps of two.
        share: called with every new block and its descriptor, which is closed afterwards.
        forget: called with the number of a block that is used no more.
    """

    def __init__(
        self, most: int, first_number: int, share: Callable[[int, int], None], forget: Callable[[int], None]
    ) -> None:
        self._most = most
        self._next_number = first_number
        self._share = share
        self._forget = forget
        self._num_blocks = 0
        self._free: deque[Block] = deque()

    def take(self, num_bytes: int) -> Block:
        """A free block of so many bytes and a few more; one that is too small is replaced.

        Raises:
            RuntimeError: all are taken.
            OSError: no memory or no descriptor is left, or the worker is gone.
        """
        needed = num_bytes + _SPARE_BYTES
        free = self._drain()
        fitting = [block for block in free if block.num_bytes >= needed]
        if fitting:
            chosen = min(fitting, key=lambda block: block.num_bytes)
            self._free.extend(block for block in free if block is not chosen)
            return chosen
        if self._num_blocks >= self._most:
            if not free:
                raise RuntimeError(f"all {self._most} blocks are taken")
            small = min(free, key=lambda block: block.num_bytes)
            free.remove(small)
            self._num_blocks -= 1
            self._forget(small.number)
        self._free.extend(free)
        return self._new(needed)

    def give(self, block: Block) -> None:
        """Nobody uses its memory any more."""
        self._free.append(block)

    def _drain(self) -> list[Block]:
        free = []
        with suppress(IndexError):
            while True:
                free.append(self._free.popleft())
        return free

    def _new(self, needed: int) -> Block:
        size = max(_SMALLEST_BYTES, 1 << (needed - 1).bit_length())  # doubling: few blocks are outgrown
        descriptor = os.memfd_create("batch", os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, size)
            block = Block(self._next_number, mmap.mmap(descriptor, size))
            self._share(block.number, descriptor)
        finally:
            os.close(descriptor)
        self._next_number += 2
        self._num_blocks += 1
        return block


class Results:
    """Rows in blocks, handed out as tensors.

    A tensor in a block keeps the block. So that the worker never waits for whoever reads results, only `most_held` are
    out at a time; the rest are copied into ordinary memory, and their block is free at once.

    Args:
        blocks: as many as the batches in flight, and `most_held` more.
    """

    def __init__(self, blocks: Blocks, most_held: int) -> None:
        self._blocks = blocks
        self._permits = deque([None] * most_held)

    def tensor(self, block: Block, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The rows at the start of a block, which goes back when nobody has them any more."""
        count = shape[0] * shape[1]
        if not count:
            self._blocks.give(block)
            return torch.empty(shape, dtype=dtype)
        # An object of its own for each result: the tensor's memory keeps it, and nothing else does.
        view = memoryview(block.memory)
        rows = torch.frombuffer(view, dtype=dtype)[:count].view(shape)
        try:
            self._permits.pop()
        except IndexError:
            own = torch.empty(count + 1, dtype=dtype)[:count].view(shape).copy_(rows)
            self._blocks.give(block)
            return own
        weakref.finalize(view, self._release, block).atexit = False
        return rows

    def _release(self, block: Block) -> None:
        self._blocks.give(block)
        self._permits.append(None)
