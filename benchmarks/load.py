"""The service at three times what it can do: nothing wrong, nothing lost, and as much done as without the crowd.

    python -m benchmarks.load [--model demo:k3-tiny] [--minutes 3] [--times 3] [--out FILE]

First the capacity: as many requests in flight as keep the service busy, each client sending once it has its answer.
Then requests come at a multiple of that, whether the last are answered or not. Every answer is compared with the
embedding that an engine of this process made of the same picture before; what is not an embedding has to be a problem
that says when to come back. Meanwhile the small routes are asked, and the service's memory is read.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.alone import segments_of
from benchmarks.machine import RESULTS, describe
from benchmarks.pictures import jpeg
from benchmarks.running import Running, difference, mean, percentile, say, service
from encoder import Engine

CONTROL_ROUTES = ("/health/live", "/health/ready", "/metrics", "/v1/info", "/v1/models")
CONTROL_PAUSE_S = 0.2
SETTLE_S = 2.0  # for processes to come up before they begin
GOOD = ("exact", "close")
LEAST_GOODPUT = 0.95  # of the capacity
MOST_GROWTH_MB = 64  # of resident memory over the second half: allocators keep some of what passes through


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:k3-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=3.0, help="of overload (default: 3)")
    parser.add_argument("--capacity-s", type=float, default=20.0, help="of the search for the capacity (default: 20)")
    parser.add_argument("--times", type=float, default=3.0, help="the capacity that is offered (default: 3)")
    parser.add_argument("--clients", type=int, default=64, help="requests in flight for the capacity (default: 64)")
    parser.add_argument("--processes", type=int, default=2, help="processes that the callers share (default: 2)")
    parser.add_argument("--pictures", type=int, default=48, help="different pictures (default: 48)")
    parser.add_argument("--sizes", default="112,224", help="their sides in pixels, in turns (default: 112,224)")
    parser.add_argument("--flags", default="", help="more flags for the service, in one string")
    parser.add_argument("--out", type=Path, default=RESULTS / "load.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_media(options, Path(directory))
        report = measure(options, Path(directory))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(report)))
    print(f"written to {options.out}")
    sys.exit(0 if all(report["held"].values()) else 1)


def write_media(options: argparse.Namespace, directory: Path) -> None:
    """Pictures, and beside each its embedding: made alone, by an engine that is gone before the service starts."""
    sizes = [int(size) for size in options.sizes.split(",")]
    files = [jpeg(n, sizes[n % len(sizes)], sizes[n % len(sizes)]) for n in range(options.pictures)]
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    engine = Engine.load(options.model, device=device)
    for number, segment in enumerate(segments_of(options.model, files)):
        embedding = engine.encode([segment])[0].cpu()
        bits = embedding.view(torch.uint16) if embedding.dtype == torch.bfloat16 else embedding
        (directory / f"{number:05d}.jpg").write_bytes(files[number])
        np.save(directory / f"{number:05d}.npy", bits.numpy())


def measure(options: argparse.Namespace, media: Path) -> dict[str, Any]:
    flags = ("--model", options.model, "--device", options.device, "--store-bytes", "0", "--log-level", "error")
    with service(*flags, *options.flags.split()) as running:
        info = running.info()
        capacity = traffic(running, options, media, options.capacity_s, clients=options.clients)
        rate = options.times * capacity["good_per_s"]
        say(f"capacity {capacity['good_per_s']:.1f} pictures/s; now {rate:.1f} are offered for {options.minutes:g} min")
        watch = Watch(running)
        overload = traffic(running, options, media, 60 * options.minutes, rate=rate)
        watched = watch.stop()
        after = traffic(running, options, media, options.capacity_s, clients=options.clients)
    goodput = overload["good_per_s"] / capacity["good_per_s"]
    growth_mb = watched["resident_growth_mb"]
    return {
        "what": f"{options.times:g} times the capacity, offered whatever happens; every answer compared",
        **describe("torch", "uvicorn", "uvloop", "numpy"),
        "model": options.model,
        "device": info["device"],
        "dtype": info["dtype"],
        "pictures": {"different": options.pictures, "sides_px": options.sizes},
        "capacity": capacity,
        "offered_per_s": round(rate, 2),
        "overload": overload,
        "capacity_after": after,
        "goodput_per_capacity": round(goodput, 3),
        "watched": watched,
        "held": {
            "no wrong answer": not any(part["outcomes"].get("wrong") for part in (capacity, overload, after)),
            "no request lost": not any(part["outcomes"].get("lost") for part in (capacity, overload, after)),
            f"goodput at least {LEAST_GOODPUT:.0%} of the capacity": goodput >= LEAST_GOODPUT,
            f"memory grows by {MOST_GROWTH_MB} MB at most": growth_mb <= MOST_GROWTH_MB,
        },
    }


def traffic(
    running: Running,
    options: argparse.Namespace,
    media: Path,
    seconds: float,
    *,
    clients: int | None = None,
    rate: float | None = None,
) -> dict[str, Any]:
    """Callers in their processes for so long; what they met in all but the first fifth of the time."""
    start = time.monotonic() + SETTLE_S
    stop = start + seconds
    processes = []
    for number in range(options.processes):
        command = [sys.executable, "-m", "benchmarks.open_loop", "--port", str(running.port), "--media", str(media)]
        command += ["--start", str(start), "--stop", str(stop)]
        if clients is not None:
            share = clients // options.processes + (number < clients % options.processes)
            command += ["--clients", str(share)]
        elif rate is not None:
            command += ["--rate", str(rate / options.processes)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    begin = start + seconds / 5
    time.sleep(begin - time.monotonic())
    before, begin = running.metrics(), time.monotonic()
    time.sleep(max(0.0, stop - time.monotonic()))
    gained, end = difference(before, running.metrics()), time.monotonic()
    reports = [json.loads(process.communicate()[0]) for process in processes]
    within: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for report in reports:
        for second, outcomes in report["seconds"].items():
            total.update(outcomes)
            if int(begin) < int(second) < int(end):  # whole seconds only
                within.update(outcomes)
    span = int(end) - int(begin) - 1
    latencies = [1e3 * taken for report in reports for ended, taken in report["latencies"] if begin <= ended < end]
    faults = [fault for report in reports for fault in report["faults"]][:20]
    if not latencies:
        raise RuntimeError(f"no good answer in {seconds:.0f} s: {dict(total)}, {faults[:3]}")
    return {
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(total.items())),
        "good_per_s": round(sum(within[outcome] for outcome in GOOD) / span, 2),
        "ended_per_s": round(within.total() / span, 2),
        "patches_per_s": round(gained["moonvit_patches_total"] / (end - begin), 1),
        "latency_ms": {f"p{share}": round(percentile(latencies, share), 1) for share in (50, 95, 99)},
        "event_loop_lag_ms": round(1e3 * (mean(gained, "moonvit_event_loop_lag_seconds") or 0.0), 2),
        "faults": faults,
    }


@dataclass
class Watch:
    """Asks the small routes in turn and reads the service's memory, from a thread of its own."""

    running: Running
    taken_ms: dict[str, list[float]] = field(default_factory=lambda: {route: [] for route in CONTROL_ROUTES})
    failures: Counter[str] = field(default_factory=Counter)
    resident_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        self._done.set()
        self._thread.join()
        settled = self.resident_mb[len(self.resident_mb) // 2 :]
        quarter = max(1, len(settled) // 4)
        return {
            "control_ms": {
                route: {
                    **{f"p{share}": round(percentile(values, share), 1) for share in (50, 99)},
                    "most": round(max(values), 1),
                }
                for route, values in self.taken_ms.items()
                if values
            },
            "control_failures": dict(self.failures),
            "resident_mb": [round(value) for value in self.resident_mb[:: max(1, len(self.resident_mb) // 60)]],
            "resident_growth_mb": round(
                statistics.median(settled[-quarter:]) - statistics.median(settled[:quarter]), 1
            ),
            "descriptors": {"first": self.descriptors[0], "most": max(self.descriptors), "last": self.descriptors[-1]},
        }

    def _watch(self) -> None:
        while not self._done.wait(CONTROL_PAUSE_S):
            for route in CONTROL_ROUTES:
                begun = time.monotonic()
                try:
                    self.running.get(route)
                except OSError as error:
                    self.failures[f"{route} {type(error).__name__}"] += 1
                else:
                    self.taken_ms[route].append(1e3 * (time.monotonic() - begun))
            self.resident_mb.append(self.running.resident_bytes() / 1e6)
            self.descriptors.append(self.running.num_descriptors())


def lines(report: dict[str, Any]) -> list[str]:
    def row(name: str, value: str) -> str:
        return f"  {name:26s}{value}"

    def speeds(part: dict[str, Any]) -> str:
        latency = part["latency_ms"]
        return (
            f"{part['good_per_s']:.1f} pictures/s, p50 {latency['p50']:.0f} ms, p99 {latency['p99']:.0f}; "
            + ", ".join(f"{outcome} {count}" for outcome, count in part["outcomes"].items())
        )

    watched = report["watched"]
    found = [
        f"\n{report['model']} on {report['device']}, {report['dtype']}",
        row("capacity", speeds(report["capacity"])),
        row(f"offered {report['offered_per_s']:.0f}/s", speeds(report["overload"])),
        row("capacity after", speeds(report["capacity_after"])),
        row("event loop late by", f"{report['overload']['event_loop_lag_ms']} ms, mean, in the overload"),
        row("goodput / capacity", f"{report['goodput_per_capacity']:.3f}"),
        row(
            "memory", f"{max(watched['resident_mb'])} MB, grew by {watched['resident_growth_mb']} MB in the second half"
        ),
    ]
    for route, values in watched["control_ms"].items():
        found.append(row(route, f"p50 {values['p50']} ms, p99 {values['p99']}, most {values['most']}"))
    found += [row("held" if held else "NOT HELD", promise) for promise, held in report["held"].items()]
    faults = [fault for part in ("capacity", "overload", "capacity_after") for fault in report[part]["faults"]]
    return found + [row("fault", fault) for fault in faults[:10]]


if __name__ == "__main__":
    main()
