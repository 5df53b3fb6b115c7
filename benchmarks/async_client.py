"""An HTTP/1.1 client for load tests, on asyncio and plain sockets: whole answers, compared with what is known right."""

import asyncio
import json
import math
import socket
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECEIVE_BYTES = 1 << 18
MAX_HEAD_BYTES = 1 << 16
HONEST = {429, 503, 504}  # "not now": nothing is wrong with the request
DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2")}  # safetensors' name -> how numpy reads it


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytearray

    @property
    def is_honest_refusal(self) -> bool:
        """A problem document that says to come back, and when; a deadline that passed is the caller's own."""
        return (
            self.status in HONEST
            and self.headers.get("content-type", "").startswith("application/problem+json")
            and (self.status == 504 or self.headers.get("retry-after", "").isdecimal())
        )


class Connections:
    """Keep-alive connections to one server; as many as there are requests at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[socket.socket] = []

    async def ask(self, request: bytes) -> Answer:
        """One whole exchange.

        Raises:
            OSError: the connection broke before the answer was complete.
        """
        loop = asyncio.get_running_loop()
        connection = self._kept() or await self.connect()
        try:
            refused = None
            try:
                await loop.sock_sendall(connection, request)
            except ConnectionError as error:  # answered and closed before all was sent: the answer may be there
                refused = error
            answer = await _read(connection)
            if answer is None:
                raise refused or ConnectionError("the server closed the connection without an answer")
        except BaseException:
            connection.close()
            raise
        if refused or answer.headers.get("connection", "").lower() == "close":
            connection.close()
        else:
            self._idle.append(connection)
        return answer

    async def connect(self) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        except BaseException:
            connection.close()
            raise
        return connection

    def _kept(self) -> socket.socket | None:
        """A connection that the server has not closed since its last answer."""
        while self._idle:
            connection = self._idle.pop()
            try:
                connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return connection
            except OSError:
                pass
            connection.close()  # its end has come, or bytes that nobody asked for
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


async def _read(connection: socket.socket) -> Answer | None:
    """None if nothing came at all."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = await loop.sock_recv(connection, RECEIVE_BYTES)
        if not piece:
            if data:
                raise ConnectionError("the answer ended in its head")
            return None
        data += piece
        if len(data) > MAX_HEAD_BYTES + RECEIVE_BYTES:
            raise ConnectionError("the answer's head does not end")
    first, *lines = data[:end].decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = bytearray(int(headers["content-length"]))
    have = len(data) - end - 4
    body[:have] = data[end + 4 :]
    view = memoryview(body)
    while have < len(body):
        received = await loop.sock_recv_into(connection, view[have:])
        if not received:
            raise ConnectionError("the answer ended in its body")
        have += received
    return Answer(int(first.split()[1]), headers, body)


def embeddings(file: bytes | bytearray) -> NDArray[np.generic]:
    """(tokens, width) of a safetensors answer; bfloat16 as its 16 bits.

    Raises:
        ValueError: no such file.
    """
    length = int.from_bytes(file[:8], "little")
    entry = json.loads(bytes(file[8 : 8 + length]))["embeddings"]
    start, stop = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(
        file, DTYPES[entry["dtype"]], (stop - start) // DTYPES[entry["dtype"]].itemsize, start
    ).reshape(entry["shape"])


def as_float(values: NDArray[np.generic]) -> NDArray[np.float32]:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def difference(got: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """Relative L2 error; 0 for the same bytes, infinite for another shape, type or what is not a number."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if np.array_equal(got.view(np.uint8), expected.view(np.uint8)):
        return 0.0
    want = as_float(expected)
    error = float(np.linalg.norm(as_float(got) - want) / np.linalg.norm(want))
    return float("inf") if math.isnan(error) else error
