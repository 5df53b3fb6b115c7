"""What the callers of a soak send: pictures of every format, films, and bad ones, each with its right answer."""

import io
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.async_client import Connections, difference, embeddings
from benchmarks.pictures import jpeg, picture
from benchmarks.running import ROOT
from encoder import Engine, preprocess_image

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {  # Pillow's name -> content type, options
    "JPEG": ("image/jpeg", {"quality": 85}),
    "PNG": ("image/png", {}),
    "WEBP": ("image/webp", {"quality": 80}),
    "GIF": ("image/gif", {}),
    "BMP": ("image/bmp", {}),
    "AVIF": ("image/avif", {"speed": 10}),
}
SIZES = ((64, 48), (112, 112), (200, 150), (333, 97), (448, 448))
KEY = secrets.token_urlsafe(24)  # of all callers
TOLERANCES = {"float32": 1e-5, "uint16": 1e-2}  # relative, for another batch's rounding; uint16: the bits of bfloat16


@dataclass(frozen=True)
class Medium:
    """One thing to send.

    Attributes:
        expected: its embedding, where it is good.
        status: of its problem, where it is not.
    """

    name: str
    request: bytes
    expected: NDArray[np.generic] | None = None
    status: int | None = None


async def ask(connections: Connections, medium: Medium) -> tuple[str, str]:
    """(outcome, what is wrong): right, refused (as it should be), 429, 503, 504, wrong, lost."""
    try:
        answer = await connections.ask(medium.request)
    except OSError as error:
        return "lost", f"{medium.name}: {type(error).__name__}: {error}"
    if medium.status is not None and answer.status == medium.status:
        return "refused", ""
    if answer.status == 200 and medium.expected is not None:
        error = difference(embeddings(answer.body), medium.expected)
        if error <= TOLERANCES[str(medium.expected.dtype)]:
            return "right", ""
        return "wrong", f"{medium.name}: relative error {error:.3g}"
    if answer.is_honest_refusal:
        return str(answer.status), ""
    return "lost", f"{medium.name}: status {answer.status}, {bytes(answer.body[:200])!r}"


def choose(media: Sequence[Medium], rng: random.Random) -> Medium:
    """Some come again and again, most hardly ever."""
    return media[
        min(int(rng.paretovariate(0.7)) - 1, len(media) - 1) if rng.random() < 0.5 else rng.randrange(len(media))
    ]


async def all_media(port: int, model: str, device: str, num_pictures: int, seed: int) -> list[Medium]:
    """Pictures with the embeddings of an engine of this process; films and bad ones with the service's first answers,
    which have to be the same twice."""
    engine = Engine.load(model, device=device)
    dtype = str(engine.dtype).removeprefix("torch.")
    media = [_picture(engine, port, dtype, number) for number in range(num_pictures)]
    del engine
    connections = Connections(port)
    for name, request in (*_films(port, dtype), *_bad_ones(port, dtype)):
        first, second = [await connections.ask(request) for _ in range(2)]
        if first.status != second.status or first.status >= 500:
            raise RuntimeError(f"{name}: status {first.status}, then {second.status}: {bytes(first.body[:300])!r}")
        if first.status == 200:
            known = embeddings(first.body)
            if difference(embeddings(second.body), known) > TOLERANCES[str(known.dtype)]:
                raise RuntimeError(f"{name}: two answers differ")
            media.append(Medium(name, request, expected=known))
        else:
            media.append(Medium(name, request, status=first.status))
    connections.close()
    random.Random(seed).shuffle(media)  # noqa: S311
    return media


def large_form(port: int, parts: int) -> bytes:
    """A request whose answer fills every buffer between the service and a client that does not read."""
    boundary, data = "----soak", jpeg(0, 1024, 1024)
    head = "Content-Disposition: form-data; name=a; filename=a.jpg\r\nContent-Type: image/jpeg\r\n\r\n"
    body = b"".join(f"--{boundary}\r\n{head}".encode() + data + b"\r\n" for _ in range(parts))
    body += f"--{boundary}--\r\n".encode()
    return _request(port, f"multipart/form-data; boundary={boundary}", body, "")


def _picture(engine: Engine, port: int, dtype: str, number: int) -> Medium:
    width, height = SIZES[number % len(SIZES)]
    name, (content_type, options) = list(FORMATS.items())[number % len(FORMATS)]
    buffer = io.BytesIO()
    image = picture(10_000 + number, width, height)
    (image.quantize(64) if name == "GIF" else image).save(buffer, name, **options)
    data = buffer.getvalue()
    embedding = engine.encode([preprocess_image(Image.open(io.BytesIO(data)), engine.config)])[0].cpu()
    bits = embedding.view(torch.uint16) if embedding.dtype == torch.bfloat16 else embedding
    request = _request(port, content_type, data, f"?dtype={dtype}")
    return Medium(f"{name} {width}x{height} {number}", request, expected=bits.numpy())


def _films(port: int, dtype: str) -> list[tuple[str, bytes]]:
    clip = (ROOT / "samples" / "clip.mp4").read_bytes()
    queries = ("fps=1", "fps=2&max_frames=4", "fps=4&max_frames=9", "max_frames=1")
    return [(f"film {query}", _request(port, "video/mp4", clip, f"?dtype={dtype}&{query}")) for query in queries]


def _bad_ones(port: int, dtype: str) -> list[tuple[str, bytes]]:
    photo, clip = (ROOT / "samples" / "photo.jpg").read_bytes(), (ROOT / "samples" / "clip.mp4").read_bytes()
    noise = random.Random(0).randbytes(5000)  # noqa: S311
    huge = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(huge, "PNG")
    bad: dict[str, tuple[str, bytes]] = {
        "no media": ("image/jpeg", b"GET / HTTP/1.1\r\n\r\n"),
        "noise": ("image/png", noise),
        "JPEG of noise": ("image/jpeg", photo[:600] + noise),
        "JPEG cut off": ("image/jpeg", photo[: len(photo) // 3]),
        "film cut off": ("video/mp4", clip[: len(clip) // 2]),
        "film of noise": ("video/mp4", clip[:900] + noise),
        "picture too large": ("image/png", huge.getvalue()),
        "picture as a film": ("video/mp4", photo),
    }
    return [(name, _request(port, kind, data, f"?dtype={dtype}")) for name, (kind, data) in bad.items()]


def _request(port: int, content_type: str, body: bytes, query: str) -> bytes:
    lines = (
        f"POST /v1/encode{query} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Content-Type: {content_type}",
        f"Authorization: Bearer {KEY}",
        "Accept: application/vnd.safetensors",
        f"Content-Length: {len(body)}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
