"""What the service can do at the moment: starting, ready, draining or failed; and how much it works on."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from app.budget import ByteBudget, Hold
from app.errors import Draining, Overloaded, Starting
from encoder import DeviceFailed, EncoderError


class Lifecycle:
    """State of one process. Used from the event loop only.

    Args:
        max_requests: in flight at a time; beyond, `admit` raises `Overloaded`.
        max_body_bytes: of the bodies of all of them together; beyond, `Hold.take` does.
    """

    def __init__(self, max_requests: int, max_body_bytes: int) -> None:
        self._max_requests = max_requests
        self._bodies = ByteBudget(max_body_bytes, "request bodies")
        self._obstacle: EncoderError | None = Starting("weights are being read")
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def obstacle(self) -> EncoderError | None:
        """Why requests are refused, or None while they are taken."""
        return self._obstacle

    def ready(self) -> None:
        if isinstance(self._obstacle, Starting):
            self._obstacle = None

    def failed(self, reason: str) -> None:
        """The device is unusable; only a restart helps. One that is on its way is said to be."""
        if not isinstance(self._obstacle, Draining):
            self._obstacle = DeviceFailed(reason)

    def drain(self) -> None:
        """Take no new requests; those accepted go on."""
        self._obstacle = Draining("the service is shutting down")

    async def idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def body_bytes(self) -> int:
        """Bytes of the bodies of all requests in flight."""
        return self._bodies.held_bytes

    @contextmanager
    def admit(self) -> Iterator[Hold]:
        """Count a request in, or refuse it before a byte of its body is read.

        Yields: what its body takes of the bytes that all bodies may have; given back when the request ends.
        """
        if self._obstacle is not None:
            raise type(self._obstacle)(*self._obstacle.args)
        if self._in_flight >= self._max_requests:
            raise Overloaded(f"{self._in_flight} requests are in flight, limit {self._max_requests}")
        self._in_flight += 1
        self._idle.clear()
        try:
            with self._bodies.hold() as hold:
                yield hold
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
