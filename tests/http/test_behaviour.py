"""Deadlines, overload, clients that leave, start-up and draining: what the service does when things do not go well."""

import asyncio
import base64
import io
import json
import threading
import time
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from app.lifecycle import Lifecycle
from app.main import create_app
from app.settings import Settings
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check


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
    leaving = [asyncio.create_task(_post_and_leave(app, png(2 + i, 56, 56))) for i in range(20)]
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


def http_scope(headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/encode",
        "raw_path": b"/v1/encode",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("service", 80),
        "client": ("client", 1),
        "root_path": "",
        "state": {},
    }


async def _post_and_leave(app: Any, body: bytes) -> None:
    """Speak ASGI: send a body, then report a disconnect when cancelled."""
    gone = asyncio.Event()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent to a client that left")

    scope = http_scope([(b"content-type", b"image/png")])
    task = asyncio.create_task(app(scope, receive, send))
    try:
        await asyncio.shield(task)
    finally:
        gone.set()
        await task


async def test_a_stream_sends_what_is_done_while_the_rest_still_runs(connect: Connect) -> None:
    """A slow film never holds back a finished picture."""
    client = await connect(max_batch_patches=71_424)
    app = client.app  # type: ignore[attr-defined]
    tower = SlowTower()
    app.state.service._batcher._run = tower
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
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in received:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    scope = http_scope([(b"content-type", b"application/json"), (b"accept", b"application/x-ndjson")])
    request = asyncio.create_task(app(scope, receive, send))
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


async def test_readiness_and_liveness_are_two_things(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/health/ready"):
        assert (await client.get(path)).json() == {"status": "ready"}
    assert (await client.get("/health/live")).json() == {"status": "live"}


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


async def test_a_service_that_is_starting_says_so(connect: Connect) -> None:
    app = create_app(Settings(film_workers=1), fake_run)  # never started
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        check(await client.get("/health/ready"), 503, "starting")
        check(await encode(client, image(png(1))), 503, "starting")
        assert (await client.get("/v1/info")).json()["status"].startswith("weights are being read")


async def test_a_stuck_batch_shows_in_readiness(connect: Connect) -> None:  # M07
    tower = SlowTower()
    client = await connect(run=tower, batch_stall_s=0.05)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    await asyncio.sleep(0.1)
    check(await client.get("/health/ready"), 503, "device_failed")
    tower.release()
    assert (await first).status_code == 200
    assert (await client.get("/health/ready")).status_code == 200


async def test_tiny_pictures_are_served_and_so_is_the_next_request(client: httpx.AsyncClient) -> None:  # M07
    for width, height in ((1, 1), (2, 1), (13, 13), (26, 28)):
        (element,) = (await encode(client, image(png(5, width, height)))).json()["data"]
        assert element["grid_thw"] == [[1, 2, 2]]
    assert (await encode(client, image(png(5)))).status_code == 200


async def test_models_and_info_say_what_runs(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [(model["id"], model["object"], model["demo_weights"]) for model in models["data"]] == [
        ("kimi-k3", "model", True)
    ]
    info = (await client.get("/v1/info")).json()
    assert info["status"] == "ready"
    assert info["model"]["demo_weights"] is True
    assert info["model"]["architecture"]["head_dim"] > 0
    assert info["limits"]["items"] == 64
    assert info["batching"] == {
        "max_batch_patches": 71_424,
        "max_queued_patches": 16 * 71_424,
        "queued_patches": 0,
        "device_busy": False,
    }
    assert "reference" not in json.dumps(info["limits"])


async def test_the_openapi_document_describes_all_three_forms(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    body = document["components"]["requestBodies"]["Encode"]["content"]
    assert set(body) == {
        "application/json",
        "multipart/form-data",
        "image/*",
        "video/*",
        "application/octet-stream",
    }
    operation = document["paths"]["/v1/encode"]["post"]
    assert operation["requestBody"] == {"$ref": "#/components/requestBodies/Encode"}
    assert {"400", "404", "408", "413", "415", "422", "424", "429", "500", "503", "504"} <= set(operation["responses"])
    assert {"fps", "max_frames", "dtype", "uuid"} <= {parameter["name"] for parameter in operation["parameters"]}
    assert operation["responses"]["422"]["content"].keys() == {"application/problem+json"}
    assert "405" in operation["responses"]
    assert "422" not in document["paths"]["/problems/{slug}"]["get"]["responses"]
    parts = document["components"]["schemas"]["EncodeRequest"]["properties"]["input"]
    assert "string" in json.dumps(parts)
    references = set(_references(document))
    schemas = document["components"]["schemas"]
    assert {name for name in references if "/schemas/" in name} <= {f"#/components/schemas/{name}" for name in schemas}
    assert (await client.get("/docs")).status_code == 200


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _references(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in _references(value)]
    return []


async def test_each_request_is_one_log_line_without_media(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    response = await client.post("/v1/encode?uuid=private-name", content=png(5), headers={"content-type": "image/png"})
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "path=/v1/encode" in line]
    for part in (response.json()["id"], "items=1", "patches=4", "tokens=1", "status=200", "encode_ms=", "queue_ms="):
        assert part in line
    assert "private-name" not in out
    assert response.json()["data"][0]["embedding"][:40] not in out


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
    received: Any = iter([{"type": "http.request", "body": png(1), "more_body": False}])

    async def receive() -> Any:
        for message in received:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(3600)

    app = client.app  # type: ignore[attr-defined]
    await asyncio.wait_for(app(http_scope([(b"content-type", b"image/png")]), receive, send), 10)
    assert app.state.service.lifecycle.in_flight == 0


async def test_probes_may_ask_for_the_head_only(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        response = await client.head(path)
        assert (response.status_code, response.content) == (200, b"")


async def test_a_path_is_never_redirected(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/encode/", content=b"x", headers={"content-type": "image/png", "host": "evil"})
    check(response, 404, "not_found")


async def test_a_batcher_whose_thread_died_is_not_ready(client: httpx.AsyncClient) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    service._batcher.close()
    check(await client.get("/health/ready"), 503, "device_failed")
