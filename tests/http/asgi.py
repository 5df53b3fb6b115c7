"""The application spoken to without a client library, for what one would not do: leave early, not read, break off."""

import asyncio
from typing import Any

Headers = list[tuple[bytes, bytes]]


def http_scope(headers: Headers) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/encode",
        "raw_path": b"/v1/encode",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("service", 80),
        "client": ("client", 1),
        "root_path": "",
        "state": {},
    }


async def post(app: Any, body: bytes, send: Any, headers: Headers) -> None:
    """Send a whole body and stay; what comes back goes to `send`."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    await app(http_scope(headers), receive, send)


async def post_and_leave(app: Any, body: bytes) -> None:
    """Speak ASGI: send a body, then report a disconnect when cancelled."""
    gone = asyncio.Event()
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent to a client that left")

    scope = http_scope([(b"content-type", b"image/png")])
    task = asyncio.create_task(app(scope, receive, send))
    try:
        await asyncio.shield(task)
    finally:
        gone.set()
        await task
