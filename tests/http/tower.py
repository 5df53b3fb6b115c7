"""A tower that runs a batch only when told to, and the queue in front of it."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
import torch

from tests.http.conftest import fake_run


class SlowTower:
    """Runs a batch only when told to."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.patches_run = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        self.entered.release()
        assert self.go.acquire(timeout=60)
        self.patches_run += sum(batch.lengths)
        return fake_run(batch)

    async def busy(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)

    def release(self, batches: int = 100) -> None:
        for _ in range(batches):
            self.go.release()


async def queued(client: httpx.AsyncClient) -> int:
    return int((await client.get("/v1/info")).json()["batching"]["queued_patches"])


async def until_queued(client: httpx.AsyncClient, patches: int) -> None:
    for _ in range(1000):
        if await queued(client) == patches:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{await queued(client)} patches are queued, expected {patches}")
