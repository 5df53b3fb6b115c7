"""Where batches run: the engine of this process, or that of a worker process."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from encoder import PackedBatch

Run = Callable[[PackedBatch], Tensor]
"""A packed batch -> (M, E) on the host; comes back when it is done."""

Pending = Callable[[], Tensor]
"""Waits for a submitted batch, once: (M, E) on the host, or raises what the batch failed with."""


class TowerLost(Exception):
    """The process that held a batch died. Says nothing about the batch, which may be run again."""


class Tower(Protocol):
    """One device's worth of work. One thread at a time submits; another may wait for what was submitted."""

    def submit(self, batch: PackedBatch) -> Pending:
        """Queue a batch behind what was submitted before, and come back before it has run where the device allows it.

        Raises:
            EncoderError: the batch cannot be queued; `TowerLost` if the tower is gone and the batch may be run again.
        """
        ...


class InlineTower:
    """A plain function as a tower: it runs while it is submitted."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def submit(self, batch: PackedBatch) -> Pending:
        rows = self._run(batch)
        return lambda: rows


def attention_of(pending: object) -> str | None:
    """Name of the attention that a batch ran on, where its tower says so: an attribute `attention` of the `Pending`."""
    name = getattr(pending, "attention", None)
    return name if isinstance(name, str) else None


def takes_pinned(tower: Tower) -> bool:
    """Whether its batches are best packed into pinned memory: its GPU is this process's own."""
    return bool(getattr(tower, "takes_pinned", False))


def is_up(tower: Tower) -> bool:
    """Whether it can run a batch now; a tower that can be away says so by an attribute `is_up`."""
    return bool(getattr(tower, "is_up", True))
