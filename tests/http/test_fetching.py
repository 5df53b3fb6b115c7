"""Remote media through the whole service: a URL is treated like an upload, and what it fails with is said."""

from typing import Any

import httpx
import pytest

from tests.clips import make_film
from tests.http.conftest import Connect, png
from tests.http.test_encode import encode, numbers
from tests.http.test_problems import check
from tests.raw_server import RawServer, redirect, response, serve


def url(server: RawServer, path: str = "/x") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


async def test_a_url_gives_what_an_upload_gives(connect: Connect) -> None:  # M17
    picture, film = png(60, 56, 28), make_film(num_frames=4, fps=8)
    answers = {
        "/a.png": response(200, picture),
        "/moved": redirect("/a.png"),
        "/clip": response(200, film, content_type="video/mp4"),
    }
    client = await connect(allow_private_media=True)
    async with serve(answers) as server:
        direct, moved, clip = (
            await encode(
                client,
                url(server, "/a.png"),
                url(server, "/moved"),
                {"type": "video_url", "video_url": url(server, "/clip"), "fps": 8},
            )
        ).json()["data"]
    uploaded = await client.post("/v1/encode?dtype=float32", content=picture, headers={"content-type": "image/png"})
    assert direct["key"] == moved["key"] == uploaded.json()["data"][0]["key"]
    assert numbers(direct)[:, 0] == pytest.approx(60)
    assert (clip["type"], clip["frame_indices"]) == ("video", [0, 1, 2, 3])


@pytest.mark.parametrize("declared", ["image/jpeg", "text/html", None])
async def test_the_bytes_decide_whatever_the_host_declares(connect: Connect, declared: str | None) -> None:  # M12
    client = await connect(allow_private_media=True)
    async with serve(response(200, png(9), content_type=declared)) as server:
        assert (await encode(client, url(server))).status_code == 200
    async with serve(response(200, b'{"error": "no such file"}', content_type="image/png")) as server:
        check(await encode(client, url(server)), 415, "unsupported_media", 0)


@pytest.mark.parametrize("status", [403, 404, 410, 500, 503])
async def test_an_upstream_failure_is_424_and_named(connect: Connect, status: int) -> None:  # M19
    client = await connect(allow_private_media=True)
    async with serve(response(status, b"secret of the upstream")) as server:
        problem = check(await encode(client, url(server, "/x?signature=abc")), 424, "fetch_failed", 0)
    assert str(status) in problem["detail"]
    assert "secret" not in str(problem)
    assert "signature" not in str(problem)


async def test_the_item_limit_holds_for_remote_media(connect: Connect) -> None:
    client = await connect(allow_private_media=True, max_item_bytes=5000)
    async with serve(response(200, b"\x89PNG" * 2000)) as server:
        check(await encode(client, url(server)), 413, "limit_exceeded", 0)


async def test_by_default_nothing_private_is_fetched(client: httpx.AsyncClient) -> None:  # M18
    async with serve(response(200, png(1))) as server:
        for address in ("127.0.0.1", "localhost", "0x7f000001", "[::ffff:127.0.0.1]"):
            check(await encode(client, f"http://{address}:{server.port}/x"), 422, "fetch_denied", 0)
        assert server.heads == []


async def test_an_allow_list_names_the_only_hosts(connect: Connect) -> None:
    options: dict[str, Any] = {"allow_private_media": True, "allowed_media_domains": "media.example"}
    client = await connect(**options)
    async with serve(response(200, png(1))) as server:
        check(await encode(client, url(server)), 422, "fetch_denied", 0)
        assert server.heads == []
