"""Pictures that harm their decoders, as a caller and an operator see them."""

import asyncio
import os
import signal

import httpx

from app.decode import Decoder
from app.decode.sandbox import IN_FORCE
from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.scrape import nonzero, scrape
from tests.unit.test_film_workers import until

RESTARTS = "moonvit_decode_worker_restarts_total"


async def decoder_of(client: httpx.AsyncClient) -> Decoder:
    """With its picture workers started."""
    decoder: Decoder = client.app.state.service._decoder  # type: ignore[attr-defined]
    levels = iter(range(99))
    while len(decoder.pids("image")) < 2:  # one is enough for pictures that come one by one
        for answer in await asyncio.gather(*(encode(client, image(png(next(levels)))) for _ in range(4))):
            assert answer.status_code == 200
    return decoder


async def test_a_picture_that_hangs_is_ended_and_the_service_stays_ready(connect: Connect) -> None:
    client = await connect(picture_deadline_s=1.0)
    decoder = await decoder_of(client)
    for pid in decoder.pids("image"):
        os.kill(pid, signal.SIGSTOP)
    hung = asyncio.create_task(encode(client, image(png(100))))
    await until(lambda: decoder.jobs("image").running == 1)
    assert (await client.get("/health/ready")).status_code == 200
    check(await hung, 504, "deadline_exceeded", 0)
    for pid in decoder.pids("image"):
        os.kill(pid, signal.SIGCONT)
    assert (await encode(client, image(png(101)))).status_code == 200
    assert nonzero(await scrape(client), RESTARTS) == {'{kind="image",reason="deadline"}': 1}


async def test_a_picture_that_crashes_its_decoder_fails_alone(connect: Connect) -> None:
    client = await connect()
    decoder = await decoder_of(client)
    stopped = decoder.pids("image")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    both = asyncio.create_task(encode(client, image(png(100)), image(png(101))))
    await until(lambda: decoder.jobs("image").running == 2)
    os.kill(stopped[0], signal.SIGSEGV)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    response = await both
    assert response.status_code == 200
    failed = [item for item in response.json()["data"] if item.get("error")]
    assert [item["error"]["code"] for item in failed] == ["corrupt_media"]
    assert nonzero(await scrape(client), RESTARTS) == {'{kind="image",reason="crashed"}': 1}


async def test_a_client_that_leaves_frees_its_decoder(connect: Connect) -> None:
    client = await connect()
    decoder = await decoder_of(client)
    for pid in decoder.pids("image"):
        os.kill(pid, signal.SIGSTOP)
    left = asyncio.create_task(encode(client, image(png(100))))
    await until(lambda: decoder.jobs("image").running == 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await until(lambda: decoder.jobs("image").running == 0)
    for pid in decoder.pids("image"):
        os.kill(pid, signal.SIGCONT)
    assert (await encode(client, image(png(101)))).status_code == 200
    assert nonzero(await scrape(client), RESTARTS) == {'{kind="image",reason="cancelled"}': 1}


async def test_what_is_in_force_around_decoders_is_said(connect: Connect) -> None:
    client = await connect()
    await decoder_of(client)
    layers = (await client.get("/v1/info")).json()["sandbox"]
    assert set(layers) == {"image", "video"}
    assert layers["image"]["no_new_privileges"] == layers["image"]["limits"] == IN_FORCE
    assert all(isinstance(state, str) for state in layers["image"].values())
