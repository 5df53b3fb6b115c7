"""The cheapest HTTP server there can be: answers every request with the same bytes. What loopback and clients can do.

    python -m benchmarks.plain_server --port 8001 --body-bytes 19624440 [--threads]

By default one event loop, as the service has, and nothing but `write`; with `--threads` a thread a connection and
`sendall`, which shows what the clients can take. Standard library (and uvloop, where it is installed).
"""

import argparse
import asyncio
import contextlib
import socket
import threading
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.safetensors\r\nContent-Length: %d\r\n\r\n"


class Requests:
    """Counts whole requests in a stream of bytes; their bodies have a Content-Length."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> int:
        """How many requests end in this piece. None is pipelined behind another."""
        if not self._left:
            self._head += data
            head, mark, body = self._head.partition(b"\r\n\r\n")
            if not mark:
                return 0
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            self._head = b""
            self._left = int(fields.get(b"content-length", 0)) - len(body)
        else:
            self._left -= len(data)
        return int(self._left <= 0)


class Answer(asyncio.Protocol):
    def __init__(self, head: bytes, body: memoryview) -> None:
        self._head, self._body = head, body
        self._requests = Requests()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._requests.feed(data):
            self._transport.write(self._head)
            self._transport.write(self._body)


async def serve_loop(port: int, body_bytes: int) -> None:
    body = memoryview(bytes(body_bytes))
    server = await asyncio.get_running_loop().create_server(
        lambda: Answer(HEAD % body_bytes, body), "127.0.0.1", port, backlog=256
    )
    await server.serve_forever()


def serve_threads(port: int, body_bytes: int) -> None:
    answer = HEAD % body_bytes + bytes(body_bytes)

    def serve(connection: socket.socket) -> None:
        requests = Requests()
        with contextlib.suppress(ConnectionError), connection:
            while data := connection.recv(1 << 20):
                if requests.feed(data):
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", port), backlog=256) as listener:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--body-bytes", type=int, required=True)
    parser.add_argument("--threads", action="store_true", help="a thread a connection instead of one event loop")
    options = parser.parse_args()
    if options.threads:
        serve_threads(options.port, options.body_bytes)
        return
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run
    run(serve_loop(options.port, options.body_bytes))


if __name__ == "__main__":
    main()
