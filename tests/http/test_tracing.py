"""Spans: which there are, how they hang together, what is in them, and that nothing leaves where it should not."""

import asyncio
import contextlib
import gzip
import itertools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs

from app import tracing
from app.settings import InvalidSettings
from app.tracing import Tracing, open_tracing
from encoder import PackedBatch
from tests.http.conftest import Connect, fake_run, png
from tests.http.test_encode import encode, image
from tests.http.test_problems import check
from tests.http.test_socket import running
from tests.raw_server import response, serve

PNG = {"content-type": "image/png"}
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Spans(InMemorySpanExporter):
    """Keeps what has ended, and tells when there is more."""

    def __init__(self) -> None:
        super().__init__()
        self._more = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._more:
            result = super().export(spans)
            self._more.notify_all()
        return result

    async def until(self, enough: Callable[[], object]) -> None:
        """Wait for spans that are made by other threads, after the rows were handed out."""

        def wait() -> bool:
            with self._more:
                return self._more.wait_for(enough, 10)  # type: ignore[arg-type]

        assert await asyncio.to_thread(wait)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The spans of every application that is built in this test."""
    exporter = Spans()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("app.main.open_tracing", lambda endpoint: Tracing(provider))
    return exporter


def by_name(spans: Spans) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == parent.context.span_id


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


async def batch_span(spans: Spans) -> list[ReadableSpan]:
    await spans.until(lambda: "batch" in by_name(spans))
    return by_name(spans)["batch"]


class TestRequest:
    async def test_one_span_a_request_and_one_a_stage_of_each_item(self, connect: Connect, spans: Spans) -> None:
        client = await connect()
        answer = await encode(client, image(png(1)), image(png(2)))
        assert answer.status_code == 200
        await batch_span(spans)
        found = by_name(spans)
        (server,) = found["POST /v1/encode"]
        assert server.kind == SpanKind.SERVER
        assert server.parent is None
        assert attributes(server) == {
            "http.request.method": "POST",
            "http.route": "/v1/encode",
            "http.response.status_code": 200,
            "url.path": "/v1/encode",
            "url.scheme": "http",
            "moonvit.request_id": answer.headers["x-request-id"],
            "moonvit.code": "ok",
            "moonvit.items": 2,
            "moonvit.failed": 0,
        }
        for name in ("decode", "queue", "encode"):
            assert [is_child(span, server) for span in found[name]] == [True, True]
            assert sorted(attributes(span)["moonvit.item"] for span in found[name]) == [0, 1]
        (deliver,) = found["deliver"]
        assert is_child(deliver, server)
        assert set(found) == {"POST /v1/encode", "decode", "queue", "encode", "deliver", "batch"}

    async def test_stages_lie_in_order_within_their_request(self, connect: Connect, spans: Spans) -> None:
        def slow(batch: PackedBatch) -> torch.Tensor:
            time.sleep(0.05)
            return fake_run(batch)

        client = await connect(run=slow)
        await encode(client, image(png(1)))
        await batch_span(spans)
        (server, decode, queue, encoded, deliver) = (
            by_name(spans)[name][0] for name in ("POST /v1/encode", "decode", "queue", "encode", "deliver")
        )
        slack_ns = 5_000_000  # stages that are told afterwards are placed by their length
        stages = (time_ns for span in (decode, queue, encoded) for time_ns in (span.start_time, span.end_time))
        chain = [server.start_time, *stages]
        assert all(a <= b + slack_ns for a, b in itertools.pairwise(chain))  # type: ignore[operator]
        assert duration_s(encoded) >= 0.05
        assert duration_s(deliver) < duration_s(server)

    async def test_a_trace_that_comes_with_a_request_is_continued_and_answered(
        self, connect: Connect, spans: Spans
    ) -> None:
        client = await connect()
        answer = await client.post("/v1/encode", content=png(1), headers=PNG | {"traceparent": TRACEPARENT})
        (server,) = by_name(spans)["POST /v1/encode"]
        assert server.parent is not None
        assert f"{server.parent.span_id:016x}" == PARENT_ID
        assert answer.headers["traceparent"] == f"00-{TRACE_ID}-{server.context.span_id:016x}-01"
        assert {span.context.trace_id for span in spans.get_finished_spans()} == {int(TRACE_ID, 16)}

    @pytest.mark.parametrize(
        "sent", ["", "nonsense", TRACEPARENT[:-3], f"ff{TRACEPARENT[2:]}", "00-" + "0" * 32 + "-1"]
    )
    async def test_one_that_is_none_begins_a_new_one(self, connect: Connect, spans: Spans, sent: str) -> None:
        client = await connect()
        answer = await client.get("/v1/models", headers={"traceparent": sent})
        assert answer.status_code == 200
        (server,) = by_name(spans)["GET /v1/models"]
        assert server.parent is None
        assert TRACE_ID not in answer.headers["traceparent"]

    async def test_a_problem_is_a_span_too(self, connect: Connect, spans: Spans) -> None:
        client = await connect()
        refused = await client.get("/nope?secret=1")
        check(refused, 404, "not_found")
        assert "traceparent" in refused.headers
        (server,) = by_name(spans)["GET"]  # the name of a route that is not there would be a client's to choose
        assert attributes(server)["http.response.status_code"] == 404
        assert server.status.status_code == StatusCode.UNSET
        assert "secret" not in server.to_json()

    async def test_a_fault_of_ours_is_an_error_without_its_text(self, connect: Connect, spans: Spans) -> None:
        def bug(batch: PackedBatch) -> torch.Tensor:
            raise KeyError("secret")

        client = await connect(run=bug)
        check(await encode(client, image(png(1))), 500, "internal", 0)
        (batch,) = await batch_span(spans)
        (server,) = by_name(spans)["POST /v1/encode"]
        assert server.status.status_code == batch.status.status_code == StatusCode.ERROR
        assert attributes(batch)["error.type"] == "KeyError"
        assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())

    @pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
    async def test_probes_have_none(self, connect: Connect, spans: Spans, path: str) -> None:
        client = await connect()
        answer = await client.get(path, headers={"traceparent": TRACEPARENT})
        assert "traceparent" not in answer.headers
        assert spans.get_finished_spans() == ()


class TestFetch:
    async def test_media_hosts_are_sent_no_trace_and_their_urls_are_in_no_span(
        self, connect: Connect, spans: Spans
    ) -> None:
        client = await connect(allow_private_media=True)
        async with serve(response(200, png(1))) as server:
            url = f"http://127.0.0.1:{server.port}/p.png?token=secret"
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
            answer = await client.post("/v1/encode", json={"input": [url]}, headers=headers)
            assert answer.status_code == 200
        sent = b"".join(server.heads).lower()
        assert b"get /p.png?token=secret" in sent
        for header in (b"traceparent", TRACE_ID.encode(), b"x-request-id", b"mine"):
            assert header not in sent
        (fetch,) = by_name(spans)["fetch"]
        assert attributes(fetch) == {"moonvit.item": 0}
        for text in ("secret", "p.png", "127.0.0.1"):
            assert text not in "".join(span.to_json() for span in spans.get_finished_spans())

    async def test_one_that_fails_is_marked(self, connect: Connect, spans: Spans) -> None:
        client = await connect(allow_private_media=True)
        async with serve(response(404)) as server:
            answer = await encode(client, f"http://127.0.0.1:{server.port}/p.png?token=secret")
        check(answer, 424, "fetch_failed", 0)
        (fetch,) = by_name(spans)["fetch"]
        assert fetch.status.status_code == StatusCode.ERROR
        assert fetch.status.description is None
        assert attributes(fetch) == {"moonvit.item": 0, "error.type": "FetchFailed"}
        assert fetch.events == ()


class TestBatch:
    async def test_is_linked_to_the_requests_in_it(self, connect: Connect, spans: Spans) -> None:
        entered, leave = threading.Event(), threading.Event()

        def run(batch: PackedBatch) -> torch.Tensor:
            entered.set()
            assert leave.wait(30)
            return fake_run(batch)

        client = await connect(run=run)
        first = asyncio.create_task(encode(client, image(png(1))))
        assert await asyncio.to_thread(entered.wait, 30)
        others = [asyncio.create_task(encode(client, image(png(2)), image(png(3)))) for _ in range(1)]
        others.append(asyncio.create_task(encode(client, image(png(4)))))
        service = client.app.state.service  # type: ignore[attr-defined]
        for _ in range(5000):
            if service.queued_patches == 3 * 4:
                break
            await asyncio.sleep(0.001)
        leave.set()
        answers = await asyncio.gather(first, *others)
        assert {answer.status_code for answer in answers} == {200}
        await spans.until(
            lambda: sum(attributes(span)["moonvit.segments"] for span in by_name(spans).get("batch", [])) == 4
        )
        servers = {span.context.span_id: span for span in by_name(spans)["POST /v1/encode"]}
        linked: dict[int, int] = {}
        for batch in by_name(spans)["batch"]:
            own = {link.context.span_id for link in batch.links}
            assert own <= servers.keys()
            assert batch.parent is not None
            assert batch.parent.span_id in own
            assert attributes(batch)["moonvit.requests"] == len(own)
            assert attributes(batch)["moonvit.patches"] == 4 * attributes(batch)["moonvit.segments"]
            for span_id in own:
                linked[span_id] = linked.get(span_id, 0) + 1
        assert linked.keys() == servers.keys()
        assert len(by_name(spans)["batch"]) < 4  # so that at least one had two requests

    def test_hangs_below_a_member_that_is_sampled(self) -> None:
        exporter = Spans()
        off = TracerProvider(shutdown_on_exit=False, sampler=ParentBased(ALWAYS_OFF))
        off.add_span_processor(SimpleSpanProcessor(exporter))
        members = []
        for headers in ([], [(b"traceparent", TRACEPARENT.encode())]):
            with Tracing(off).request({"method": "GET", "path": "/", "headers": headers}, "id"):
                members.append(tracing.here())
        tracing.batch_done([None, *members], 1.0, 2.5, None, patches=8)
        batch = by_name(exporter)["batch"][0]
        assert batch.context.trace_id == int(TRACE_ID, 16)
        assert len(batch.links) == 2
        assert duration_s(batch) == pytest.approx(1.5)

    def test_that_cannot_be_told_disturbs_no_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise OSError("no room")

        monkeypatch.setattr(tracing, "_batch", fail)
        with Tracing(TracerProvider(shutdown_on_exit=False)).request(
            {"method": "GET", "path": "/", "headers": []}, "id"
        ):
            member = tracing.here()
        with capture_logs() as logs:
            tracing.batch_done([member], 0.0, 1.0, None)
        assert [line["event"] for line in logs] == ["a batch has no span"]


class TestOff:
    async def test_a_trace_that_comes_is_not_looked_at(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/encode", content=png(1), headers=PNG | {"traceparent": TRACEPARENT})
        assert answer.status_code == 200
        assert "traceparent" not in answer.headers

    def test_costs_a_look_at_a_variable(self) -> None:
        assert tracing.stage("fetch") is tracing.stage("decode")  # one object that does nothing, for all
        tracing.enter_item(3)
        assert tracing.here() is None
        tracing.stage_done("queue", 0.0, 1.0)
        tracing.batch_done([None, None], 0.0, 1.0, None)

    @pytest.mark.parametrize("endpoint", [None, ""])
    def test_without_an_endpoint(self, endpoint: str | None) -> None:
        assert open_tracing(endpoint) is None

    @pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", "/tmp/x"])
    def test_an_endpoint_that_is_none(self, endpoint: str) -> None:
        with pytest.raises(InvalidSettings, match="is no http or https address"):
            open_tracing(endpoint)

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
        with pytest.raises(InvalidSettings, match=r"pip install 'moonvit-serve\[otel\]'"):
            open_tracing("http://127.0.0.1:4318")


# ---- a real process that sends to a collector


class Collector(HTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_the_command_sends_what_is_left_before_it_exits(collector: Collector) -> None:
    with running("--film-workers", "1", "--otlp-endpoint", collector.url) as (process, url):
        answer = httpx.post(f"{url}/v1/encode", content=png(1), headers=PNG | {"traceparent": TRACEPARENT})
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert set(collector.paths) == {"/v1/traces"}
    resources = [resource for request in collector.requests for resource in request.resource_spans]
    named = {pair.key: pair.value.string_value for pair in resources[0].resource.attributes}
    assert named["service.name"] == "moonvit-serve"
    assert named["service.version"] == "0.1.0"
    sent = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert {"POST /v1/encode", "decode", "queue", "encode", "deliver", "batch"} == {span.name for span in sent}
    assert {span.trace_id.hex() for span in sent} == {TRACE_ID}


def test_a_collector_that_is_down_disturbs_nobody() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with running("--film-workers", "1", "--otlp-endpoint", endpoint) as (process, url):
            for level in range(3):
                assert httpx.post(f"{url}/v1/encode", content=png(level), headers=PNG).status_code == 200
            process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
            assert process.wait(timeout=60) == 0
            assert time.monotonic() - start < 20
