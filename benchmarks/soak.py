"""The service for a long time under mixed traffic, with one fault a minute: nothing lost, nothing wrong, nothing grows.

    python -m benchmarks.soak [--minutes 20] [--model demo:k3-tiny] [--flags "--data-parallel-size 2"] [--out FILE]

Every tier of the store is on. Callers send pictures of all formats, films and bad ones, some of them again and again,
and compare every answer with the right one. What is neither right nor refused as it should be has to be a problem that
says when to come back (429, 503) or that a deadline passed (504).
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.async_client import Connections
from benchmarks.machine import RESULTS, describe
from benchmarks.running import Running, Samples, difference, percentile, say, service
from benchmarks.soak_faults import Faults, Skipped, descendants, stores
from benchmarks.soak_media import Medium, all_media, ask, choose

MINUTE_S = 60.0
FAULT_AFTER_S = 10.0  # into each minute
PROBE_S = 5.0  # between two looks at memory and descriptors
MOST_GROWTH_MB = 64  # of resident memory, from the second quarter to the last: allocators keep what passes through
MOST_NEW_DESCRIPTORS = 32


@dataclass
class Minute:
    """What happened in one minute."""

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies_ms: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    tree_resident_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    fault: str = ""
    done: str = ""


class Soak:
    """Callers, faults and probes of one service."""

    def __init__(self, running: Running, media: list[Medium], faults: Faults, minutes: int) -> None:
        self._running = running
        self._media = media
        self._faults = faults
        self._connections = Connections(running.port)
        self.minutes = [Minute() for _ in range(minutes)]
        self.complaints: list[str] = []
        self._begun = 0.0

    async def run(self, num_clients: int, pause_s: float) -> None:
        self._begun = time.monotonic()
        others = [asyncio.create_task(self._cause_faults()), asyncio.create_task(self._probe())]
        await asyncio.gather(*(self._call(random.Random(n), pause_s) for n in range(num_clients)))  # noqa: S311
        for task in others:
            task.cancel()
        results = await asyncio.gather(*others, return_exceptions=True)
        self.complaints += [repr(each) for each in results if isinstance(each, Exception)]
        self._connections.close()

    def _minute(self) -> Minute | None:
        number = int((time.monotonic() - self._begun) / MINUTE_S)
        return self.minutes[number] if number < len(self.minutes) else None

    async def _call(self, rng: random.Random, pause_s: float) -> None:
        while (minute := self._minute()) is not None:
            begun = time.monotonic()
            outcome, complaint = await ask(self._connections, choose(self._media, rng))
            minute.outcomes[outcome] += 1
            minute.latencies_ms.append(1e3 * (time.monotonic() - begun))
            if complaint:
                self.complaints.append(f"{begun - self._begun:.1f} s: {complaint}")
                await asyncio.sleep(1)  # a service that is gone shows at a few requests, not at a million
            await asyncio.sleep(pause_s)

    async def _cause_faults(self) -> None:
        for number, (name, cause) in zip(range(len(self.minutes)), cycle(self._faults.all().items()), strict=False):
            await asyncio.sleep(self._begun + number * MINUTE_S + FAULT_AFTER_S - time.monotonic())
            minute = self.minutes[number]
            minute.fault = name
            try:
                minute.done = await cause()
            except Skipped as reason:
                minute.done = f"skipped: {reason}"
            say(f"minute {number}: {name} ({minute.done})")

    async def _probe(self) -> None:
        while (minute := self._minute()) is not None:
            minute.resident_mb.append(self._running.resident_bytes() / 1e6)
            minute.descriptors.append(self._running.num_descriptors())
            minute.tree_resident_mb.append(tree_resident_mb(self._running.process.pid))
            await asyncio.sleep(PROBE_S)


def tree_resident_mb(pid: int) -> float:
    """Of the service and all its processes; what they share counts once for each."""
    total = 0
    for each in (pid, *descendants(pid)):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * 4096
        except OSError:  # it has ended
            continue
    return total / 1e6


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    with stores() as (store, redis):
        flags = ["--model", options.model, "--device", options.device, "--log-level", "warning"]
        flags += [
            "--store-bytes",
            str(4 << 20),
            "--store-dir",
            str(store.directory),
            "--store-dir-bytes",
            str(32 << 20),
        ]
        flags += ["--api-key-file", str(store.key_file), "--metrics-without-key"]
        flags += ["--film-deadline-s", "20", "--picture-deadline-s", "10", *options.flags.split()]
        if redis is not None:
            flags += ["--store-url", redis.url]
        with service(*flags) as running:
            media = await all_media(running.port, options.model, device, options.pictures, seed=0)
            say(f"{len(media)} media, {sum(each.status is not None for each in media)} of them bad")
            before = running.metrics()
            runner = Soak(running, media, Faults(running, redis, store), options.minutes)
            await runner.run(options.clients, options.pause_s)
            alive = running.process.poll() is None
            gained = difference(before, running.metrics()) if alive else {}
            log = running.log_text()
    return report(options, runner, gained, alive, log)


def report(options: argparse.Namespace, runner: Soak, gained: Samples, alive: bool, log: str) -> dict[str, Any]:
    minutes = [minute for minute in runner.minutes if minute.resident_mb]
    total = sum((minute.outcomes for minute in minutes), Counter[str]())
    quarter = max(1, len(minutes) // 4)
    early = minutes[quarter : 2 * quarter] or minutes[:1]
    late = minutes[-quarter:]

    def median(part: list[Minute], name: str) -> float:
        return statistics.median(value for minute in part for value in getattr(minute, name))

    growth_mb = median(late, "resident_mb") - median(early, "resident_mb")
    tree_growth_mb = median(late, "tree_resident_mb") - median(early, "tree_resident_mb")
    new_descriptors = median(late, "descriptors") - median(early, "descriptors")
    shown = ("moonvit_requests_total", "moonvit_cache_", "moonvit_film_worker", "moonvit_worker", "moonvit_tower")
    return {
        "what": "mixed traffic with every tier of the store on, one fault a minute",
        **describe("torch", "uvicorn", "uvloop", "pillow", "av", "redis"),
        "model": options.model,
        "flags": options.flags,
        "clients": options.clients,
        "minutes": [
            {
                "outcomes": dict(sorted(minute.outcomes.items())),
                "p50_ms": round(percentile(minute.latencies_ms, 50), 1) if minute.latencies_ms else None,
                "p99_ms": round(percentile(minute.latencies_ms, 99), 1) if minute.latencies_ms else None,
                "resident_mb": round(statistics.median(minute.resident_mb)),
                "tree_resident_mb": round(statistics.median(minute.tree_resident_mb)),
                "descriptors": max(minute.descriptors),
                "fault": minute.fault,
                "done": minute.done,
            }
            for minute in minutes
        ],
        "outcomes": dict(sorted(total.items())),
        "growth_mb": round(growth_mb, 1),
        "tree_growth_mb": round(tree_growth_mb, 1),
        "new_descriptors": new_descriptors,
        "counters": {name: value for name, value in sorted(gained.items()) if value and name.startswith(shown)},
        "complaints": runner.complaints[:50],
        "log_end": [line[:500] for line in log.splitlines()[-20:]] if runner.complaints or not alive else [],
        "held": {
            "the service lives": alive,
            "no wrong answer": not total["wrong"],
            "no request lost": not total["lost"],
            f"memory grows by {MOST_GROWTH_MB} MB at most": growth_mb <= MOST_GROWTH_MB,
            f"its processes' memory grows by {2 * MOST_GROWTH_MB} MB at most": tree_growth_mb <= 2 * MOST_GROWTH_MB,
            f"at most {MOST_NEW_DESCRIPTORS} more descriptors": new_descriptors <= MOST_NEW_DESCRIPTORS,
        },
    }


def lines(found: dict[str, Any]) -> list[str]:
    rows = [f"\n{'minute':8s}{'requests':>10s}{'p50 ms':>10s}{'p99 ms':>10s}{'MB':>7s}{'fds':>6s}  fault"]
    for number, minute in enumerate(found["minutes"]):
        requests = sum(minute["outcomes"].values())
        rows.append(
            f"{number:<8d}{requests:10d}{minute['p50_ms'] or 0:10.1f}{minute['p99_ms'] or 0:10.1f}"
            f"{minute['resident_mb']:7d}{minute['descriptors']:6d}  {minute['fault']}: {minute['done']}"
        )
    rows.append("all: " + ", ".join(f"{outcome} {count}" for outcome, count in found["outcomes"].items()))
    rows += [f"  {'held' if held else 'NOT HELD':10s}{promise}" for promise, held in found["held"].items()]
    return rows + [f"  {complaint}" for complaint in found["complaints"][:10]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=20, help="and as many faults (default: 20)")
    parser.add_argument("--model", default="demo:k3-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=8, help="callers (default: 8)")
    parser.add_argument("--pause-s", type=float, default=0.05, help="between a caller's requests (default: 0.05)")
    parser.add_argument("--pictures", type=int, default=120, help="different pictures (default: 120)")
    parser.add_argument(
        "--flags", default="--data-parallel-size 2", help="more flags for the service (default: --data-parallel-size 2)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    options = parser.parse_args()
    found = asyncio.run(soak(options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(found)))
    print(f"written to {options.out}")
    sys.exit(0 if all(found["held"].values()) else 1)


if __name__ == "__main__":
    main()
