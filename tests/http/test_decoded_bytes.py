"""Decoded media that waits for a place in the queue is bounded too, over all requests."""

import asyncio
from typing import Any

import httpx

from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, image
from tests.http.tower import SlowTower, until_queued

PICTURE_BYTES = 4 * 3 * 14 * 14


def outcomes(response: httpx.Response) -> list[str]:
    items: list[dict[str, Any]] = response.json()["data"]
    return [item["error"]["code"] if "error" in item else "ok" for item in items]


async def test_what_waits_for_a_place_is_bounded_and_the_rest_is_told_to_come_again(connect: Connect) -> None:
    tower = SlowTower()
    # Two pictures of one request fit into the queue, two more may wait, and a seventh would be too many bytes.
    client = await connect(run=tower, max_queued_patches=16, max_queued_bytes=3 * PICTURE_BYTES - 1)
    first = asyncio.create_task(encode(client, image(png(0))))
    await tower.busy()
    many = asyncio.create_task(encode(client, *(image(png(level)) for level in range(1, 7))))
    await until_queued(client, 8)
    await asyncio.sleep(0.5)  # the other four are decoded
    tower.release()
    assert (await first).status_code == 200
    found = outcomes(await many)
    assert sorted(found) == ["ok"] * 4 + ["overloaded"] * 2
    assert client.app.state.service.pipeline._decoded.held_bytes == 0  # type: ignore[attr-defined]
    again = await encode(client, *(image(png(level)) for level in range(20, 24)))
    assert outcomes(again) == ["ok"] * 4
