"""How long health checks, metrics and /v1/info take while the device is saturated.

`python -m benchmarks.control_routes`: a real service on a real socket, in a process of its own, with a tower that runs
no batch until it is told to. So many requests wait in it while the control routes are asked one by one, each over
a connection that is kept. Three figures a route: what its client sees, which has the noise of the machine in it; what
the service says it took to handle; and the CPU time the whole service spent meanwhile, which has least noise.

Then the same routes over new connections, while others come over new connections to be refused, so and so many a
second: on the service's own port and on the one for control routes.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import chain
from typing import Any

import httpx
import psutil

from benchmarks.machine import RESULTS, describe
from benchmarks.new_connections import probe

YARDSTICK = "/health/live"  # does nothing, so what it takes is the machine
ROUTES = (YARDSTICK, "/health", "/health/ready", "/metrics", "/v1/info")
WAITING = 500
ROUNDS = 5
ASKED = 100  # times a route, in each round
LIMIT_MS = 50.0
RATES = (0, 200, 1000, 2500)  # refused callers a second, each over a new connection
FLOOD_S = 8.0
PROBE_PAUSE_S = 0.02


def serve(pipe: Any, cores: int, waiting: int) -> None:
    """The service, with room for `waiting` requests; sends its ports, then its handling times by route once asked."""
    import structlog
    import torch
    import uvicorn

    from app.control import ControlServer
    from app.main import create_app, listen
    from app.protocol import Protocol
    from app.settings import Settings
    from encoder import load_config

    handled: dict[str, list[float]] = {route: [] for route in ROUTES}

    def note(_: object, __: str, event: dict[str, Any]) -> dict[str, Any]:
        if event.get("path") in handled:
            handled[event["path"]].append(event["ms"])
        raise structlog.DropEvent

    structlog.configure(processors=[note])
    logging.disable(logging.CRITICAL)
    go, entered = threading.Event(), threading.Event()
    width = load_config("demo:k3-tiny").vision.text_hidden_size

    def slow(batch: Any) -> torch.Tensor:
        entered.set()
        go.wait()
        return torch.zeros(sum(batch.num_tokens), width)

    settings = Settings(
        film_workers=1, picture_workers=max(1, cores), max_requests=waiting, store_bytes=0, deadline_ms=600_000
    )
    app = create_app(settings, slow)
    server = uvicorn.Server(uvicorn.Config(app, port=0, http=Protocol, log_config=None, ws="none"))
    listener = listen("127.0.0.1", 0)
    control = ControlServer(app, listener)

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
        control.start()
        pipe.send((server.servers[0].sockets[0].getsockname()[1], listener.getsockname()[1]))
        await asyncio.to_thread(pipe.recv)
        pipe.send(handled)
        go.set()
        await asyncio.to_thread(pipe.recv)
        server.should_exit = True
        await serving

    asyncio.run(run())


class Service:
    """The process, as this one sees it."""

    def __init__(self, pid: int, pipe: Any, port: int, control_port: int) -> None:
        self.port, self.control_port = port, control_port
        self._process = psutil.Process(pid)
        self._pipe = pipe

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    async def handled(self) -> dict[str, list[float]]:
        """Milliseconds of every request by route. Lets the tower go on."""
        self._pipe.send("times")
        found: dict[str, list[float]] = await asyncio.to_thread(self._pipe.recv)
        return found


@contextlib.asynccontextmanager
async def saturated(waiting: int) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client, and a service in which so many requests wait for the device."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, 2, waiting))
    process.start()
    try:
        port, control_port = await asyncio.to_thread(ours.recv)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits) as client:
            pictures = [asyncio.create_task(post(client, number)) for number in range(waiting)]
            await until_waiting(client, waiting)
            yield client, Service(process.pid or 0, ours, port, control_port)
            for answer in await asyncio.gather(*pictures):
                assert answer.status_code == 200, answer.text
            ours.send("end")
    finally:
        process.join(20)
        process.kill()
        process.join()
        process.close()
        ours.close()
        theirs.close()


async def post(client: httpx.AsyncClient, number: int) -> httpx.Response:
    return await client.post("/v1/encode", content=bitmap(number), headers={"content-type": "image/bmp"})


def bitmap(number: int) -> bytes:
    """A picture of 28x28 pixels that is unlike all others."""
    pixels = number.to_bytes(4, "little") + bytes(28 * 84 - 4)
    head = b"BM" + (54 + len(pixels)).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    info = (40, 28, 28)
    return (
        head
        + b"".join(value.to_bytes(4, "little") for value in info)
        + (1).to_bytes(2, "little")
        + (24).to_bytes(2, "little")
        + bytes(24)
        + pixels
    )


async def until_waiting(client: httpx.AsyncClient, waiting: int) -> None:
    """All are in flight, decoded, and queued behind the batch that runs."""
    async with asyncio.timeout(120):
        while True:
            info = (await client.get("/v1/info")).json()
            if info["batching"]["queued_patches"] >= 4 * (waiting - 1) - 8 and info["batching"]["device_busy"]:
                return
            await asyncio.sleep(0.1)


async def measure(
    waiting: int = WAITING, rounds: int = ROUNDS, asked: int = ASKED, good_enough_ms: float = 0.0
) -> dict[str, dict[str, float]]:
    """Route -> milliseconds: what its client sees (p50 of all, p99 of the best round), how long the service handled it
    (p99 of the best round, p50 of all), and the CPU time of one.

    Args:
        rounds: at most; a route is done once a round's p99 is below `good_enough_ms` for its client.
    """
    async with saturated(waiting) as (client, service):
        cpu_ms = dict.fromkeys(ROUTES, 0.0)
        seen: dict[str, list[list[float]]] = {route: [] for route in ROUTES}
        for _ in range(rounds):
            for route in ROUTES:
                if any(percentile(times, 0.99) < good_enough_ms for times in seen[route]):
                    continue
                before = service.cpu_s()
                seen[route].append([await ask(client, route) for _ in range(asked)])
                cpu_ms[route] += (service.cpu_s() - before) * 1000
        handled = await service.handled()
    found = {}
    for route in ROUTES:
        num_rounds = len(seen[route])
        own = handled[route][-num_rounds * asked :]
        lots = [own[i * asked : (i + 1) * asked] for i in range(num_rounds)]
        found[route] = {
            "client_p50": round(statistics.median(chain.from_iterable(seen[route])), 2),
            "client_p99": round(min(percentile(times, 0.99) for times in seen[route]), 2),
            "handling_p50": round(statistics.median(own), 2),
            "handling_p99": round(min(percentile(times, 0.99) for times in lots), 2),
            "cpu": round(cpu_ms[route] / (num_rounds * asked), 2),
        }
    return found


async def measure_new_connections(waiting: int = WAITING, seconds: float = FLOOD_S) -> list[dict[str, Any]]:
    """For each rate: what became of the refused callers, and of each port the milliseconds of probes among them."""
    found = []
    async with saturated(waiting) as (_, service):
        for rate in RATES:
            entry: dict[str, Any] = {"refused_per_s": rate}
            for name, port in (("own port", service.port), ("control port", service.control_port)):
                before, begun = service.cpu_s(), time.monotonic()
                entry[name] = await asyncio.to_thread(probes_in_a_flood, service.port, port, rate, seconds)
                entry[name]["cores"] = round((service.cpu_s() - before) / (time.monotonic() - begun), 2)
            found.append(entry)
        await service.handled()  # which lets the tower go on
    return found


def probes_in_a_flood(flooded_port: int, port: int, rate: int, seconds: float) -> dict[str, Any]:
    """Blocks for that long, and until the last caller has its answer."""
    command = [sys.executable, "-m", "benchmarks.new_connections", str(flooded_port), str(rate), str(seconds)]
    flood = subprocess.Popen(command, stdout=subprocess.PIPE)
    taken: list[float] = []
    time.sleep(min(1.0, seconds / 4))  # until it has begun
    stop = time.monotonic() + seconds - 1.0
    while time.monotonic() < stop:
        taken.append(probe(port, ROUTES[len(taken) % len(ROUTES)]))
        time.sleep(PROBE_PAUSE_S)
    callers = json.loads(flood.communicate()[0])
    return {
        "probes": len(taken),
        "p50_ms": round(percentile(taken, 0.5), 1),
        "p99_ms": round(percentile(taken, 0.99), 1),
        "most_ms": round(max(taken), 1),
        "callers": callers,
    }


async def ask(client: httpx.AsyncClient, route: str) -> float:
    start = time.perf_counter()
    response = await client.get(route)
    assert response.status_code == 200, response.text
    return (time.perf_counter() - start) * 1000


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, default=WAITING)
    args = parser.parse_args()
    routes = asyncio.run(measure(args.waiting))
    crowded = asyncio.run(measure_new_connections(args.waiting))
    report = {
        **describe("uvicorn", "prometheus-client"),
        "what": f"Control routes while the device is saturated and {args.waiting} requests wait, in milliseconds: "
        f"as the client sees them and as the service handles them (p99: of the best of {ROUNDS} rounds of {ASKED}), "
        f"and the CPU time of one. Other work kept the machine busy to a load of {os.getloadavg()[0]:.1f}",
        "waiting": args.waiting,
        "limit_ms": LIMIT_MS,
        "load_average": round(os.getloadavg()[0], 1),
        "routes": routes,
        "new_connections": {
            "what": "The same routes in turn, each over a new connection, while others come over new connections and "
            f"are refused with 429: {FLOOD_S:.0f} s a line, milliseconds from the first packet to the last. The "
            "callers, the probes and the service share the cores",
            "by_rate": crowded,
        },
        "table": {
            "columns": ["route", "client p50", "client p99", "handling p50", "handling p99", "CPU"],
            "rows": [[f"`{route}`", *(f"{value:.2f}" for value in times.values())] for route, times in routes.items()],
        },
    }
    (RESULTS / "control_routes.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"routes": routes, "new_connections": crowded}, indent=2))


if __name__ == "__main__":
    main()
