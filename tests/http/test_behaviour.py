"""Deadlines, overload, clients that leave and draining: what the service does when things do not go well."""

import asyncio
import base64
import io
import json
import time
from typing import Any

import pytest
import torch
from PIL import Image

from app.lifecycle import Lifecycle
from tests.http.asgi import http_scope, post, post_and_leave
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.http.tower import SlowTower, queued, until_queued


async def test_work_past_its_deadline_is_dropped(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    late = await encode(client, image(png(2, 280, 280)), deadline_ms=50)
    check(late, 504, "deadline_exceeded", 0)
    assert await queued(client) == 0
    tower.release()
    assert (await first).status_code == 200
    assert tower.patches_run == 4  # the late picture never reached the tower


async def test_a_deadline_is_capped_by_the_services_own(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, deadline_ms=100)
    start = time.monotonic()
    check(await encode(client, image(png(1)), deadline_ms=50_000), 504, "deadline_exceeded", 0)
    assert time.monotonic() - start < 10
    tower.release()


async def test_a_full_queue_answers_429_and_when_to_come_back(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, max_queued_patches=400)
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    running.append(asyncio.create_task(encode(client, image(png(2, 280, 280)))))
    await until_queued(client, 400)
    refused = await encode(client, image(png(3)))
    problem = check(refused, 429, "overloaded", 0)
    assert "limit 400" in problem["detail"]
    assert int(refused.headers["retry-after"]) >= 1
    tower.release()
    assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]


async def test_more_requests_than_allowed_are_refused_before_their_body_is_read(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, max_requests=1)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    read = 0

    async def body() -> Any:
        nonlocal read
        read += 1
        yield b"x"

    refused = await client.post("/v1/encode", content=body(), headers={"content-type": "image/png"})
    check(refused, 429, "overloaded")
    assert (await client.get("/health/ready")).status_code == 200
    tower.release()
    assert (await first).status_code == 200
    assert (await encode(client, image(png(1)))).status_code == 200


async def test_bodies_in_flight_are_bounded_together(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, max_inflight_bytes=10_000)
    service = client.app.state.service  # type: ignore[attr-defined]
    headers = {"content-type": "application/octet-stream"}
    first = asyncio.create_task(client.post("/v1/encode", content=png(1) + bytes(6_000), headers=headers))
    await tower.busy()
    assert service.lifecycle.body_bytes > 6_000

    async def chunked() -> Any:
        for _ in range(5):
            yield bytes(1_000)

    for content in (bytes(5_000), chunked()):
        refused = await client.post("/v1/encode", content=content, headers=headers)
        problem = check(refused, 429, "overloaded")
        assert "limit 10000" in problem["detail"]
    tower.release()
    assert (await first).status_code == 200
    assert service.lifecycle.body_bytes == 0
    # A single body larger than the bound is taken when it is alone.
    alone = await client.post("/v1/encode", content=png(2) + bytes(20_000), headers=headers)
    assert alone.status_code == 200


async def test_a_request_larger_than_the_queue_waits_for_itself(connect: Connect) -> None:
    """Seven pictures of 32,000 patches against a queue of 71,424: they go through in turn, none is refused."""
    client = await connect(max_batch_patches=71_424, max_queued_patches=71_424)
    response = await encode(client, *[image(png(i, 2800, 2240)) for i in range(7)])
    assert [element["object"] for element in response.json()["data"]] == ["embedding"] * 7


async def test_clients_that_leave_take_their_work_with_them(connect: Connect) -> None:  # M36
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    app = client.app  # type: ignore[attr-defined]
    leaving = [asyncio.create_task(post_and_leave(app, png(2 + i, 56, 56))) for i in range(20)]
    await until_queued(client, 20 * 16)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    await until_queued(client, 0)
    tower.release()
    assert (await first).status_code == 200
    assert tower.patches_run == 4
    lifecycle: Lifecycle = client.app.state.service.lifecycle  # type: ignore[attr-defined]
    assert await lifecycle.idle(5)


async def test_a_stream_sends_what_is_done_while_the_rest_still_runs(connect: Connect) -> None:
    """A slow film never holds back a finished picture."""
    tower = SlowTower()
    client = await connect(run=tower, max_batch_patches=71_424)
    app = client.app  # type: ignore[attr-defined]
    small, large = image(png(1)), image(png(2, 1400, 1400))
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    buffer = b""

    async def send(message: Any) -> None:
        nonlocal buffer
        buffer += message.get("body", b"")
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            await lines.put(json.loads(line))

    body = json.dumps({"input": [large, small], "dtype": "float32"}).encode()
    headers = [(b"content-type", b"application/json"), (b"accept", b"application/x-ndjson")]
    request = asyncio.create_task(post(app, body, send, headers))
    await tower.busy()  # whichever was decoded first
    tower.release(1)
    first = await asyncio.wait_for(lines.get(), 30)
    assert first["object"] == "embedding"
    assert not request.done()
    tower.release()
    second = await asyncio.wait_for(lines.get(), 30)
    assert {first["index"], second["index"]} == {0, 1}
    assert (await asyncio.wait_for(lines.get(), 30))["object"] == "usage"
    await request


