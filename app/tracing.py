"""Spans of OpenTelemetry: one per request, stage of an item, and batch. Off unless `--otlp-endpoint` is set.

Nothing is handed through the code in between: the request's span lies in a context variable, which every task that is
started for the request inherits. Off, each of the functions below is one look at that variable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import structlog

from app.settings import InvalidSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

logger = structlog.get_logger("moonvit.tracing")

MAX_PATH_CHARS = 200
EXPORT_TIMEOUT_S = 5


@dataclass(frozen=True)
class Here:
    """Where new spans belong: below a request's span, perhaps to one of its items."""

    tracer: Tracer
    span: Span
    item: int | None = None


_here: ContextVar[Here | None] = ContextVar("moonvit_trace", default=None)
_OFF: AbstractContextManager[None] = nullcontext()


def here() -> Here | None:
    """What a thread without the request's context, such as the batcher's, needs for its spans."""
    return _here.get()


def enter_item(index: int) -> None:
    """Spans that this task opens from now on belong to that item of the request."""
    current = _here.get()
    if current is not None:
        _here.set(replace(current, item=index))


def stage(name: str) -> AbstractContextManager[None]:
    """A span around one stage of the current item."""
    current = _here.get()
    return _OFF if current is None else _stage(current, name)


def stage_done(name: str, start_s: float, end_s: float) -> None:
    """A span of a stage that has already been; both times are of the monotonic clock."""
    current = _here.get()
    if current is not None:
        offset_ns = _offset_ns()
        span = _child(current, name, int(start_s * 1e9) + offset_ns)
        span.end(int(end_s * 1e9) + offset_ns)


def batch_done(
    members: Iterable[Here | None], start_s: float, end_s: float, error: Exception | None, **attributes: int
) -> None:
    """A span of a batch that has been: in the trace of its first member, with links to the requests of all of them."""
    traced = [member for member in members if member is not None]
    if traced:
        try:
            _batch(traced, start_s, end_s, error, dict(attributes))
        except Exception:  # whatever a span processor does, the thread that hands out rows goes on
            logger.exception("a batch has no span")


@contextmanager
def _stage(current: Here, name: str) -> Iterator[None]:
    with _ended(_child(current, name)):
        yield


def _child(current: Here, name: str, start_ns: int | None = None) -> Span:
    from opentelemetry.trace import set_span_in_context

    own = {} if current.item is None else {"moonvit.item": current.item}
    context = set_span_in_context(current.span)
    return current.tracer.start_span(name, context, attributes=own, start_time=start_ns)


def _batch(
    members: list[Here], start_s: float, end_s: float, error: Exception | None, attributes: dict[str, int]
) -> None:
    from opentelemetry.trace import Link, set_span_in_context

    contexts = {member.span.get_span_context().span_id: member.span.get_span_context() for member in members}
    # The first that is sampled: below another one the batch would not be recorded.
    parent = next((member for member in members if member.span.get_span_context().trace_flags.sampled), members[0])
    offset_ns = _offset_ns()
    span = parent.tracer.start_span(
        "batch",
        set_span_in_context(parent.span),
        attributes={f"moonvit.{name}": value for name, value in attributes.items()}
        | {"moonvit.requests": len(contexts)},
        links=[Link(context) for context in contexts.values()],
        start_time=int(start_s * 1e9) + offset_ns,
    )
    if error is not None:
        _note(span, error)
    span.end(int(end_s * 1e9) + offset_ns)


def _offset_ns() -> int:
    """From the monotonic clock to the one that spans have."""
    return time.time_ns() - time.monotonic_ns()


@contextmanager
def _ended(span: Span) -> Iterator[None]:
    """End the span with its block."""
    try:
        yield
    except BaseException as error:
        _note(span, error)
        raise
    finally:
        span.end()


def _note(span: Span, error: BaseException) -> None:
    """Only the type: an exception's text may hold what a client sent. What was cancelled is no error."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", type(error).__name__)
    if isinstance(error, Exception):
        span.set_status(StatusCode.ERROR)


class Tracing:
    """Makes the requests' spans; built once, where the endpoint is known."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("moonvit-serve", version("moonvit-serve"))
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: MutableMapping[str, Any], request_id: str) -> Iterator[RequestSpan]:
        """The span of one HTTP request; continues the trace of a `traceparent` header that came with it."""
        from opentelemetry.trace import SpanKind

        carried = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        span = self._tracer.start_span(
            scope["method"],
            self._propagator.extract(carried),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"][:MAX_PATH_CHARS],  # never the query
                "url.scheme": scope.get("scheme", "http"),
                "moonvit.request_id": request_id,
            },
        )
        token = _here.set(Here(self._tracer, span))
        try:
            with _ended(span):
                yield RequestSpan(span)
        finally:
            _here.reset(token)

    def close(self) -> None:
        """Send what is left, within a few seconds."""
        self._provider.shutdown()


class RequestSpan:
    """One request's span while the request is worked on."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """The span's own name for others, as of W3C Trace Context."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def answered(self, scope: MutableMapping[str, Any], status: int, log: MutableMapping[str, Any]) -> None:
        """Note how the request ended."""
        from opentelemetry.trace import StatusCode

        route = getattr(scope.get("route"), "path", None)
        if route:
            self._span.update_name(f"{scope['method']} {route}")
            self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        for name in ("code", "key", "items", "failed"):
            if name in log:
                self._span.set_attribute(f"moonvit.{name}", log[name])
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)


def open_tracing(endpoint: str | None) -> Tracing | None:
    """Spans sent to an OTLP/HTTP collector in the background; None without an endpoint.

    Args:
        endpoint: its base address; `/v1/traces` is added, as OpenTelemetry's own variable has it.
    Raises:
        InvalidSettings: no http or https address, or the library for it is not installed.
    """
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidSettings("--otlp-endpoint is no http or https address, e.g. http://127.0.0.1:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidSettings("--otlp-endpoint needs the extra `otel`: pip install 'moonvit-serve[otel]'") from error
    url = endpoint.rstrip("/")
    url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
    ours = Resource({"service.name": "moonvit-serve", "service.version": version("moonvit-serve")})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)))
    return Tracing(provider)
