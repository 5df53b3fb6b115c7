"""Waiting for what a test cannot be told of: a counter of another task, thread or process."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from tests.scrape import scrape


async def until(true: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Ask again and again until the answer is yes.

    Raises:
        TimeoutError: it never was.
    """
    async with asyncio.timeout(timeout_s):
        while not await true():  # noqa: ASYNC110 - a test's poll
            await asyncio.sleep(0.02)


async def reaches(client: httpx.AsyncClient, series: str, value: float, timeout_s: float = 30.0) -> None:
    """Wait until a series of `/metrics` is at least that."""

    async def there() -> bool:
        return (await scrape(client))[series] >= value

    await until(there, timeout_s)
