"""The outermost layer of every request: its id, admission, last exception handler, one log line, and its count."""

import asyncio
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.lifecycle import Lifecycle
from app.metrics import Metrics
from app.problems import describe, problem_type, retry_after
from app.responses import ClientGoneError
from app.schemas import PROBLEM, Problem

logger = structlog.get_logger("moonvit.request")

CLIENT_CLOSED_REQUEST = 499  # nginx's number for it; only ever logged
LINGER_S = 2.0
QUIET_PATHS = ("/health", "/health/live", "/health/ready", "/metrics")


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
    return problem_response(describe(error, request_id), retry_after(error))


class RequestBoundary:
    """ASGI middleware. What a route notes under `request.state.log` goes into the log line; its `code` is
    the outcome, `ok`, `partial` or a problem's code."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, metrics: Metrics) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        request_id = f"enc-{uuid.uuid4().hex}"
        log: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, start_s=start, log=log)
        status = 0
        deliver_s = 0.0
        body_read = scope["method"] in ("GET", "HEAD")

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
            nonlocal status, deliver_s
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request_id.encode())]
                if not body_read:
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
            self._log(scope, log.pop("status", status), seconds, request_id, log)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _encodes(scope):
            with self._lifecycle.admit() as admission:
                scope["state"]["admission"] = admission
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
