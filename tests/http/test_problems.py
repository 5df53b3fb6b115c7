"""Every problem document: its status, its code, where it points, and what it never says."""

import asyncio
import base64
from typing import Any

import httpx
import pytest
import torch

from app import errors as app_errors
from app.problems import ALL_PROBLEMS, MAX_DETAIL_CHARS, PROBLEMS, describe
from encoder import errors as encoder_errors
from encoder.errors import EncoderError, SetupError
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import data_uri, encode, image


def leaves(root: type[EncoderError]) -> set[type[EncoderError]]:
    children = root.__subclasses__()
    return {root} if not children else set().union(*(leaves(child) for child in children))


def check(response: httpx.Response, status: int, code: str, index: int | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert problem.get("index") == index
    assert problem["instance"] == response.headers["x-request-id"]
    assert problem["type"].endswith(code.replace("_", "-"))
    if index is not None:
        assert problem["detail"].startswith(f"input[{index}]: ")
    return problem


def test_every_leaf_of_the_tree_has_its_problem() -> None:
    """Set-up errors end the process instead, and are the only ones without."""
    here = {cls for module in (app_errors, encoder_errors) for cls in vars(module).values() if isinstance(cls, type)}
    served = {leaf for leaf in leaves(EncoderError) & here if not issubclass(leaf, SetupError)}
    assert set(PROBLEMS) == served


@pytest.mark.parametrize(
    ("body", "code", "status"),
    [
        (b"{", "invalid_request", 400),
        (b'{"input": ["x"], "fsp": 2}', "invalid_request", 400),
        (b'{"input": []}', "invalid_request", 400),
        (b'{"input": ["x"], "model": "gpt"}', "model_not_found", 404),
        (b'{"input": ["x"], "delivery": "reference"}', "invalid_request", 400),
    ],
)
async def test_a_wrong_request_fails_whole(client: httpx.AsyncClient, body: bytes, code: str, status: int) -> None:
    response = await client.post("/v1/encode", content=body, headers={"content-type": "application/json"})
    check(response, status, code)


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("data:image/png;base64,!!!!", 400, "invalid_request"),
        ("data:image/png", 400, "invalid_request"),
        ("no-scheme", 400, "invalid_request"),
        ("file:///etc/passwd", 422, "fetch_denied"),
        ("http://127.0.0.1:1/x?secret=1", 422, "fetch_denied"),
        ("http://169.254.169.254/latest/meta-data", 422, "fetch_denied"),
        (data_uri(b"twelve bytes"), 415, "unsupported_media"),
        (data_uri(b'{"a": 1}', "image/png"), 415, "unsupported_media"),
        (data_uri(png(7)[:-30]), 422, "corrupt_media"),
    ],
)
async def test_a_bad_item_alone_gives_the_request_its_status(
    client: httpx.AsyncClient, source: str, status: int, code: str
) -> None:
    problem = check(await encode(client, source), status, code, index=0)
    assert "secret" not in str(problem)
    # The same item among good ones is its own error object, and disturbs nobody.
    response = await encode(client, image(png(1)), source, image(png(2)))
    assert response.status_code == 200
    first, bad, last = response.json()["data"]
    assert (first["object"], last["object"]) == ("embedding", "embedding")
    assert (bad["object"], bad["index"], bad["error"]["code"]) == ("error", 1, code)
    assert bad["error"]["status"] == status
    # Unless the caller wants all or nothing.
    check(await encode(client, image(png(1)), source, on_error="fail"), status, code, index=1)


async def test_when_everything_fails_the_first_item_gives_the_status(client: httpx.AsyncClient) -> None:
    parts = [data_uri(png(7)[:-30]), "no-scheme"]
    problem = check(await encode(client, *parts), 422, "corrupt_media", index=0)
    assert [element["error"]["status"] for element in problem["data"]] == [422, 400]
    streamed = await client.post("/v1/encode", json={"input": parts}, headers={"accept": "application/x-ndjson"})
    check(streamed, 422, "corrupt_media", index=0)


async def test_a_film_sent_as_a_picture_and_the_other_way_round(client: httpx.AsyncClient) -> None:
    check(await encode(client, {"type": "video_url", "video_url": data_uri(png(1))}), 415, "unsupported_media", 0)
    response = await client.post("/v1/encode", content=png(1), headers={"content-type": "video/mp4"})
    check(response, 415, "unsupported_media", 0)


