"""The batch budget follows from free memory and the measured bytes of a patch."""

from dataclasses import replace

import pytest
import torch

from encoder import Engine
from encoder.capacity import MARGIN, MEASURED, OTHER_BYTES, patches_that_fit


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("demo:k3-tiny")


def test_a_cpu_is_not_asked(engine):
    assert patches_that_fit(engine) is None


def gpu_memory(monkeypatch, *, free: int, allocated: int, reserved: int, used: int) -> None:
    for name, value in {
        "reset_peak_memory_stats": None,
        "memory_allocated": allocated,
        "max_memory_allocated": allocated + used,
        "memory_reserved": reserved,
        "mem_get_info": (free, 80 * 2**30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)


def test_free_memory_over_the_bytes_of_a_patch(engine, monkeypatch):
    ran = []
    monkeypatch.setattr(Engine, "run", lambda self, batch: ran.append(sum(batch.lengths)))
    gpu_memory(monkeypatch, free=10 * 2**30, allocated=3 * 2**30, reserved=4 * 2**30, used=20_000 * 4096)
    found = patches_that_fit(replace(engine, device=torch.device("cuda")))
    assert found == int((11 * 2**30 - OTHER_BYTES) / (MARGIN * 20_000))
    assert ran == [MEASURED.num_patches] * 2


def test_nothing_fits_is_zero(engine, monkeypatch):
    monkeypatch.setattr(Engine, "run", lambda self, batch: None)
    gpu_memory(monkeypatch, free=2**20, allocated=0, reserved=0, used=2**30)
    assert patches_that_fit(replace(engine, device=torch.device("cuda"))) == 0
