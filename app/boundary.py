"""The outermost layer of every request: its id, admission, last exception handler, one log line, and its count."""

import asyncio
import re
import time
import uuid
from collections.abc import MutableMapping
from contextlib import nullcontext, suppress
from typing import Any

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth import Keys
from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.problems import describe, problem_headers, problem_type
from app.responses import ClientGoneError
from app.schemas import PROBLEM, Problem
from app.tracing import RequestSpan, Tracing, stage_done

logger = structlog.get_logger("moonvit.request")

CLIENT_CLOSED_REQUEST = 499  # nginx's number for it; only ever logged
LINGER_S = 2.0
QUIET_PATHS = ("/health", "/health/live", "/health/ready", "/metrics")
# What a client's own id may be; it is written into logs and headers as it came.
_CLIENTS_ID = re.compile(rb"[A-Za-z0-9._:+/=@-]{1,128}")


class ProblemResponse(Response):
    """Notes its code for the request's log line and count."""

    def __init__(self, content: bytes, code: str, status: int, headers: dict[str, str] | None) -> None:
        super().__init__(content, status, headers, PROBLEM)
        self._code = code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["log"]["code"] = self._code
        await super().__call__(scope, receive, send)


def problem_response(problem: Problem, headers: dict[str, str] | None = None, **extension: object) -> Response:
    """`extension` members stand beside the standard ones, as RFC 9457 allows."""
    document = problem.model_dump(mode="json", exclude_none=True) | extension
    return ProblemResponse(orjson.dumps(document), problem.code, problem.status, headers)


def error_response(error: Exception, request_id: str) -> Response:
    return problem_response(describe(error, request_id), problem_headers(error))


def request_id_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The client's `X-Request-Id` where it sent one that can be used, else a new one."""
    sent = [value for name, value in headers if name == b"x-request-id"]
    if len(sent) == 1 and _CLIENTS_ID.fullmatch(sent[0]):
        return sent[0].decode()
    return new_request_id()


def new_request_id() -> str:
    return f"enc-{uuid.uuid4().hex}"


class RequestBoundary:
    """ASGI middleware. What a route notes under `request.state.log` goes into the log line; its `code` is
    the outcome, `ok`, `partial` or a problem's code.

    Args:
        keys: whose requests are taken; anybody's, if None.
        tracing: makes spans of requests; none, if None.
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        metrics: Metrics,
        keys: Keys | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._keys = keys
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope["headers"])
        traced = self._tracing is not None and scope["path"] not in QUIET_PATHS  # probes would be most of the spans
        # Every line that is logged on the way gets the id, from whichever library it is.
        with (
            structlog.contextvars.bound_contextvars(id=request_id),
            self._tracing.request(scope, request_id) if self._tracing and traced else nullcontext() as span,
        ):
            await self._handle(scope, receive, send, request_id, span)

    async def _handle(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, span: RequestSpan | None
    ) -> None:
        start = time.monotonic()
        log: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, start_s=start, log=log)
        status = 0
        deliver_s = first_sent_s = 0.0
        body_read = scope["method"] in ("GET", "HEAD")
        # RFC 9112, 6.1: a proxy may have taken the other one for the body's length, and the rest for another request.
        names = {name for name, _ in scope["headers"]}
        has_two_lengths = {b"content-length", b"transfer-encoding"} <= names

        async def counted() -> Message:
            nonlocal body_read
            message = await receive()
            body_read = body_read or not message.get("more_body", False)  # a disconnect has no more either
            return message

        async def discard_body() -> None:
            """Let a client that is still sending finish, within reason: one whose connection is cut before it listens
            never sees why it was refused."""
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while not body_read:
                        await counted()

        async def record(message: Message) -> None:
            nonlocal status, deliver_s, first_sent_s
            if message["type"] == "http.response.start":
                status = message["status"]
                first_sent_s = time.monotonic()
                own = [(b"x-request-id", request_id.encode())]
                if span is not None:
                    own.append((b"traceparent", span.traceparent.encode()))
                if not body_read or has_two_lengths:
                    own.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *own]
            elif not body_read and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await discard_body()
                message = {"type": "http.response.body", "body": b""}
            sending = time.monotonic()
            await send(message)
            deliver_s += time.monotonic() - sending

        try:
            await self._admitted(scope, counted, record)
        except (ClientGoneError, ClientDisconnect):
            log.update(status=CLIENT_CLOSED_REQUEST, code="client_left")
        except asyncio.CancelledError:
            log["code"] = "aborted"
            raise
        except Exception as error:
            if problem_type(error).status == 500:
                logger.exception("request failed", id=request_id)
            if status == 0:
                await error_response(error, request_id)(scope, receive, record)
            else:
                log.update(broken_off=True, code=problem_type(error).code)
        finally:
            seconds = time.monotonic() - start
            if _encodes(scope):
                self._count(log.get("code", "aborted"), seconds, deliver_s)
            status = log.pop("status", status)
            if span is not None:
                if first_sent_s and _encodes(scope):
                    stage_done("deliver", first_sent_s, time.monotonic())
                span.answered(scope, status, log)
            self._log(scope, status, seconds, request_id, log)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = None
        if self._keys is not None:
            caller = self._keys.identify(scope["path"], scope["headers"])
        if caller is not None:
            scope["state"]["log"]["key"] = caller.name
        if _encodes(scope):
            with caller.admit() if caller else nullcontext(), self._lifecycle.admit() as hold:
                scope["state"]["body_hold"] = hold
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _count(self, code: str, seconds: float, deliver_s: float) -> None:
        self._metrics.requests.labels(code).inc()
        if code in ("ok", "partial"):
            self._metrics.request_seconds.observe(seconds)
            self._metrics.stage_seconds.labels("deliver").observe(deliver_s)

    def _log(
        self, scope: Scope, status: int, seconds: float, request_id: str, fields: MutableMapping[str, Any]
    ) -> None:
        emit = logger.debug if scope["path"] in QUIET_PATHS and status == 200 else logger.info
        # Never the query: it can hold what a client keeps to itself.
        emit(
            "request",
            id=request_id,
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round(seconds * 1000, 3),
            **fields,
        )


def _encodes(scope: Scope) -> bool:
    return bool(scope["method"] == "POST" and scope["path"] == "/v1/encode")
