"""API keys, limits per key and request ids, through the whole application and over real sockets."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import torch
from structlog.testing import capture_logs

from app.cli import main
from encoder import PackedBatch
from tests.http.asgi import http_scope
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_problems import check
from tests.http.test_socket import clean_environment, free_port, running
from tests.scrape import nonzero, samples_of

A, B = "key-of-a-0123456789", "key-of-b-0123456789"
PNG = {"content-type": "image/png"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"a:{A}\nb:{B} requests_per_s=0.01 burst=2\n")
    path.chmod(0o600)
    return path


async def encode(client: httpx.AsyncClient, key: str | None, level: int = 1) -> httpx.Response:
    headers = PNG | (bearer(key) if key else {})
    return await client.post("/v1/encode", content=png(level), headers=headers)


class TestKeys:
    async def test_without_a_key_nothing_is_answered_but_health_and_problems(
        self, connect: Connect, key_file: Path
    ) -> None:
        client = await connect(api_key_file=key_file)
        for route in ("/v1/models", "/v1/info", "/metrics", "/docs", "/openapi.json", "/", "/nope"):
            problem = check(await client.get(route), 401, "unauthorized")
            assert "nope" not in str(problem)
        refused = await encode(client, None)
        check(refused, 401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        for route in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(route)).status_code == 200
        described = (await client.get("/problems/unauthorized")).json()
        assert (described["status"], described["code"]) == (401, "unauthorized")

    async def test_with_a_key_everything_is(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file)
        assert (await encode(client, A)).status_code == 200
        for route in ("/v1/models", "/v1/info", "/metrics", "/openapi.json"):
            assert (await client.get(route, headers=bearer(B))).status_code == 200
        check(await client.get("/nope", headers=bearer(A)), 404, "not_found")

    async def test_openapi_says_which_routes_need_one(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file)
        document = (await client.get("/openapi.json", headers=bearer(A))).json()
        assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                needs_key = not path.startswith(("/health", "/problems/"))
                assert (operation.get("security") == [{"key": []}]) == needs_key, path
                assert ("401" in operation["responses"]) == (needs_key or path == "/v1/encode"), path
        assert "429" in document["paths"]["/v1/encode"]["post"]["responses"]
        without = (await (await connect()).get("/openapi.json")).json()
        assert "securitySchemes" not in without["components"]

    async def test_a_wrong_key_is_not_written_anywhere(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file)
        with capture_logs() as logs:
            response = await encode(client, "wrong-key-0123456789")
        check(response, 401, "unauthorized")
        assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'
        for text in (response.text, str(logs), str(response.headers)):
            assert "wrong-key" not in text
        assert [line["code"] for line in logs if line["event"] == "request"] == ["unauthorized"]

    async def test_the_log_line_and_the_series_say_whose_request_it_was(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file, metrics_without_key=True)
        with capture_logs() as logs:
            await encode(client, A)
            await encode(client, None)
        lines = [line for line in logs if line["event"] == "request"]
        assert [line.get("key") for line in lines] == ["a", None]
        samples = samples_of((await client.get("/metrics")).text)
        assert nonzero(samples, "moonvit_key_requests_total") == {'{key="a"}': 1}
        assert nonzero(samples, "moonvit_unauthorized_total") == {'{reason="missing"}': 1}
        assert nonzero(samples, "moonvit_requests_total") == {'{code="ok"}': 1, '{code="unauthorized"}': 1}

    async def test_the_body_is_not_read_before_the_key(self, connect: Connect, key_file: Path) -> None:
        """What the client is still sending is let in after the answer has begun, and goes nowhere."""
        client = await connect(api_key_file=key_file)
        events: list[str] = []

        async def receive() -> dict[str, Any]:
            events.append("read")
            return {"type": "http.request", "body": b"x", "more_body": False}

        async def send(message: Any) -> None:
            events.append(message["type"])

        await client.app(http_scope([(b"content-type", b"image/png")]), receive, send)  # type: ignore[attr-defined]
        assert events[0] == "http.response.start"
        assert events.index("read") > 0

    async def test_keys_are_asked_for_while_the_service_is_not_ready(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file)
        client.app.state.service.lifecycle.drain()  # type: ignore[attr-defined]
        check(await encode(client, None), 401, "unauthorized")
        check(await encode(client, A), 503, "draining")


class TestLimits:
    async def test_a_key_that_sends_too_much_is_refused_and_the_others_are_not(
        self, connect: Connect, key_file: Path
    ) -> None:
        client = await connect(api_key_file=key_file)
        statuses = [(await encode(client, B)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await encode(client, B)
        problem = check(refused, 429, "overloaded")
        assert problem["detail"] == "this key may send 0.01 requests/s"
        assert 90 < int(refused.headers["retry-after"]) <= 100
        assert (await encode(client, A)).status_code == 200
        assert (await client.get("/v1/info", headers=bearer(B))).status_code == 200  # only what costs is limited
        samples = samples_of((await client.get("/metrics", headers=bearer(A))).text)
        assert nonzero(samples, "moonvit_key_refusals_total") == {'{key="b",limit="requests_per_s"}': 2}

    async def test_requests_in_flight(self, connect: Connect, key_file: Path) -> None:
        entered, leave = threading.Event(), threading.Event()

        def run(batch: PackedBatch) -> torch.Tensor:
            entered.set()
            assert leave.wait(30)
            return fake_run(batch)

        client = await connect(run=run, api_key_file=key_file, key_max_requests=1)
        first = asyncio.create_task(encode(client, A, 1))
        assert await asyncio.to_thread(entered.wait, 30)
        refused = await encode(client, A, 2)
        problem = check(refused, 429, "overloaded")
        assert problem["detail"] == "1 requests of this key are in flight, limit 1"
        assert refused.headers["retry-after"] == "1"
        other = asyncio.create_task(encode(client, B, 3))
        leave.set()
        assert (await first).status_code == (await other).status_code == 200
        assert (await encode(client, A, 4)).status_code == 200

    async def test_without_keys_there_is_no_limit_per_key(self, connect: Connect) -> None:
        client = await connect()
        assert {(await encode(client, None, level)).status_code for level in range(20)} == {200}


class TestRequestId:
    @pytest.mark.parametrize("sent", ["a", "0af7651916cd43dd8448eb211c80319c", "req:7/b+c=d@e._-", "x" * 128])
    async def test_a_clients_own_is_kept(self, client: httpx.AsyncClient, sent: str) -> None:
        with capture_logs() as logs:
            response = await client.post("/v1/encode", content=png(1), headers=PNG | {"x-request-id": sent})
        assert response.headers["x-request-id"] == response.json()["id"] == sent
        assert [line["id"] for line in logs if line["event"] == "request"] == [sent]

    @pytest.mark.parametrize("sent", ["", "two words", "x" * 129, 'quote"', "new\tline", "é", "a,b", "<b>"])
    async def test_one_that_could_harm_a_log_is_replaced(self, client: httpx.AsyncClient, sent: str) -> None:
        response = await client.get("/health", headers={"x-request-id": sent.encode()})
        assert response.headers["x-request-id"].startswith("enc-")
        assert len(response.headers["x-request-id"]) == 36

    async def test_two_are_none(self, client: httpx.AsyncClient) -> None:
        response = await client.get("/health", headers=[("x-request-id", "a"), ("x-request-id", "b")])
        assert response.headers["x-request-id"].startswith("enc-")

    async def test_problems_have_it_too(self, connect: Connect, key_file: Path) -> None:
        client = await connect(api_key_file=key_file)
        for headers, status in (({}, 401), (bearer(A), 404)):
            response = await client.get("/nope", headers=headers | {"x-request-id": "mine"})
            assert (response.status_code, response.json()["instance"]) == (status, "mine")
            assert response.headers["x-request-id"] == "mine"

    async def test_every_line_on_the_way_has_it(self, connect: Connect) -> None:
        seen: list[object] = []

        def run(batch: PackedBatch) -> torch.Tensor:
            raise KeyError

        client = await connect(run=run)

        def look(logger: object, method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
            if threading.current_thread() is threading.main_thread():  # a batch belongs to several requests
                seen.append(structlog.contextvars.get_contextvars().get("id"))
            raise structlog.DropEvent

        before = structlog.get_config()["processors"]
        structlog.configure(processors=[look])
        try:
            await client.post("/v1/encode", content=png(1), headers=PNG | {"x-request-id": "mine"})
            await client.get("/nope", headers={"x-request-id": "other"})
        finally:
            structlog.configure(processors=before)
        assert seen == ["mine", "mine", "other"]  # the failed item's line, and one for each request
        assert structlog.contextvars.get_contextvars() == {}


@pytest.fixture
def served(key_file: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with running("--film-workers", "1", "--api-key-file", str(key_file)) as (process, url):
        yield process, url


def read_head(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(4096)
        if not piece:
            break
        head += piece
    return head


class TestSocket:
    def test_a_refusal_does_not_wait_for_the_body(self, served: tuple[Any, str]) -> None:
        host, port = served[1].removeprefix("http://").split(":")
        head = "POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n"
        for expect in ("", "Expect: 100-continue\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(f"{head}{expect}\r\n".encode())
                answer = read_head(connection)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"\r\nwww-authenticate: Bearer\r\n" in answer
            assert b"\r\nconnection: close\r\n" in answer

    def test_bytes_that_are_no_http_get_an_id_too(self, served: tuple[Any, str]) -> None:
        host, port = served[1].removeprefix("http://").split(":")
        for sent in (b"NOT HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(sent)
                answer = read_head(connection)
            assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert b"\r\nx-request-id: enc-" in answer

    def test_a_broken_chunk_is_answered_with_the_requests_own_id(self, served: tuple[Any, str]) -> None:
        host, port = served[1].removeprefix("http://").split(":")
        head = f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\nAuthorization: Bearer {A}\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"{head}Content-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            connection.sendall(b"3\r\nabc\r\n")
            with httpx.Client() as client:  # by the time of its answer the request above is being worked on
                assert client.get(f"{served[1]}/health").status_code == 200
            connection.sendall(b"no length\r\n")
            answer = read_head(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"\r\nx-request-id: mine\r\n" in answer

    def test_sighup_reads_the_keys_again_and_a_broken_file_keeps_the_old_ones(
        self, served: tuple[subprocess.Popen[bytes], str], key_file: Path
    ) -> None:
        process, url = served

        def status(key: str) -> int:
            return httpx.get(f"{url}/v1/models", headers=bearer(key)).status_code

        new = "key-of-new-0123456789"
        assert (status(A), status(new)) == (200, 401)
        key_file.write_text("a:short\n")
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert (status(A), status(new)) == (200, 401)
        host, port = url.removeprefix("http://").split(":")
        body = png(3)
        lines = ("POST /v1/encode HTTP/1.1", "Host: x", f"Authorization: Bearer {A}", "Content-Type: image/png")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body[:-1])
            assert status(A) == 200  # so the request above, which came first, has been let in
            key_file.write_text(f"new:{new}\n")
            process.send_signal(signal.SIGHUP)
            for _ in range(1000):
                if status(new) == 200:
                    break
            assert (status(A), status(new)) == (401, 200)
            connection.sendall(body[-1:])  # a request that was let in is finished
            assert read_head(connection).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0

    def test_the_encode_command_has_a_key_of_its_own(
        self,
        served: tuple[Any, str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("app.cli.configure_logging", lambda level, log_format: None)
        picture, own, output = tmp_path / "p.png", tmp_path / "key", tmp_path / "out.safetensors"
        picture.write_bytes(png(3))
        command = ["encode", str(picture), "-f", "-o", str(output)]
        with_url = ("--url", served[1], "--key-file", str(own))
        own.write_text(f"{A}\n")
        assert main([*command, *with_url]) == 0
        assert output.exists()
        for content, argv, message in (
            ("", ("--url", served[1]), "wants an API key: --key-file"),
            ("another-key-0123456789", with_url, "wants another API key: --key-file"),
            (f"a:{A}", with_url, "does not hold one API key"),
            (A, ("--key-file", str(own)), "--key-file goes with --url"),
            (A, ("--url", served[1], "--key-file", str(tmp_path / "none")), "cannot be read: No such file"),
        ):
            own.write_text(content)
            capsys.readouterr()
            assert main([*command, *argv]) == 2
            error = capsys.readouterr().err
            assert message in error
            assert A not in error

    def test_keys_that_cannot_be_used_end_the_command_with_2(self, key_file: Path) -> None:
        key_file.write_text(f"a:{A}\nb:tooshort\n")
        command = [sys.executable, "-m", "app.cli", "serve", "--port", str(free_port())]
        done = subprocess.run(
            [*command, "--api-key-file", str(key_file)],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(),
            check=False,
        )
        assert done.returncode == 2
        assert f"key file {key_file}: line 2: the key has 8 characters" in done.stderr
        assert "tooshort" not in done.stderr
        assert "Traceback" not in done.stderr
