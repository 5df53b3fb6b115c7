"""HTTP/1.1 on one connection: uvicorn's implementation on h11, with a limit on how long a connection may do nothing.

h11 rather than httptools: it bounds the bytes of a request's head (64 KiB), and reads the body of a request that offers
an upgrade to HTTP/2, as some clients do with every request; httptools drops that body. 200 MB take 0.32 s, not 0.24.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S = 30.0  # without a complete request head, from the connection's start or the last answer
CHECK_S = 10.0


class Protocol(H11Protocol):
    """Closes connections whose next request does not come, and cuts those that cannot be closed because their client
    does not read."""

    _waiting_since_s: float
    _check: asyncio.TimerHandle

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._waiting_since_s = self.loop.time()
        self._check = self.loop.call_later(CHECK_S, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._waiting_since_s = self.loop.time()
        super().on_response_complete()

    def _check_progress(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
            return
        is_waiting = self.cycle is None or self.cycle.response_complete
        if is_waiting and self.loop.time() - self._waiting_since_s >= IDLE_S:
            self.transport.close()
        self._check = self.loop.call_later(CHECK_S, self._check_progress)
