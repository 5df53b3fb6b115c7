"""Callers of a load test in one process: closed loop (each waits for its answer) or open loop (they come at a rate,
whatever happens). Every answer is compared with the embedding that is known to be right.

    python -m benchmarks.open_loop --port 8000 --media DIR --start T --stop T (--clients 16 | --rate 100)

DIR holds `00000.jpg` and so on, and for each the right embedding as `00000.npy`. One line of JSON: per second of the
monotonic clock, what became of the requests that ended in it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from benchmarks.async_client import Connections, difference, embeddings
from benchmarks.clients import request_bytes

TOLERANCES = {"float32": 1e-5, "uint16": 1e-2}  # relative, for another batch's rounding; uint16: the bits of bfloat16
LAST_ANSWER_S = 90.0  # above the service's own deadline


class Callers:
    """All requests of this process, and what became of them."""

    def __init__(self, port: int, media: Path) -> None:
        self._connections = Connections(port)
        paths = sorted(media.glob("*.jpg"))
        self._requests = [request_bytes(path.read_bytes(), port) for path in paths]
        self._expected = [np.load(path.with_suffix(".npy"), mmap_mode="r") for path in paths]
        dtype = "float32" if self._expected[0].dtype == np.float32 else "bfloat16"
        self._requests = [
            request.replace(b"/v1/encode ", b"/v1/encode?dtype=%s " % dtype.encode(), 1) for request in self._requests
        ]
        self._next = 0
        self.seconds: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.latencies: list[tuple[float, float]] = []  # (time it ended, seconds it took) of good answers
        self.faults: list[str] = []
        self.answer_bytes = 0

    async def closed(self, num_clients: int, stop: float) -> None:
        async def client() -> None:
            while time.monotonic() < stop:
                await self._send()

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def open(self, rate: float, start: float, stop: float) -> None:
        """`rate` requests a second at even distances; those that are late are sent at once."""
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        for turn in range(round(rate * (stop - start))):
            due = start + turn / rate
            if (delay := due - loop.time()) > 0:
                await asyncio.sleep(delay)
            task = loop.create_task(self._send())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)

    def close(self) -> None:
        self._connections.close()

    async def _send(self) -> None:
        number = self._next % len(self._requests)
        self._next += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(LAST_ANSWER_S):
                outcome = await self._ask(number)
        except TimeoutError:
            outcome = "lost"
            self.faults.append(f"picture {number}: no answer in {LAST_ANSWER_S:g} s")
        except OSError as error:
            outcome = "lost"
            self.faults.append(f"picture {number}: {type(error).__name__}: {error}")
        ended = time.monotonic()
        self.seconds[int(ended)][outcome] += 1
        if outcome in ("exact", "close"):
            self.latencies.append((ended, ended - begun))

    async def _ask(self, number: int) -> str:
        answer = await self._connections.ask(self._requests[number])
        if answer.status == 200:
            expected = self._expected[number]
            error = difference(embeddings(answer.body), expected)
            self.answer_bytes += len(answer.body)
            if error == 0.0:
                return "exact"
            if error <= TOLERANCES[str(expected.dtype)]:
                return "close"
            self.faults.append(f"picture {number}: relative error {error:.3g}")
            return "wrong"
        if answer.is_honest_refusal:
            return str(answer.status)
        self.faults.append(f"picture {number}: status {answer.status}, {bytes(answer.body[:200])!r}")
        return "lost"


async def work(options: argparse.Namespace) -> Callers:
    callers = Callers(options.port, options.media)
    await asyncio.sleep(options.start - time.monotonic())
    if options.rate is None:
        await callers.closed(options.clients, options.stop)
    else:
        await callers.open(options.rate, options.start, options.stop)
    callers.close()
    return callers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--media", type=Path, required=True)
    parser.add_argument("--start", type=float, required=True, help="monotonic time to begin at")
    parser.add_argument("--stop", type=float, required=True, help="monotonic time after which nothing is sent")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--clients", type=int, help="closed loop: requests in flight")
    how.add_argument("--rate", type=float, help="open loop: requests a second")
    callers = asyncio.run(work(parser.parse_args()))
    report = {
        "seconds": {str(second): dict(outcomes) for second, outcomes in sorted(callers.seconds.items())},
        "latencies": callers.latencies,
        "faults": callers.faults[:20],
        "answer_bytes": callers.answer_bytes,
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
