"""HTTP/1.1 on one connection: uvicorn's implementation on h11, with a limit on how long a connection may do nothing.

h11 rather than httptools: it bounds the bytes of a request's head (64 KiB), and reads the body of a request that offers
an upgrade to HTTP/2, as some clients do with every request; httptools drops that body. 200 MB take 0.32 s, not 0.24.

Connections are counted, see `crowd`: each costs memory, a descriptor, and its turn in the event loop.
"""

import asyncio
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.boundary import new_request_id
from app.crowd import Crowd

logger = structlog.get_logger("moonvit.request")

IDLE_S = 30.0  # without a complete request head, from the connection's start or the last answer
CHECK_S = 10.0
LEAVING_S = 1.0  # for a client to read why; closing at once would cut its answer off while it still sends
MAX_CONNECTIONS = 4096
HEAD_BYTES = 16 * 1024  # of an incomplete head, beside what one read brings; as h11 and uvicorn have it


class Connection(h11.Connection):
    """Hands pieces of a body of known length on as they are: h11 joins even one alone, and so copies every answer."""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        # h11's own overloads say the same in three cases
        parts = self.send_with_data_passthrough(event)
        if parts is None:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Protocol(H11Protocol):
    """Closes connections whose next request does not come, and cuts those that cannot be closed because their client
    does not read."""

    _waiting_since_s: float
    _check: asyncio.TimerHandle
    _crowd = Crowd(MAX_CONNECTIONS)
    _is_turned_away = False

    @classmethod
    def bounded(cls, max_connections: int) -> "type[Protocol]":
        """The same, for one server that has so many connections at most."""
        return type("Protocol", (cls,), {"_crowd": Crowd(max_connections)})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Connection(h11.SERVER, self.config.h11_max_incomplete_event_size or HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self._crowd.max_connections:
            self._turn_away(transport)
            return
        super().connection_made(transport)
        self._waiting_since_s = self.loop.time()
        self._check = self.loop.call_later(CHECK_S, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        if self._is_turned_away:
            self._crowd.left()
        else:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_turned_away:
            super().data_received(data)

    def eof_received(self) -> None:
        if not self._is_turned_away:
            super().eof_received()

    def _turn_away(self, transport: Any) -> None:
        """Answer before a byte is read, let the client finish what it sends, and close."""
        self._is_turned_away = True
        self.transport, self.flow = transport, FlowControl(transport)
        answer = self._crowd.turn_away(self.loop.time(), new_request_id())
        if answer is None:
            self._check = self.loop.call_later(0, transport.abort)
            return
        transport.write(answer)
        if transport.can_write_eof():
            transport.write_eof()
        self._check = self.loop.call_later(LEAVING_S, transport.abort)

    def on_response_complete(self) -> None:
        self._waiting_since_s = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP. In the middle of a request the answer has that request's id."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun; a second one in the middle of it would be read as its body
            return
        is_waiting = self.cycle is None or self.cycle.response_complete
        request_id = new_request_id() if is_waiting else self.scope["state"].get("id", new_request_id())
        logger.info("not HTTP", id=request_id, status=400)
        headers = [
            ("content-type", "text/plain; charset=utf-8"),
            ("connection", "close"),
            ("x-request-id", request_id),
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=msg.encode()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _check_progress(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
            return
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.loop.time() - self._waiting_since_s >= IDLE_S:
            self.transport.close()
        self._check = self.loop.call_later(CHECK_S, self._check_progress)
