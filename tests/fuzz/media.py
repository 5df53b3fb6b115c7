"""Broken media through the whole service: encoded or refused in time, and what is sound is encoded as before."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from app.main import create_app
from app.settings import Settings
from tests.fuzz.mutate import films, mutate, pictures
from tests.http.conftest import fake_run
from tests.scrape import nonzero, scrape

# What broken media may be told. 504: a decoder that took all its time, which is its deadline's business.
ALLOWED = {200, 400, 413, 415, 422, 504}
DEADLINE_S = 10.0
TOO_LONG_S = DEADLINE_S + 10.0
SOUND_EVERY = 50
TOGETHER = 4


@dataclass
class Report:
    """codes: answers by what they said. wrong: what should not have happened, with the input as hex."""

    inputs: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    restarts: dict[str, float] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    longest_s: float = 0.0
    seconds: float = 0.0
    rss_mb_first: float = 0.0
    rss_mb_last: float = 0.0


@asynccontextmanager
async def service() -> AsyncIterator[httpx.AsyncClient]:
    """In this process, with a tower that computes next to nothing; decoders are the real ones."""
    settings = Settings(
        film_workers=2, picture_workers=2, store_bytes=0, film_deadline_s=DEADLINE_S, picture_deadline_s=DEADLINE_S
    )
    app = create_app(settings, fake_run)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=120) as client:
            yield client


async def fuzz(seconds: float, seed: int) -> Report:
    """Send broken media for so long, two pictures and two films at a time."""
    report = Report()
    async with service() as client:
        sound = {
            kind: await _answer(client, kind, seeds()[0]) for kind, seeds in (("image", pictures), ("video", films))
        }
        start = time.monotonic()
        senders = [
            _send(client, report, start + seconds, seed * 1000 + number, "video" if number < 2 else "image", sound)
            for number in range(TOGETHER)
        ]
        report.rss_mb_first = _rss_mb()
        await asyncio.gather(*senders)
        report.seconds = time.monotonic() - start
        report.rss_mb_last = _rss_mb()
        for kind in ("image", "video"):
            await _check_sound(client, report, kind, sound)
        samples = await scrape(client)
        report.restarts = nonzero(samples, "moonvit_decode_worker_restarts_total")
        if (await client.get("/health/ready")).status_code != 200 or samples["moonvit_requests_in_flight"]:
            report.wrong.append(("not ready, or requests left in flight", ""))
    return report


async def _send(
    client: httpx.AsyncClient, report: Report, end_s: float, seed: int, kind: str, sound: dict[str, Any]
) -> None:
    choice = random.Random(seed)
    seeds = films() if kind == "video" else pictures()
    count = 0
    while time.monotonic() < end_s:
        data = mutate(choice.choice(seeds), seeds, choice)
        began = time.monotonic()
        response = await _post(client, kind, data)
        took_s = time.monotonic() - began
        report.inputs[kind] += 1
        report.longest_s = max(report.longest_s, took_s)
        code = "ok" if response.status_code == 200 else response.json()["code"]
        report.codes[f"{kind} {code}"] += 1
        if response.status_code not in ALLOWED or took_s > TOO_LONG_S:
            report.wrong.append((f"{kind}: {response.status_code} {code} after {took_s:.1f} s", data.hex()))
        elif response.status_code == 200 and not _is_whole(response.json()["data"][0]):
            report.wrong.append((f"{kind}: an answer that does not add up", data.hex()))
        count += 1
        if count % SOUND_EVERY == 0:
            await _check_sound(client, report, kind, sound)


async def _post(client: httpx.AsyncClient, kind: str, data: bytes) -> httpx.Response:
    return await client.post("/v1/encode", content=data or b"\0", headers={"content-type": f"{kind}/x"})


async def _answer(client: httpx.AsyncClient, kind: str, data: bytes) -> Any:
    response = await _post(client, kind, data)
    assert response.status_code == 200, response.text
    return response.json()["data"][0]


async def _check_sound(client: httpx.AsyncClient, report: Report, kind: str, sound: dict[str, Any]) -> None:
    response = await _post(client, kind, (films() if kind == "video" else pictures())[0])
    if response.status_code != 200 or response.json()["data"][0] != sound[kind]:
        report.wrong.append((f"a sound {kind} is not encoded as before: {response.status_code}", ""))


def _is_whole(element: dict[str, Any]) -> bool:
    tokens = [(h // 2) * (w // 2) for _, h, w in element["grid_thw"]]
    return element["segment_tokens"] == tokens and element["shape"][0] == element["num_tokens"] == sum(tokens)


def _rss_mb() -> float:
    """Of this process and its workers."""
    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.Error:
            continue
    return round(total / 1e6, 1)