async def test_decoding_never_holds_the_event_loop(connect: Connect) -> None:  # M35
    """Twenty pictures of 12 MP, each with bytes of its own behind its end, so that every one is decoded; while /health
    is asked all the time."""
    client = await connect()
    buffer = io.BytesIO()
    noise = Image.effect_noise((500, 375), 60).convert("RGB").resize((4000, 3000))
    noise.save(buffer, "JPEG", quality=85)
    jpeg = buffer.getvalue()
    headers = {"content-type": "image/jpeg", "accept": "application/vnd.safetensors"}
    files = [jpeg + bytes([i]) for i in range(20)]
    work = asyncio.gather(*(client.post("/v1/encode", content=f, headers=headers, timeout=120) for f in files))
    polls = []
    while not work.done():
        start = time.perf_counter()
        assert (await client.get("/health")).status_code == 200
        polls.append(time.perf_counter() - start)
        await asyncio.sleep(0.005)
    assert [response.status_code for response in await work] == [200] * 20
    assert client.app.state.service.store_stats.misses == 20  # type: ignore[attr-defined]
    polls.sort()
    assert len(polls) > 20
    assert polls[-1] < 0.1, f"slowest poll {polls[-1]:.3f} s"


async def test_draining_refuses_new_work_and_finishes_the_old(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    lifecycle: Lifecycle = client.app.state.service.lifecycle  # type: ignore[attr-defined]
    lifecycle.drain()
    refused = await encode(client, image(png(1)))
    check(refused, 503, "draining")
    assert "retry-after" in refused.headers
    check(await client.get("/health/ready"), 503, "draining")
    assert (await client.get("/health/live")).status_code == 200
    assert not await lifecycle.idle(0.01)
    tower.release()
    assert (await first).status_code == 200
    assert await lifecycle.idle(5)


async def test_no_answer_holds_another_callers_embedding(connect: Connect) -> None:
    """Two callers in one batch, in the format that could write a whole batch."""
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    victim = asyncio.create_task(encode(client, image(png(77))))
    await until_queued(client, 4)
    other = asyncio.create_task(encode(client, image(png(99)), encoding_format="torch_base64"))
    await until_queued(client, 8)
    tower.release()
    assert (await first).status_code == (await victim).status_code == 200
    saved = base64.b64decode((await other).json()["data"][0]["embedding"])
    tensor = torch.load(io.BytesIO(saved), weights_only=True)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert float(tensor[0, 0]) == pytest.approx(99)


async def test_float_is_limited_before_any_text_is_made(connect: Connect) -> None:
    calls = 0

    def counting(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return fake_run(batch)

    client = await connect(run=counting, max_float_tokens=5)
    picture = image(png(1, 84, 56))
    problem = check(await encode(client, picture, encoding_format="float"), 413, "limit_exceeded")
    assert "limit 5" in problem["detail"]
    # What was computed is not lost: the same picture in a form that is allowed costs nothing more.
    assert (await encode(client, picture)).json()["data"][0]["cache"] == "hit"
    assert calls == 1
    await encode(client, *[image(png(i, 56, 28)) for i in range(2)], encoding_format="float")
    check(
        await encode(client, *[image(png(i, 56, 28)) for i in range(3)], encoding_format="float"), 413, "limit_exceeded"
    )


async def test_a_client_that_breaks_off_its_upload_is_no_bug(
    connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await connect()
    messages: Any = iter(
        [
            {"type": "http.request", "body": b"secret-body", "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent to a client that left")

    scope = http_scope([(b"content-type", b"image/png"), (b"authorization", b"Bearer secret-key")])
    capsys.readouterr()
    await client.app(scope, receive, send)  # type: ignore[attr-defined]
    out = capsys.readouterr().out
    assert "status=499" in out
    assert "secret" not in out


async def test_a_stopped_reader_is_given_up(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.responses.WRITE_STALL_S", 0.05)
    client = await connect()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    app = client.app  # type: ignore[attr-defined]
    await asyncio.wait_for(post(app, png(1), send, [(b"content-type", b"image/png")]), 10)
    assert app.state.service.lifecycle.in_flight == 0
