"""Disk tiers of the store, opened in a test's own directory and closed after it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from app.store import DiskTier

OpenTier = Callable[..., Awaitable[DiskTier]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The directory of the store; not made yet."""
    return tmp_path / "store"


@pytest.fixture
async def open_tier(store: Path) -> AsyncIterator[OpenTier]:
    """`await open_tier(path, max_bytes, clock=...)`; one gigabyte in `store` by default."""
    tiers: list[DiskTier] = []

    async def build(path: Path = store, max_bytes: int = 1 << 30, **rest: Any) -> DiskTier:
        tiers.append(DiskTier(path, max_bytes, **rest))
        await tiers[-1].start()
        return tiers[-1]

    yield build
    for tier in tiers:
        await tier.close()
