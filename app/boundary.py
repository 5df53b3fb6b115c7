"""The outermost layer of every request: its id, admission, the last exception handler, and its one log line."""

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
from app.problems import describe, problem_type, retry_after
from app.responses import ClientGoneError
from app.schemas import PROBLEM, Problem

logger = structlog.get_logger("moonvit.request")

CLIENT_CLOSED_REQUEST = 499  # nginx's number for it; only ever logged
LINGER_S = 2.0
QUIET_PATHS = ("/health", "/health/live", "/health/ready")


def problem_response(problem: Problem, headers: dict[str, str] | None = None, **extension: object) -> Response:
    """`extension` members stand beside the standard ones, as RFC 9457 allows."""
    document = problem.model_dump(mode="json", exclude_none=True) | extension
    return Response(orjson.dumps(document), problem.status, headers, media_type=PROBLEM)


def error_response(error: Exception, request_id: str) -> Response:
    return problem_response(describe(error, request_id), retry_after(error))


class RequestBoundary:
    """ASGI middleware. What a route notes under `request.state.log` goes into the log line."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.monotonic()
        request_id = f"enc-{uuid.uuid4().hex}"
        log: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, start_s=start, log=log)
        status = 0
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
            nonlocal status
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
            await send(message)

        try:
            await self._admitted(scope, counted, record)
        except (ClientGoneError, ClientDisconnect):
            log["status"] = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if problem_type(error).status == 500:
                logger.exception("request failed", id=request_id)
            if status == 0:
                await error_response(error, request_id)(scope, receive, record)
            else:
                log["broken_off"] = True
        finally:
            self._log(scope, log.pop("status", status), time.monotonic() - start, request_id, log)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] == "/v1/encode":
            with self._lifecycle.admit():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

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