@pytest.mark.parametrize("content_type", ["text/plain", None])
async def test_a_body_of_another_type(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    check(await client.post("/v1/encode", content=b"x", headers=headers), 415, "unsupported_media")


async def test_routes_and_methods_that_are_not_there(client: httpx.AsyncClient) -> None:
    check(await client.get("/nope"), 404, "not_found")
    check(await client.get("/v1/embeddings/emb-00"), 404, "not_found")
    assert "POST" in check(await client.get("/v1/encode"), 405, "method_not_allowed")["detail"]


async def test_limits_are_stated(connect: Connect) -> None:
    client = await connect(
        max_items=3, max_body_bytes=20_000, max_item_bytes=5_000, max_image_pixels=10_000, max_float_tokens=2
    )
    check(await encode(client, *["x"] * 4), 413, "limit_exceeded")
    png_type = {"content-type": "image/png"}
    check(await client.post("/v1/encode", content=b"x" * 20_001, headers=png_type), 413, "limit_exceeded")
    check(await encode(client, data_uri(b"\x89PNG" + bytes(6000))), 413, "limit_exceeded", 0)
    assert "limit 10000" in check(await encode(client, image(png(1, 101, 100))), 413, "limit_exceeded", 0)["detail"]
    big = image(png(1, 84, 28))
    assert "limit 2" in check(await encode(client, big, encoding_format="float"), 413, "limit_exceeded")["detail"]
    assert (await encode(client, big)).status_code == 200


async def test_a_raw_upload_over_the_item_limit(connect: Connect) -> None:
    client = await connect(max_item_bytes=2_000)
    response = await client.post("/v1/encode", content=b"\x89PNG" * 1000, headers={"content-type": "image/png"})
    check(response, 413, "limit_exceeded", 0)


async def test_a_value_that_float16_cannot_hold(connect: Connect) -> None:  # M39
    client = await connect(run=lambda batch: fake_run(batch) * 1000)
    problem = check(await encode(client, image(png(200)), dtype="float16"), 422, "dtype_overflow", 0)
    assert "65504" in problem["detail"]
    assert (await encode(client, image(png(200)), dtype="bfloat16")).status_code == 200


async def test_a_bug_is_500_and_says_nothing(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    def bug(batch: Any) -> torch.Tensor:
        raise KeyError("/secret/path/of/the/machine")

    client = await connect(run=bug)
    problem = check(await encode(client, image(png(1))), 500, "internal", 0)
    assert "secret" not in str(problem)
    assert problem["instance"] in problem["detail"]


async def test_results_that_are_not_finite_are_500_for_their_item_only(connect: Connect) -> None:
    def poisoned(batch: Any) -> torch.Tensor:
        if bool((batch.pixel_values == 66).any()):
            raise encoder_errors.NonFiniteResult("not finite in kernel xyz")
        return fake_run(batch)

    client = await connect(run=poisoned)
    response = await encode(client, image(png(1)), image(png(66)), image(png(2)))
    assert [element["object"] for element in response.json()["data"]] == ["embedding", "error", "embedding"]
    assert response.json()["data"][1]["error"]["code"] == "internal"
    assert "xyz" not in response.text


async def test_a_device_without_memory_or_life(connect: Connect) -> None:
    def out_of_memory(batch: Any) -> torch.Tensor:
        raise encoder_errors.DeviceOutOfMemory("the device ran out of memory")

    client = await connect(run=out_of_memory)
    response = await encode(client, image(png(1)))
    check(response, 503, "device_out_of_memory", 0)
    assert int(response.headers["retry-after"]) >= 1
    assert (await client.get("/health/ready")).status_code == 200

    def dead(batch: Any) -> torch.Tensor:
        raise encoder_errors.DeviceFailed("CUDA error at 0x7f00")

    client = await connect(run=dead)
    check(await encode(client, image(png(1))), 503, "device_failed", 0)
    check(await client.get("/health/ready"), 503, "device_failed")
    check(await encode(client, image(png(1))), 503, "device_failed")
    assert (await client.get("/health/live")).status_code == 200


async def test_the_problem_pages_are_served(client: httpx.AsyncClient) -> None:
    for code, kind in ALL_PROBLEMS.items():
        page = (await client.get(kind.type)).json()
        assert (page["code"], page["status"], page["title"]) == (code, kind.status, kind.title)
    check(await client.get("/problems/unheard-of"), 404, "not_found")


def test_details_are_bounded() -> None:
    problem = describe(app_errors.InvalidRequest("x" * 10_000), "enc-1", 3)
    assert len(problem.detail) == MAX_DETAIL_CHARS
    assert problem.detail.startswith("input[3]: x")


async def test_twelve_random_bytes_name_no_object(client: httpx.AsyncClient) -> None:  # M11
    junk = base64.b64decode("3q2+796tvu/erb7v")
    for response in (
        await encode(client, data_uri(junk)),
        await client.post("/v1/encode", content=junk, headers={"content-type": "image/png"}),
        await client.post("/v1/encode", files={"f": ("a.png", junk, "image/png")}),
    ):
        problem = check(response, 415, "unsupported_media", 0)
        assert "0x" not in problem["detail"]
        assert "object" not in problem["detail"]


async def test_a_client_that_is_too_slow(connect: Connect) -> None:
    client = await connect(body_timeout_s=0.05)

    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(0.5)
        yield b"}"

    response = await client.post("/v1/encode", content=trickle(), headers={"content-type": "application/json"})
    check(response, 408, "client_too_slow")
