"""A server that answers with the bytes a test gives it, right or wrong HTTP, and records what arrived."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
"""What to send: bytes, or a coroutine function that writes them in its own time."""


class RawServer:
    """heads: the request heads received; num_open, max_open: connections now and at most; names: TLS names asked."""

    def __init__(self, answers: Answer | Mapping[str, Answer]) -> None:
        self.answers = answers
        self.heads: list[bytes] = []
        self.names: list[str | None] = []
        self.num_open = 0
        self.max_open = 0
        self.port = 0

    @property
    def targets(self) -> list[str]:
        return [head.split(b" ")[1].decode() for head in self.heads]

    def headers(self, index: int = -1) -> dict[str, str]:
        """One request's header fields, names in lower case."""
        lines = self.heads[index].decode().strip().split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                answer = self.answers
                if isinstance(answer, Mapping):
                    answer = answer.get(self.targets[-1], response(404))
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                else:
                    answering = asyncio.ensure_future(answer(writer))
                    leaving = asyncio.ensure_future(reader.read())
                    await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                    for task in (answering, leaving):
                        task.cancel()
                    await asyncio.gather(answering, leaving, return_exceptions=True)
        finally:
            self.num_open -= 1
            writer.close()

    async def wait_until_all_left(self) -> None:
        """Return once no client is connected; TimeoutError after two seconds."""
        async with asyncio.timeout(2):
            while self.num_open:  # noqa: ASYNC110 - a test's poll
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serve(
    answers: Answer | Mapping[str, Answer], *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[RawServer]:
    """Serve one answer for every target, or one answer a target (404 for others), on a free port."""
    server = RawServer(answers)
    if tls is not None:
        tls.sni_callback = lambda _socket, name, _context: server.names.append(name)
    listener = await asyncio.start_server(server.handle, host, 0, ssl=tls, backlog=256)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
        await server.wait_until_all_left()
    finally:
        listener.close()


def response(status: int, body: bytes = b"", **headers: object) -> bytes:
    """A response with a right Content-Length; `headers` add to it or replace it (None drops one)."""
    fields: dict[str, object] = {"content-length": len(body)}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in fields.items() if value is not None)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return response(status, location=location)


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return response(200, content_length=None, transfer_encoding="chunked") + body
