"""Closed-loop clients on plain sockets: each sends a picture, reads the whole answer, sends the next.

    python -m benchmarks.clients --port 8000 --pictures DIR --connections 16 --first 0 --step 64 --start T --stop T

Meant to cost next to nothing beside what it measures: requests are laid out before, answers go into one small buffer
over and over. One process of these is one line of JSON. Standard library only. Times are CLOCK_MONOTONIC, which all
processes of a machine share.
"""

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

BUFFER_BYTES = 1 << 20
TIMEOUT_S = 120.0
RETRY_S = 0.05  # a refusal costs nothing: do not spin on them
BOUNDARY = "----------------moonvit"


@dataclass
class Tally:
    """Of one connection. `finished` has (time it ended, seconds it took, seconds to its first byte) of each answer."""

    finished: list[tuple[float, float, float]] = field(default_factory=list)
    answer_bytes: int = 0  # body of the last good answer
    failures: Counter[str] = field(default_factory=Counter)


def request_bytes(picture: bytes, port: int, form: bool = False) -> bytes:
    """One whole request for a safetensors answer."""
    if form:
        head = (
            f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=a; filename=a.jpg\r\n"
            "Content-Type: image/jpeg\r\n\r\n"
        )
        body = head.encode() + picture + f"\r\n--{BOUNDARY}--\r\n".encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}"
    else:
        body, kind = picture, "image/jpeg"
    lines = (
        "POST /v1/encode HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Content-Type: {kind}",
        "Accept: application/vnd.safetensors",
        f"Content-Length: {len(body)}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class Connection:
    """One keep-alive connection and its buffer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def ask(self, request: bytes) -> tuple[int, int, float]:
        """(status, bytes of the body, time of the first byte). The body is read and thrown away.

        Raises:
            OSError: the connection broke.
        """
        self._socket.sendall(request)
        have = self._receive(self._buffer)
        first_byte_s = time.monotonic()
        while (end := bytes(self._buffer[:have]).find(b"\r\n\r\n")) < 0:
            have += self._receive(self._buffer[have:])
        head = bytes(self._buffer[:end]).decode("latin-1").lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in head if line.startswith("content-length:"))
        left = length - (have - end - 4)
        while left:
            left -= self._receive(self._buffer[: min(left, BUFFER_BYTES)])
        return int(head[0].split()[1]), length, first_byte_s

    def close(self) -> None:
        self._socket.close()

    def _receive(self, room: memoryview) -> int:
        received = self._socket.recv_into(room)
        if not received:
            raise ConnectionError("the server closed the connection")
        return received


def drive(port: int, requests: list[bytes], start: float, stop: float, tally: Tally) -> None:
    """Send the requests round and round from `start` to `stop`."""
    time.sleep(max(0.0, start - time.monotonic()))
    connection: Connection | None = None
    turn = 0
    while (begun := time.monotonic()) < stop:
        try:
            connection = connection or Connection(port)
            status, length, first_byte_s = connection.ask(requests[turn % len(requests)])
        except OSError as error:
            tally.failures[type(error).__name__] += 1
            if connection is not None:
                connection.close()
            connection = None
            time.sleep(RETRY_S)
            continue
        turn += 1
        ended = time.monotonic()
        if status == 200:
            tally.finished.append((ended, ended - begun, first_byte_s - begun))
            tally.answer_bytes = length
        else:
            tally.failures[str(status)] += 1
            time.sleep(RETRY_S)
    if connection is not None:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pictures", type=Path, required=True, help="directory of JPEGs")
    parser.add_argument("--form", action="store_true", help="send forms instead of raw bodies")
    parser.add_argument("--connections", type=int, required=True, help="connections of this process")
    parser.add_argument("--first", type=int, required=True, help="number of the first connection's first picture")
    parser.add_argument("--step", type=int, required=True, help="connections of all processes")
    parser.add_argument("--start", type=float, required=True, help="monotonic time to begin at")
    parser.add_argument("--stop", type=float, required=True, help="monotonic time after which nothing is sent")
    options = parser.parse_args()
    paths = sorted(options.pictures.glob("*.jpg"))
    tallies = [Tally() for _ in range(options.connections)]
    threads = []
    for number, tally in enumerate(tallies, options.first):
        # A picture belongs to one connection, so no two requests for the same one are ever in flight.
        own = paths[number % len(paths) :: options.step] or [paths[number % len(paths)]]
        requests = [request_bytes(path.read_bytes(), options.port, options.form) for path in own]
        work = (options.port, requests, options.start, options.stop, tally)
        threads.append(threading.Thread(target=drive, args=work))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = {
        "finished": [each for tally in tallies for each in tally.finished],
        "answer_bytes": max(tally.answer_bytes for tally in tallies),
        "failures": sum((tally.failures for tally in tallies), Counter()),
        "cpu_s": sum(os.times()[:2]),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
