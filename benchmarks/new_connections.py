"""Callers that each come over a new connection at a fixed rate, whatever happens, to be refused; and probes among them.

    python -m benchmarks.new_connections PORT RATE SECONDS

One line of JSON: what became of the callers, and their milliseconds. Standard library and uvloop only.
"""

import asyncio
import json
import socket
import sys
import time
from collections import Counter

import uvloop

PATIENCE_S = 60.0
BODY_BYTES = 20_000  # a small picture
REQUEST = (
    f"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {BODY_BYTES}\r\n\r\n".encode()
    + bytes(BODY_BYTES)
)


async def flood(port: int, rate: float, seconds: float) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    outcomes: Counter[str] = Counter()
    taken_ms: list[float] = []

    async def call() -> None:
        begun = loop.time()
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(REQUEST)
                    status = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes[status] += 1
            taken_ms.append(1e3 * (loop.time() - begun))

    start = loop.time()
    tasks = set()
    for turn in range(int(rate * seconds)):
        if (delay := start + turn / rate - loop.time()) > 0:
            await asyncio.sleep(delay)
        task = loop.create_task(call())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    sent_s = loop.time() - start
    await asyncio.gather(*tasks)
    taken_ms.sort()
    return {
        "sent_per_s": round(int(rate * seconds) / sent_s) if rate else 0,
        "outcomes": dict(outcomes),
        "median_ms": round(taken_ms[len(taken_ms) // 2], 1) if taken_ms else None,
    }


def probe(port: int, route: str) -> float:
    """Milliseconds of one GET over a connection of its own, from the first packet to the last.

    Raises:
        OSError: no whole answer.
    """
    begun = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"GET {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    if answer[9:12] != b"200":
        raise ConnectionError(f"{route}: {answer[:100]!r}")
    return 1e3 * (time.perf_counter() - begun)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(flood(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))))
