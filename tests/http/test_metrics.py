"""`GET /metrics` says exactly what happened, and says it while everything else is stuck."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
import torch

from app.decode.worker_process import WorkerProcess
from app.lifecycle import Lifecycle
from encoder import NonFiniteResult
from tests.http.asgi import post, post_and_leave
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.tower import SlowTower, until_queued
from tests.scrape import nonzero, samples_of, scrape

JSON = {"content-type": "application/json"}
PNG = [(b"content-type", b"image/png")]
BAD = b"\x89PNG\r\n\x1a\n but no more"


async def until(client: httpx.AsyncClient, sample: str, value: float) -> dict[str, float]:
    """Scrape until a sample has its value."""
    for _ in range(1000):
        found = await scrape(client)
        if found[sample] == value:
            return found
        await asyncio.sleep(0.01)
    pytest.fail(f"{sample} is {found[sample]}, expected {value}")


async def test_a_mix_of_requests_is_counted_as_it_was(client: httpx.AsyncClient) -> None:
    ok = [
        await encode(client, image(png(1)), image(png(2, 56, 56))),  # 4 + 16 patches, 1 + 4 tokens
        await client.post("/v1/encode", content=png(3), headers={"content-type": "image/png"}),  # 4 patches, 1 token
        await client.post(
            "/v1/encode", json={"input": [image(png(4))]}, headers={"accept": "application/x-ndjson"}
        ),  # the same
    ]
    partial = await encode(client, image(png(5)), image(BAD))  # the same
    refused = [
        await encode(client, image(BAD)),
        await encode(client, image(BAD), image(b"GIF8")),
        await client.post("/v1/encode", content=b"{", headers=JSON),
        await client.post("/v1/encode", json={"input": [image(png(1))], "model": "other"}),
        await client.post("/v1/encode", content=b"hello", headers={"content-type": "text/plain"}),
        await client.post("/v1/encode", content=BAD, headers={"content-type": "application/octet-stream"}),
        await encode(client, {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}),
    ]
    assert [response.status_code for response in [*ok, partial]] == [200] * 4
    assert [response.status_code for response in refused] == [422, 422, 400, 404, 415, 422, 422]
    for path in ("/health", "/v1/info", "/v1/models", "/nope"):
        await client.get(path)

    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {
        '{code="ok"}': 3,
        '{code="partial"}': 1,
        '{code="corrupt_media"}': 3,
        '{code="invalid_request"}': 1,
        '{code="model_not_found"}': 1,
        '{code="unsupported_media"}': 1,
        '{code="fetch_denied"}': 1,
    }
    assert nonzero(found, "moonvit_items_total") == {
        '{code="ok",kind="image"}': 5,
        '{code="corrupt_media",kind="image"}': 4,
        '{code="corrupt_media",kind="unknown"}': 1,
        '{code="fetch_denied",kind="image"}': 1,
    }
    assert nonzero(found, "moonvit_drops_total") == {}
    assert found["moonvit_patches_total"] == 4 + 16 + 4 + 4 + 4
    assert found["moonvit_tokens_total"] == 1 + 4 + 1 + 1 + 1
    assert found["moonvit_batch_patches_sum"] == found["moonvit_patches_total"]
    assert found["moonvit_batch_segments_sum"] == 5
    batches = found["moonvit_batch_segments_count"]
    assert 4 <= batches <= 5  # the two pictures of the first request may share one
    assert nonzero(found, "moonvit_batches_total") == {'{outcome="ok"}': batches}
    assert found["moonvit_request_duration_seconds_count"] == 4
    assert nonzero(found, "moonvit_stage_duration_seconds_count") == {
        '{stage="fetch"}': 1,  # the one that was denied; the others came with their requests
        '{stage="decode_wait"}': 5,
        '{stage="decode"}': 5,
        '{stage="preprocess"}': 5,
        '{stage="queue"}': 5,
        '{stage="encode"}': 5,
        '{stage="deliver"}': 4,
    }
    assert 0 < found["moonvit_device_busy_seconds_total"] < found["moonvit_request_duration_seconds_sum"]
    assert found["moonvit_requests_in_flight"] == found["moonvit_queue_patches"] == 0
    assert found["moonvit_running_batch_seconds"] == 0
    assert found["moonvit_ready"] == 1


async def test_an_embedding_that_is_there_already_costs_no_stage(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        assert (await encode(client, image(png(1)))).status_code == 200
    found = await scrape(client)
    assert (found["moonvit_cache_hits_total"], found["moonvit_cache_misses_total"]) == (2, 1)
    assert found["moonvit_cache_entries"] == 1
    assert found['moonvit_items_total{code="ok",kind="image"}'] == 3
    assert found["moonvit_patches_total"] == 4
    assert found['moonvit_stage_duration_seconds_count{stage="decode"}'] == 1
    assert found['moonvit_stage_duration_seconds_count{stage="encode"}'] == 1


async def test_the_bounds_are_told_beside_the_values(connect: Connect) -> None:
    found = await scrape(await connect(max_requests=7, max_queued_patches=400))
    assert found["moonvit_requests_limit"] == 7
    assert found["moonvit_queue_limit_patches"] == 400


async def test_the_queue_is_seen_while_the_device_is_stuck(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    running += [asyncio.create_task(encode(client, image(png(n, 56, 56)))) for n in range(200)]
    await until_queued(client, 200 * 16)
    start = time.perf_counter()
    found = await scrape(client)
    assert time.perf_counter() - start < 1
    assert found["moonvit_queue_patches"] == 200 * 16
    assert found["moonvit_requests_in_flight"] == 201
    assert found["moonvit_running_batch_seconds"] > 0
    assert nonzero(found, "moonvit_requests_total") == {}
    tower.release()
    assert {response.status_code for response in await asyncio.gather(*running)} == {200}
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 201}
    assert found["moonvit_queue_patches"] == found["moonvit_requests_in_flight"] == 0


async def test_decoding_is_seen_while_it_happens(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await connect()  # two workers
    release = asyncio.Event()

    async def held(*_: Any) -> bytes:
        await release.wait()
        raise ValueError

    monkeypatch.setattr(WorkerProcess, "ask", held)
    running = [asyncio.create_task(encode(client, image(png(n)))) for n in range(5)]
    found = await until(client, 'moonvit_decode_jobs{kind="image",state="waiting"}', 3)
    assert found['moonvit_decode_jobs{kind="image",state="running"}'] == 2
    assert found['moonvit_decode_jobs{kind="video",state="running"}'] == 0
    release.set()
    await asyncio.gather(*running)
    found = await until(client, 'moonvit_decode_jobs{kind="image",state="running"}', 0)
    assert found['moonvit_decode_jobs{kind="image",state="waiting"}'] == 0
    assert nonzero(found, "moonvit_requests_total") == {'{code="internal"}': 5}


async def test_overload_is_counted_at_the_door_and_at_the_queue(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower, max_queued_patches=400)
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    running.append(asyncio.create_task(encode(client, image(png(2, 280, 280)))))
    await until_queued(client, 400)
    assert (await encode(client, image(png(3)))).status_code == 429  # the queue is full
    client.app.state.service.lifecycle._max_requests = 2  # type: ignore[attr-defined]
    assert (await encode(client, image(png(4)))).status_code == 429  # refused unread
    tower.release()
    await asyncio.gather(*running)
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 2, '{code="overloaded"}': 2}
    assert nonzero(found, "moonvit_drops_total") == {'{reason="overload"}': 1}
    assert found['moonvit_items_total{code="overloaded",kind="image"}'] == 1


async def test_a_passed_deadline_is_a_drop(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    late = await encode(client, image(png(2)), image(png(3)), deadline_ms=50)
    assert late.status_code == 504
    tower.release()
    await first
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 1, '{code="deadline_exceeded"}': 1}
    assert nonzero(found, "moonvit_drops_total") == {'{reason="deadline"}': 2}
    assert found["moonvit_patches_total"] == 4  # nothing was computed for it


async def test_clients_that_leave_are_counted(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    leaving = [asyncio.create_task(post_and_leave(client.app, png(2 + n))) for n in range(3)]  # type: ignore[attr-defined]
    await until_queued(client, 3 * 4)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    tower.release()
    await first
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 1, '{code="client_left"}': 3}
    assert nonzero(found, "moonvit_items_total") == {
        '{code="ok",kind="image"}': 1,
        '{code="dropped",kind="image"}': 3,
    }
    assert nonzero(found, "moonvit_drops_total") == {'{reason="client_left"}': 3}
    assert found["moonvit_patches_total"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_all_or_none_drops_the_rest(connect: Connect, stream: bool) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    headers = {"accept": "application/x-ndjson"} if stream else {}
    body = {"input": [image(png(1)), image(BAD), image(png(2))], "on_error": "fail"}
    response = await client.post("/v1/encode", json=body, headers=headers)
    assert response.json()["code"] == "corrupt_media"
    tower.release()
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="corrupt_media"}': 1}
    assert nonzero(found, "moonvit_drops_total") == {'{reason="sibling_failed"}': 2}


async def test_a_stream_that_fails_after_its_first_line_has_that_items_code(connect: Connect) -> None:
    """Its status was sent as 200."""

    def poisoned(batch: Any) -> torch.Tensor:
        if bool((batch.pixel_values == 66).any()):
            raise NonFiniteResult("x")
        return fake_run(batch)

    client = await connect(run=poisoned)
    body = {"input": [image(png(1)), image(png(66, 560, 560))], "on_error": "fail"}
    response = await client.post("/v1/encode", json=body, headers={"accept": "application/x-ndjson"})
    lines = [json.loads(line) for line in response.text.splitlines()]
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="internal"}': 1}
    assert nonzero(found, "moonvit_batches_total").keys() >= {'{outcome="failed"}'}
    if response.status_code == 200:  # else the bad picture was done first, and nothing had been sent
        assert [line["object"] for line in lines] == ["embedding", "error"]


async def test_refusals_while_draining_and_work_cut_off_by_it(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    running = [asyncio.create_task(encode(client, image(png(1))))]
    await tower.busy()
    running.append(asyncio.create_task(encode(client, image(png(2)))))
    await until_queued(client, 4)
    service = client.app.state.service  # type: ignore[attr-defined]
    lifecycle: Lifecycle = service.lifecycle
    lifecycle.drain()
    assert (await encode(client, image(png(3)))).status_code == 503
    assert (await scrape(client))["moonvit_ready"] == 0
    closing = asyncio.create_task(asyncio.to_thread(service._batcher.close))
    assert (await running[1]).status_code == 503
    tower.release()
    assert (await running[0]).status_code == 200
    await closing
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 1, '{code="draining"}': 2}
    assert nonzero(found, "moonvit_drops_total") == {'{reason="shutdown"}': 1}


async def test_one_who_is_cut_off_left_even_where_all_or_none_was_asked_for(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    first = asyncio.create_task(encode(client, image(png(1))))
    await tower.busy()
    cut = asyncio.create_task(encode(client, image(png(2)), image(png(3)), on_error="fail"))
    await until_queued(client, 2 * 4)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    tower.release()
    await first
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 1, '{code="aborted"}': 1}
    assert nonzero(found, "moonvit_drops_total") == {'{reason="client_left"}': 2}


async def test_a_stream_that_is_cut_off_is_no_success(connect: Connect) -> None:
    tower = SlowTower()
    client = await connect(run=tower)
    sent = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.set()
            await asyncio.sleep(3600)

    tower.release()
    headers = [*PNG, (b"accept", b"application/x-ndjson")]
    cut = asyncio.create_task(post(client.app, png(1), send, headers))  # type: ignore[attr-defined]
    await asyncio.wait_for(sent.wait(), 30)
    cut.cancel()
    await asyncio.gather(cut, return_exceptions=True)
    assert nonzero(await scrape(client), "moonvit_requests_total") == {'{code="aborted"}': 1}


async def test_an_answer_too_large_as_a_whole_drops_all_its_items(connect: Connect) -> None:
    client = await connect(max_float_tokens=2)
    response = await encode(client, image(png(1)), image(png(2)), image(png(3)), encoding_format="float")
    assert response.json()["code"] == "limit_exceeded"
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="limit_exceeded"}': 1}
    items = nonzero(found, "moonvit_items_total")
    assert sum(items.values()) == 3
    assert items['{code="dropped",kind="image"}'] == found['moonvit_drops_total{reason="sibling_failed"}'] >= 1


async def test_waiting_for_a_decoder_is_not_decoding(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await connect()  # two workers
    ask = WorkerProcess.ask

    async def slow(*args: Any) -> bytes:
        await asyncio.sleep(0.2)
        return await ask(*args)

    monkeypatch.setattr(WorkerProcess, "ask", slow)
    await asyncio.gather(*(encode(client, image(png(n))) for n in range(4)))
    sums = nonzero(await scrape(client), "moonvit_stage_duration_seconds_sum")
    assert sums['{stage="decode_wait"}'] >= 2 * 0.2 + 2 * 0.4
    assert sums['{stage="decode"}'] < 0.4


async def test_a_client_that_reads_slowly_shows_in_delivery(client: httpx.AsyncClient) -> None:
    async def send(message: Any) -> None:
        await asyncio.sleep(0.1)

    await post(client.app, png(1), send, PNG)  # type: ignore[attr-defined]
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="ok"}': 1}
    assert found['moonvit_stage_duration_seconds_sum{stage="deliver"}'] > 0.2
    assert found['moonvit_stage_duration_seconds_sum{stage="encode"}'] < 0.2


async def test_an_answer_that_breaks_off_is_no_success(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    async def send(message: Any) -> None:
        started.append(message["type"])

    started: list[str] = []
    monkeypatch.setattr("app.routes.usage_line", broken)
    await post(client.app, png(1), send, [*PNG, (b"accept", b"application/x-ndjson")])  # type: ignore[attr-defined]
    assert started[0] == "http.response.start"
    found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {'{code="internal"}': 1}
    assert found["moonvit_request_duration_seconds_count"] == 0


async def test_prometheus_and_openmetrics_are_both_spoken(client: httpx.AsyncClient) -> None:
    plain = await client.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "moonvit_ready" in samples_of(plain.text)
    openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")


async def test_a_scrape_is_no_request_and_no_log_line(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for _ in range(3):
        found = await scrape(client)
    assert nonzero(found, "moonvit_requests_total") == {}
    assert "[info" not in capsys.readouterr().out


async def test_the_event_loop_is_watched(client: httpx.AsyncClient) -> None:
    before = (await scrape(client))["moonvit_event_loop_lag_seconds_count"]
    await asyncio.sleep(0.5)
    assert (await scrape(client))["moonvit_event_loop_lag_seconds_count"] - before >= 3
