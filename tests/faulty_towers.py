"""Towers whose workers fail when told to: by the number of segments in a batch, or by a file that is there."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from app.replicas import TowerSpec
from app.tower import Pending
from encoder import (
    DeviceFailed,
    DeviceOutOfMemory,
    Engine,
    Grid,
    InvalidSegment,
    NonFiniteResult,
    PackedBatch,
    Segment,
    SetupError,
    pack,
)

MODEL = "demo:k3-tiny"

# Segments of a batch -> what its worker does.
DEVICE_FAILS, EXITS, BUG, WAITS = 13, 14, 15, 19
ERRORS: dict[int, Exception] = {
    16: DeviceOutOfMemory("the device ran out of memory"),
    17: NonFiniteResult("batch of 17 segments: not finite"),
    18: InvalidSegment("segments[0]: no"),
}


class UnpicklableError(Exception):
    """Cannot cross between processes as it is."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@dataclass(frozen=True)
class FaultySpec(TowerSpec):
    """Loads an engine that fails as the table says.

    Attributes:
        other_weights: while this file is there, what is loaded is another model.
        no_load: while this file is there, nothing loads.
        go: a batch that waits is done once this file is there.
    """

    other_weights: str = ""
    no_load: str = ""
    go: str = ""

    def load(self) -> Engine:
        if self.no_load and Path(self.no_load).exists():
            raise SetupError("the checkpoint is gone")
        changed = bool(self.other_weights) and Path(self.other_weights).exists()
        engine = Engine.load(self.model, device=self.device, dtype=self.dtype, rms_norm_eps=0.25 if changed else None)
        faulty: Any = _FaultyEngine(engine, self.go)
        return faulty  # type: ignore[no-any-return]


class _FaultyEngine:
    def __init__(self, engine: Engine, go: str) -> None:
        self._engine = engine
        self._go = go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, batch: PackedBatch, out: Tensor | None = None) -> Pending:
        number = len(batch)
        if number == EXITS:
            os._exit(3)
        if number == BUG:
            raise UnpicklableError(1, 2)
        if number in ERRORS:
            raise ERRORS[number]
        if number == DEVICE_FAILS:
            return self._fail  # as on a GPU, where it comes out when its result is waited for
        pending = self._engine.submit(batch, out)
        return (lambda: self._wait(pending)) if number == WAITS else pending

    def _wait(self, pending: Pending) -> Tensor:
        while not Path(self._go).exists():
            time.sleep(0.01)
        return pending()

    def _fail(self) -> Tensor:
        raise DeviceFailed("the device reported an error and cannot be used any more")


def spec(**changes: Any) -> FaultySpec:
    return FaultySpec(**({"model": MODEL, "device": "cpu", "dtype": torch.float32, "threads": 1} | changes))


def batch_of(num_segments: int, engine: Engine, seed: int = 0, rows: int = 4) -> PackedBatch:
    """Noise in segments of two sizes, `rows` and `rows` + 2 patches high."""
    noise = torch.Generator().manual_seed(seed)
    patch = engine.config.vision.patch_size
    grids = [Grid(1, rows + 2 * (i % 2), 6) for i in range(num_segments)]
    shapes = [(grid.num_patches, 3, patch, patch) for grid in grids]
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise) for shape in shapes]
    return pack([Segment(own, grid) for own, grid in zip(pixels, grids, strict=True)], engine.config)
