"""What crosses between the service and a worker: values laid flat, and the blocks of memory they lie in."""

import gc
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from app.replicas.blocks import Blocks, Results
from app.replicas.flat import Flat, restore

MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Cargo:
    """A batch with other fields than ours have today."""

    pictures: list[Tensor]
    sizes: np.ndarray
    names: tuple[str, ...]


def sent(value: object) -> tuple[object, mmap.mmap]:
    flat = Flat(value)
    memory = mmap.mmap(-1, max(flat.num_bytes, 1))
    flat.write(memoryview(memory))
    return restore(memoryview(memory)), memory


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_tensors_of_every_dtype_arrive_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = (torch.arange(77) % 5).to(dtype).reshape(7, 11)
    for value in (tensor, tensor.T, tensor[2:5, ::3], tensor[0, 0], tensor[:0]):
        arrived, _ = sent(value)
        assert isinstance(arrived, Tensor)
        assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
        assert torch.equal(arrived, value)


def test_a_value_of_any_fields_arrives_and_its_large_parts_are_views() -> None:
    cargo = Cargo([torch.rand(3, 5), torch.arange(1000)], np.arange(50, dtype=np.int16).reshape(5, 10), ("a", "b"))
    arrived, memory = sent(cargo)
    assert isinstance(arrived, Cargo)
    assert [torch.equal(*pair) for pair in zip(arrived.pictures, cargo.pictures, strict=True)] == [True, True]
    assert np.array_equal(arrived.sizes, cargo.sizes)
    assert arrived.names == ("a", "b")
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for address in (arrived.pictures[0].data_ptr(), arrived.pictures[1].data_ptr(), arrived.sizes.ctypes.data):
        assert begin < address < begin + len(memory)
        assert (address - begin) % 64 == 0


def test_a_value_needs_little_more_than_its_bytes() -> None:
    assert Flat(torch.zeros(100_000, dtype=torch.uint8)).num_bytes < 101_000


class OtherEnd:
    """Records what a worker would be told."""

    def __init__(self) -> None:
        self.shared: list[int] = []
        self.forgotten: list[int] = []

    def share(self, number: int, descriptor: int) -> None:
        assert os.fstat(descriptor).st_size > 0
        self.shared.append(number)

    def blocks(self, most: int) -> Blocks:
        return Blocks(most, 0, self.share, self.forgotten.append)


def test_blocks_are_used_again_and_one_that_is_too_small_is_replaced() -> None:
    end = OtherEnd()
    blocks = end.blocks(2)
    small, large = blocks.take(10), blocks.take(3 * MIB)
    assert (small.num_bytes, large.num_bytes) == (MIB, 4 * MIB)
    with pytest.raises(RuntimeError, match="all 2 blocks are taken"):
        blocks.take(10)
    blocks.give(large)
    blocks.give(small)
    assert blocks.take(10) is small  # the smallest that is large enough
    assert blocks.take(2 * MIB) is large
    blocks.give(small)
    assert blocks.take(MIB).num_bytes == 2 * MIB  # never quite full
    assert (end.shared, end.forgotten) == ([0, 2, 4], [0])


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_descriptor_stays_open() -> None:
    before = num_descriptors()
    blocks = OtherEnd().blocks(4)
    kept = [blocks.take(10) for _ in range(4)]
    # A mapping of a file keeps a descriptor of its own, which goes with it.
    del kept, blocks
    gc.collect()
    assert num_descriptors() == before


def test_a_result_keeps_its_block_until_the_last_view_of_it_is_gone() -> None:
    blocks = OtherEnd().blocks(3)
    results = Results(blocks, most_held=2)
    block = blocks.take(4 * 6 * 2)
    block.memory[:48] = torch.arange(24, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    rows = results.tensor(block, (4, 6), torch.bfloat16)
    assert torch.equal(rows, torch.arange(24, dtype=torch.bfloat16).view(4, 6))
    assert rows.untyped_storage().nbytes() > rows.nbytes  # so a store copies it
    first, array = torch.split(rows, [1, 3])[0], rows[1:].view(torch.uint8).numpy()
    del rows
    assert blocks.take(10) is not block
    del first
    assert blocks.take(10) is not block
    del array
    assert blocks.take(10) is block


def test_results_beyond_those_held_are_copies() -> None:
    blocks = OtherEnd().blocks(3)
    results = Results(blocks, most_held=1)
    taken = [blocks.take(24) for _ in range(3)]
    for i, block in enumerate(taken):
        block.memory[:24] = bytes([i]) * 24
    held, copy, _ = (results.tensor(block, (4, 6), torch.uint8) for block in taken)
    again = blocks.take(24)
    assert again in taken[1:]
    again.memory[:24] = b"\xff" * 24
    assert held.unique().tolist() == [0]
    assert copy.unique().tolist() == [1]
    del held
    assert results.tensor(blocks.take(24), (1, 1), torch.uint8).untyped_storage().nbytes() == MIB  # held again


def test_no_rows_take_no_block() -> None:
    blocks = OtherEnd().blocks(1)
    rows = Results(blocks, most_held=1).tensor(blocks.take(0), (0, 6), torch.float32)
    assert rows.shape == (0, 6)
    blocks.take(1)
