"""The real command on a real socket with the real (tiny) tower: many clients, signals, exit codes."""

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load

from encoder import Engine, preprocess_frames, preprocess_image
from tests.clips import make_film, numbered_frame
from tests.http.conftest import png

MODEL = "demo:k3-tiny"
NUM_CLIENTS = 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(*flags: str, port: int | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`moonvit-serve serve`, ready; killed at the end if it still runs."""
    port = port or free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--model", MODEL, *flags]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, env=clean_environment())
        try:
            wait_until_ready(process, url, log)
            yield process, url
        finally:
            process.kill()
            process.wait()


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MOONVIT_")}


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: TextIO, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            pytest.fail(f"the service ended with {process.returncode}: {log.read()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail("the service did not become ready")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("--film-workers", "2", "--store-bytes", "0") as (_, url):  # every request is to be computed
        yield url


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(MODEL)


class Case:
    """A file, and the embedding it must give; None where it must fail."""

    def __init__(self, content_type: str, data: bytes, expected: torch.Tensor | None) -> None:
        self.content_type, self.data, self.expected = content_type, data, expected


@pytest.fixture(scope="module")
def cases(engine: Engine) -> list[Case]:
    made = []
    for i in range(16):
        width, height = 28 + 13 * i, 200 - 11 * i
        picture = Image.fromarray(numbered_frame(i, width, height))
        segment = preprocess_image(picture, engine.config)
        made.append(Case("image/png", to_png(picture), engine.encode([segment])[0]))
    frames = [numbered_frame(number, 192, 160) for number in range(6)]
    # Lossless in RGB, so that what the decoder gives is exactly what was put in.
    film = make_film(num_frames=6, fps=6, codec="libx264rgb", pix_fmt="rgb24", codec_options={"qp": "0"}, frames=frames)
    chunks = [
        preprocess_frames(np.stack(frames[:4]), engine.config),
        preprocess_frames(np.stack(frames[4:]), engine.config),
    ]
    made.append(Case("video/mp4", film, torch.cat(engine.encode(chunks))))
    made.append(Case("image/png", png(9)[:-30], None))
    made.append(Case("video/mp4", film[: len(film) // 3], None))
    return made


def to_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


async def test_64_clients_with_one_broken_file_in_ten(url: str, cases: list[Case]) -> None:
    """Every answer right, in order, nothing lost."""
    good = [case for case in cases if case.expected is not None]
    broken = [case for case in cases if case.expected is None]
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    wrong: list[str] = []
    answered = 0

    async def one(seed: int, client: httpx.AsyncClient) -> None:
        nonlocal answered
        choice = random.Random(seed)
        for round_ in range(3):
            sent = [choice.choice(broken if choice.random() < 0.1 else good) for _ in range(choice.randint(1, 5))]
            files: list[Any] = [("file", (str(i), case.data, case.content_type)) for i, case in enumerate(sent)]
            files.append(("request", (None, '{"dtype": "float32", "encoding_format": "safetensors"}')))
            response = await client.post(f"{url}/v1/encode", files=files)
            answered += 1
            problem = check_answer(response, sent)
            if problem:
                wrong.append(f"client {seed}, round {round_}: {problem}")

    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        await asyncio.gather(*(one(seed, client) for seed in range(NUM_CLIENTS)))
        assert not wrong
        assert answered == NUM_CLIENTS * 3
        info = (await client.get(f"{url}/v1/info")).json()
        assert info["batching"]["queued_patches"] == 0
        assert (await client.get(f"{url}/health/ready")).status_code == 200


def check_answer(response: httpx.Response, sent: list[Case]) -> str | None:
    """What is wrong with an answer, or None."""
    if all(case.expected is None for case in sent):
        return None if response.status_code == 422 else f"status {response.status_code}"
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:200]}"
    tensors = load(response.content)
    header = json.loads(response.content[8 : 8 + int.from_bytes(response.content[:8], "little")])
    data = json.loads(header["__metadata__"]["response"])["data"]
    if [element["index"] for element in data] != list(range(len(sent))):
        return "order"
    offsets = tensors["token_offsets"].tolist()
    for i, (case, element) in enumerate(zip(sent, data, strict=True)):
        rows = tensors["embeddings"][offsets[i] : offsets[i + 1]]
        if case.expected is None:
            if element["object"] != "error" or element["error"]["status"] != 422 or len(rows):
                return f"item {i} should have failed"
        elif element["object"] != "embedding" or rows.shape != case.expected.shape:
            return f"item {i}: {element}"
        elif float((rows - case.expected).abs().max()) > 1e-5:
            return f"item {i} differs by {float((rows - case.expected).abs().max())}"
    return None


async def test_an_embedding_does_not_depend_on_its_neighbours(url: str, cases: list[Case]) -> None:  # M27
    good = [case for case in cases if case.expected is not None][:10]
    files: list[Any] = [("file", ("f", case.data, case.content_type)) for case in good]
    files.append(("request", (None, '{"dtype": "float32"}')))
    headers = {"accept": "application/vnd.safetensors"}
    async with httpx.AsyncClient(timeout=60) as client:
        together = load((await client.post(f"{url}/v1/encode", files=files, headers=headers)).content)
        offsets = together["token_offsets"].tolist()
        for i, case in enumerate(good):
            alone = await client.post(
                f"{url}/v1/encode?dtype=float32",
                content=case.data,
                headers=headers | {"content-type": case.content_type},
            )
            difference = load(alone.content)["embeddings"] - together["embeddings"][offsets[i] : offsets[i + 1]]
            assert float(difference.abs().max()) <= 1e-5


async def test_a_body_over_the_limit_is_refused_on_the_wire() -> None:  # M22
    with running("--max-body-bytes", "100000", "--film-workers", "1") as (_, url):

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 50_000

        async with httpx.AsyncClient(timeout=30) as client:
            for content in (chunked(), b"x" * 100_001):
                response = await client.post(f"{url}/v1/encode", content=content, headers={"content-type": "image/png"})
                assert (response.status_code, response.json()["code"]) == (413, "limit_exceeded")
                assert response.headers["connection"] == "close"
            await asyncio.to_thread(send_without_end, url)
            assert (await client.get(f"{url}/health/ready")).status_code == 200


def send_without_end(url: str) -> None:
    """A client that never stops sending is cut off."""
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    start = time.monotonic()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 30:
                connection.sendall(chunk)
    assert time.monotonic() - start < 20


async def test_sockets_closed_after_the_upload_leave_nothing_behind(url: str, cases: list[Case]) -> None:  # M36
    case = cases[0]
    host, port = url.removeprefix("http://").split(":")
    for _ in range(100):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_head(case) + case.data)
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    async with httpx.AsyncClient() as client:
        for _ in range(100):
            info = (await client.get(f"{url}/v1/info")).json()
            if info["batching"]["queued_patches"] == 0:
                break
            await asyncio.sleep(0.1)
        assert info["batching"]["queued_patches"] == 0
        answer = await client.post(f"{url}/v1/encode", content=case.data, headers={"content-type": case.content_type})
        assert answer.status_code == 200


def request_head(case: Case) -> bytes:
    lines = ("POST /v1/encode HTTP/1.1", "Host: x", f"Content-Type: {case.content_type}")
    return "\r\n".join((*lines, f"Content-Length: {len(case.data)}", "", "")).encode()


def test_sigterm_finishes_what_was_accepted_and_exits_0(cases: list[Case]) -> None:
    case = next(case for case in cases if case.content_type == "video/mp4" and case.expected is not None)
    with running("--film-workers", "1") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request_head(case) + case.data[:-1])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert httpx.get(f"{url}/health/ready").json()["code"] == "draining"
            refused = httpx.post(f"{url}/v1/encode", content=case.data, headers={"content-type": "video/mp4"})
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            connection.sendall(case.data[-1:])
            connection.settimeout(30)
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert process.wait(timeout=30) == 0


def test_sighup_with_nothing_to_read_again_ends_nothing() -> None:
    with running("--film-workers", "1") as (process, url):
        process.send_signal(signal.SIGHUP)
        assert httpx.get(f"{url}/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attention-backend", "torch_native"], "Unsupported Kimi-K3 vision attention backend: torch_native"),
        (["--attention-backend", "fa3"], "fa3"),
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--model", "demo:k4"], "demo:k4"),
        (["--device", "tpu"], "tpu"),
        (["--max-batch-patches", "100"], "allowed from 4096 on"),
        (["--max-items", "0"], "--max-items"),
    ],
)
def test_a_configuration_that_cannot_work_exits_2_and_says_why(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(free_port()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_weights_end_the_process_with_2(tmp_path: Path) -> None:
    """Found only when the weights are read, while /health already answers."""
    exported = tmp_path / "model"
    subprocess.run(
        [sys.executable, "-m", "app.cli", "export", MODEL, str(exported)], check=True, env=clean_environment()
    )
    (weights,) = exported.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(free_port()), "--model", str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)
    assert done.returncode == 2
    assert weights.name in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_a_clear_failure(url: str) -> None:
    port = url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "app.cli", "serve", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean_environment(), check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr


def test_signals_end_the_process_while_a_batch_runs() -> None:
    """A device cannot be interrupted; the process ends all the same, and the client hears why."""
    buffer = io.BytesIO()
    Image.new("RGB", (3000, 2000), (200, 10, 10)).save(buffer, "PNG")
    for kind, flags in ((signal.SIGINT, ()), (signal.SIGTERM, ("--drain-timeout-s", "0.5"))):
        with running("--film-workers", "1", *flags) as (process, url):
            answers: list[httpx.Response] = []

            def send(url: str = url, answers: list[httpx.Response] = answers) -> None:
                headers = {"content-type": "image/png"}
                answers.append(httpx.post(f"{url}/v1/encode", content=buffer.getvalue(), headers=headers, timeout=60))

            client = threading.Thread(target=send)
            client.start()
            wait_until_busy(url)
            start = time.monotonic()
            process.send_signal(kind)
            assert process.wait(timeout=30) == 0
            assert time.monotonic() - start < 15
            client.join()
            assert (answers[0].status_code, answers[0].json()["code"]) == (503, "draining")


def wait_until_busy(url: str) -> None:
    for _ in range(2000):
        if httpx.get(f"{url}/v1/info").json()["batching"]["device_busy"]:
            return
        time.sleep(0.005)
    pytest.fail("the picture never reached the device")


def test_a_body_offered_with_an_upgrade_is_read(url: str) -> None:
    """Some clients offer HTTP/2 with every request on a plain connection."""
    headers = {
        "content-type": "image/png",
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2-settings": "AA",
    }
    response = httpx.post(f"{url}/v1/encode", content=png(5), headers=headers)
    assert response.status_code == 200


def test_a_body_with_two_lengths_is_the_last_thing_on_its_connection(url: str) -> None:
    """What a proxy may take for its end is not where another request begins."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n"
    body = b"0\r\n\r\n" + hidden
    head = (
        b"POST /v1/encode HTTP/1.1\r\nHost: t\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head + body)
        answers = b"".join(iter(lambda: connection.recv(65536), b""))  # to its end, so it is closed
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answers.lower()
