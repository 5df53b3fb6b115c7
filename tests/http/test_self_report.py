"""What the service says of itself: health, models, limits, the interface, and its log."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import Settings
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.http.tower import SlowTower


async def test_readiness_and_liveness_are_two_things(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/health/ready"):
        assert (await client.get(path)).json() == {"status": "ready"}
    assert (await client.get("/health/live")).json() == {"status": "live"}


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
        "max_queued_bytes": 4 << 30,
        "queued_bytes": 0,
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
    assert (await client.get("/docs")).status_code == 404  # its script would come from elsewhere


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
