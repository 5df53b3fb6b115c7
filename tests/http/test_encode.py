"""`POST /v1/encode`: three ways in, five ways out, one meaning."""

import base64
import hashlib
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load

from app.decode import MediaOptions
from app.keys import embedding_key, preprocessing_id
from encoder import load_config
from tests.clips import make_film
from tests.http.conftest import WIDTH, png

CONFIG = load_config("demo:k3-tiny")


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}, **fields}


def numbers(element: dict[str, Any]) -> np.ndarray:
    """The embedding of a base64 float32 element."""
    assert element["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(element["embedding"]), "<f4").reshape(element["shape"])


async def encode(client: httpx.AsyncClient, *parts: Any, **options: Any) -> httpx.Response:
    return await client.post("/v1/encode", json={"input": list(parts), "dtype": "float32", **options})


async def test_the_three_forms_answer_alike(client: httpx.AsyncClient) -> None:
    picture = png(90, 56, 84)
    answers = [
        await encode(client, image(picture)),
        await client.post(
            "/v1/encode", files={"file": ("x", picture, "image/png"), "request": (None, '{"dtype": "float32"}')}
        ),
        await client.post("/v1/encode?dtype=float32", content=picture, headers={"content-type": "image/png"}),
        await client.post(
            "/v1/encode?dtype=float32", content=picture, headers={"content-type": "application/octet-stream"}
        ),
    ]
    for position, response in enumerate(answers):
        assert response.status_code == 200, response.text
        document = response.json()
        (element,) = document["data"]
        assert document["object"] == "list"
        assert document["model"] == "kimi-k3"
        assert document["id"].startswith("enc-")
        assert document["id"] == response.headers["x-request-id"]
        assert element["object"] == "embedding"
        assert (element["index"], element["type"]) == (0, "image")
        assert element["cache"] == ("hit" if position else "miss")  # the form of a request is no part of the key
        assert element["original_size"] == element["resized_size"] == [56, 84]
        assert element["grid_thw"] == [[1, 6, 4]]
        assert element["num_tokens"] == 6
        assert element["segment_tokens"] == [6]
        assert element["shape"] == [6, WIDTH]
        assert element["prompt"] == "<|media_begin|>image 56x84<|media_content|><|media_pad|><|media_end|>"
        assert "timestamps" not in element
        assert "uuid" not in element
        assert document["usage"] == {"items": 1, "patches": 24, "tokens": 6, "media_bytes": len(picture)}
        assert set(document["timing_ms"]) == {"fetch", "decode", "queue", "encode", "total"}
        rows = numbers(element)
        assert rows[:, 0] == pytest.approx(90)
        assert rows[:, 2].tolist() == list(range(6))
        assert response.headers["x-content-key"] == element["key"]
        assert "total;dur=" in response.headers["server-timing"]
    assert len({response.json()["data"][0]["key"] for response in answers}) == 1


async def test_the_key_can_be_computed_from_the_bytes(client: httpx.AsyncClient) -> None:
    picture = png(1)
    (element,) = (await encode(client, image(picture))).json()["data"]
    assert element["key"] == embedding_key(
        hashlib.sha256(picture).hexdigest(),
        "image",
        MediaOptions(),
        fingerprint="0" * 64,
        preprocessing=preprocessing_id(CONFIG),
    )
    (turned,) = (await encode(client, image(picture, apply_exif_orientation=True))).json()["data"]
    assert turned["key"] != element["key"]
    (other_dtype,) = (await encode(client, image(picture), dtype="float16")).json()["data"]
    assert other_dtype["key"] == element["key"]


async def test_a_film_is_one_element_with_a_row_per_chunk(client: httpx.AsyncClient) -> None:
    film = make_film(num_frames=10, fps=8)
    part = {"type": "video_url", "video_url": {"url": data_uri(film, "video/mp4")}, "uuid": "clip"}
    response = await encode(client, part)
    assert response.status_code == 200, response.text
    (element,) = response.json()["data"]
    assert (element["type"], element["uuid"]) == ("video", "clip")
    assert element["frame_indices"] == list(range(10))
    assert [row[0] for row in element["grid_thw"]] == [4, 4, 2]
    assert element["timestamps"] == [0.0, 0.5, 1.0]
    assert element["num_tokens"] == sum(element["segment_tokens"]) == element["shape"][0]
    assert element["prompt"] == "".join(
        f"00:00:0{t}<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
        for t in ("0.000", "0.500", "1.000")
    )
    rows = numbers(element)
    patches = [t * h * w for t, h, w in element["grid_thw"]]
    assert rows[:, 1].tolist() == np.repeat(patches, element["segment_tokens"]).tolist()

    fewer = (await encode(client, part, max_frames=3)).json()["data"][0]
    assert fewer["frame_indices"] == [0, 4, 9]
    assert fewer["key"] != element["key"]
    slower = (await encode(client, part | {"fps": 2})).json()["data"][0]
    assert slower["frame_indices"] == [0, 9]


async def test_items_keep_their_order_and_their_own_rows(client: httpx.AsyncClient) -> None:  # M24
    film = make_film(num_frames=8, fps=8)
    parts = [image(png(10 * i, 28 * (1 + i % 3), 28), uuid=f"u{i}") for i in range(6)]
    parts.insert(3, {"type": "video_url", "video_url": data_uri(film, "video/mp4")})
    together = (await encode(client, *parts)).json()["data"]
    assert [element["index"] for element in together] == list(range(7))
    assert [element["type"] for element in together] == ["image"] * 3 + ["video"] + ["image"] * 3
    for part, element in zip(parts, together, strict=True):
        (alone,) = (await encode(client, part)).json()["data"]
        same = ("grid_thw", "num_tokens", "embedding", "key", "prompt", "uuid", "original_size")
        assert {k: element.get(k) for k in same} == {k: alone.get(k) for k in same}


async def test_the_same_picture_twenty_times(client: httpx.AsyncClient) -> None:  # M25
    data = (await encode(client, *[image(png(77))] * 20)).json()["data"]
    assert len(data) == 20
    assert len({element["embedding"] for element in data}) == 1


async def test_equal_bytes_of_other_shape_are_other_results(client: httpx.AsyncClient) -> None:  # M26
    wide, tall = (await encode(client, image(png(5, 100, 30)), image(png(5, 30, 100)))).json()["data"]
    assert wide["key"] != tall["key"]
    assert (wide["grid_thw"], tall["grid_thw"]) == ([[1, 4, 8]], [[1, 8, 4]])


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
async def test_other_dtypes_and_formats_hold_the_same_numbers(
    client: httpx.AsyncClient, dtype: str, torch_dtype: torch.dtype
) -> None:
    part = image(png(201, 84, 28))
    exact = torch.from_numpy(numbers((await encode(client, part)).json()["data"][0]).copy())
    wanted = exact.to(torch_dtype)

    raw = (await encode(client, part, dtype=dtype)).json()["data"][0]
    assert raw["dtype"] == dtype
    stored = torch.frombuffer(bytearray(base64.b64decode(raw["embedding"])), dtype=torch_dtype)
    assert torch.equal(stored.view(raw["shape"]), wanted)

    saved = (await encode(client, part, dtype=dtype, encoding_format="torch_base64")).json()["data"][0]
    packed = base64.b64decode(saved["embedding"])
    assert packed[:2] == b"PK"  # the zip format of torch.save
    assert torch.equal(torch.load(io.BytesIO(packed), weights_only=True), wanted)

    listed = (await encode(client, part, dtype=dtype, encoding_format="float")).json()["data"][0]
    assert torch.equal(torch.tensor(listed["embedding"]), wanted.float())


async def test_the_default_dtype_is_bfloat16(client: httpx.AsyncClient) -> None:
    document = (await client.post("/v1/encode", json={"input": [data_uri(png(3))]})).json()
    assert document["data"][0]["dtype"] == "bfloat16"
    assert len(base64.b64decode(document["data"][0]["embedding"])) == 1 * WIDTH * 2


@pytest.mark.parametrize("ask", [{"headers": {"accept": "application/vnd.safetensors"}}, {"json": "safetensors"}])
async def test_a_safetensors_answer_is_one_file(client: httpx.AsyncClient, ask: dict[str, Any]) -> None:
    document = {"input": [image(png(10)), image(b"no picture"), image(png(30, 56, 28))], "dtype": "float32"}
    if "json" in ask:
        document["encoding_format"] = ask["json"]
    response = await client.post("/v1/encode", json=document, headers=ask.get("headers"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/vnd.safetensors"
    assert int(response.headers["content-length"]) == len(response.content)
    tensors = load(response.content)
    assert set(tensors) == {"embeddings", "token_offsets"}
    assert tensors["embeddings"].shape == (3, WIDTH)
    assert tensors["embeddings"][:, 0].tolist() == pytest.approx([10, 30, 30])
    assert tensors["token_offsets"].dtype == torch.int64
    assert tensors["token_offsets"].tolist() == [0, 1, 1, 3]
    header = json.loads(response.content[8 : 8 + int.from_bytes(response.content[:8], "little")])
    answer = json.loads(header["__metadata__"]["response"])
    assert [element["object"] for element in answer["data"]] == ["embedding", "error", "embedding"]
    assert all("embedding" not in element for element in answer["data"])
    assert answer["data"][2]["num_tokens"] == 2


async def test_a_stream_has_a_line_per_item_and_one_of_usage(client: httpx.AsyncClient) -> None:
    body = {"input": [image(png(10)), image(b"no picture"), image(png(30))], "dtype": "float32"}
    response = await client.post("/v1/encode", json=body, headers={"accept": "application/x-ndjson"})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.content.splitlines()]
    assert lines[-1]["object"] == "usage"
    assert lines[-1]["usage"]["items"] == 3
    assert sorted(line["index"] for line in lines[:-1]) == [0, 1, 2]
    by_index = {line["index"]: line for line in lines[:-1]}
    assert numbers(by_index[0])[0, 0] == pytest.approx(10)
    assert numbers(by_index[2])[0, 0] == pytest.approx(30)
    assert by_index[1]["error"]["code"] == "unsupported_media"


async def test_messages_can_be_pasted(client: httpx.AsyncClient) -> None:
    content = [{"type": "text", "text": "compare"}, image(png(1)), image(png(2))]
    response = await client.post(
        "/v1/encode", json={"model": "kimi-k3", "messages": [{"role": "user", "content": content}]}
    )
    assert [element["index"] for element in response.json()["data"]] == [0, 1]


async def test_exif_turns_only_when_asked(client: httpx.AsyncClient) -> None:  # M01
    from PIL import Image

    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (640, 480), (9, 9, 9)).save(buffer, "JPEG", exif=exif)
    jpeg = buffer.getvalue()
    requests: list[dict[str, Any]] = [
        {"json": {"input": [{"type": "image_url", "image_url": data_uri(jpeg)}]}},
        {"files": {"f": ("a.jpg", jpeg, "image/jpeg")}},
        {"content": jpeg, "headers": {"content-type": "image/jpeg"}},
    ]
    for request in requests:
        element = (await client.post("/v1/encode", **request)).json()["data"][0]
        assert (element["original_size"], element["grid_thw"]) == ([640, 480], [[1, 36, 46]])
    requests[0]["json"]["apply_exif_orientation"] = True
    requests[1]["files"]["request"] = (None, '{"apply_exif_orientation": true}')
    requests[2]["params"] = {"apply_exif_orientation": "true"}
    for request in requests:
        element = (await client.post("/v1/encode", **request)).json()["data"][0]
        assert (element["original_size"], element["grid_thw"]) == ([480, 640], [[1, 46, 36]])
