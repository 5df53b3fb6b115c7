"""The application over ASGI, with a tower that only says which picture each row came from."""

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from PIL import Image
from torch import Tensor

from app.decode.workers import Workers
from app.main import create_app
from app.settings import Settings
from encoder import PackedBatch, load_config

WIDTH = load_config("demo:k3-tiny").vision.text_hidden_size


def fake_run(batch: PackedBatch) -> Tensor:
    """(M, E): every row of a segment holds its mean level 0..255 in column 0, its patches in 1, the token in 2."""
    rows = []
    start = 0
    for grid, tokens in zip(batch.grids, batch.num_tokens, strict=True):
        pixels = batch.pixel_values[start : start + grid.num_patches].float()
        own = torch.zeros((tokens, WIDTH))
        own[:, 0], own[:, 1] = pixels.mean(), grid.num_patches
        own[:, 2] = torch.arange(tokens)
        rows.append(own)
        start += grid.num_patches
    return torch.cat(rows)


def png(level: int, width: int = 28, height: int = 28, mode: str = "RGB") -> bytes:
    """A picture of one level; sizes that are multiples of 28 have no padding, so its mean is the level."""
    buffer = io.BytesIO()
    Image.new(mode, (width, height), (level,) * 3 if mode == "RGB" else level).save(buffer, "PNG")
    return buffer.getvalue()


Connect = Callable[..., Awaitable[httpx.AsyncClient]]


@pytest.fixture
async def connect(monkeypatch: pytest.MonkeyPatch, shared_template: None) -> AsyncIterator[Connect]:
    """`await connect(run=..., **settings)` gives a client of a started application; `.app` is the application."""

    async def start_with_the_first_item(workers: Workers) -> None:
        """Many tests send no picture, and most no film."""
        for _ in range(workers._num_workers):
            workers._idle.put_nowait(None)

    monkeypatch.setattr(Workers, "start", start_with_the_first_item)
    async with AsyncExitStack() as stack:

        async def build(run: Callable[[PackedBatch], Tensor] = fake_run, **settings: Any) -> httpx.AsyncClient:
            app: FastAPI = create_app(Settings(film_workers=1, picture_workers=2, **settings), run)
            await stack.enter_async_context(app.router.lifespan_context(app))
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://service", timeout=60)
            client.app = app  # type: ignore[attr-defined]
            return await stack.enter_async_context(client)

        yield build


@pytest.fixture
async def client(connect: Connect) -> httpx.AsyncClient:
    return await connect()
