"""Responses that are written piece by piece, and stopped when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.payload import Body

T = TypeVar("T")

WRITE_STALL_S = 30.0  # a client that takes nothing for so long holds an embedding and a request's place for nobody


class ClientGoneError(Exception):
    """The client closed the connection, or stopped reading, before its answer was complete."""


async def until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it if the client disconnects. The request body must have been read.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyResponse(Response):
    """A body of known length, made and sent piece by piece; the server waits for a client that reads slowly."""

    def __init__(self, body: Body, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(None, 200, headers | {"Content-Length": str(body.length)}, media_type)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_client_leaves(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await _send_pieces(self._body, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class LinesResponse(Response):
    """Lines as they become ready; the iterator is closed as soon as the client leaves."""

    def __init__(self, lines: AsyncGenerator[Body, None], media_type: str, headers: dict[str, str]) -> None:
        super().__init__(None, 200, headers, media_type)
        del self.headers["content-length"]
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await until_client_leaves(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._lines):
            async for line in self._lines:
                await _send_pieces(line, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_pieces(body: Body, send: Send) -> None:
    for piece in body.pieces():
        try:
            async with asyncio.timeout(WRITE_STALL_S):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError as error:
            raise ClientGoneError from error
        await asyncio.sleep(0)  # a server may take a piece without waiting; others are to have their turn all the same
