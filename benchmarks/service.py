"""The running service under many clients, beside what its tower, its decoders and this machine's loopback can do.

    python -m benchmarks.service [--model demo:k3] [--clients 64] [--seconds 60] [--out FILE]
    python -m benchmarks.service --model demo:k3-tiny --clients 8 --seconds 5 --size 224   # a small one, on a CPU

The service runs as a process of its own, with its store off, on the GPU where there is one. Clients in other processes
send JPEGs, all different, and read safetensors answers, each the next when it has the last. Then, with the service gone
from the device: its tower alone on batches of the sizes that the service's own histogram shows, its decoder alone, and
a server that only sends answers of that size. One more client alone, before, gives the latency of a lone request.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from app.cli import build_parser
from app.commands.flags import given_settings
from app.device import compute_dtype, resolve_device
from app.settings import load_settings
from benchmarks.alone import decode_speed, segments_of
from benchmarks.clients import Connection, request_bytes
from benchmarks.machine import RESULTS, describe
from benchmarks.pictures import write_jpegs
from benchmarks.running import (
    Running,
    Samples,
    difference,
    free_port,
    mean,
    percentile,
    say,
    service,
    wait_until_listening,
)
from encoder import Engine, PackedBatch, Segment, pack

STAGES = ("fetch", "decode_wait", "decode", "preprocess", "queue", "encode", "deliver")
LONE_ALLOWANCE_MS = 5.0  # of a lone request, on top of its decoding and its forward pass
SETTLE_S = 1.0  # for processes to come up before clients begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:k3")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=64, help="requests in flight (default: 64)")
    parser.add_argument("--processes", type=int, default=4, help="processes that the clients share (default: 4)")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured, after the warm-up (default: 60)")
    parser.add_argument("--warm-up", type=float, help="seconds before that (default: a third)")
    parser.add_argument("--pictures", type=int, default=256, help="different pictures (default: 256)")
    parser.add_argument("--size", type=int, default=1024, help="their side in pixels (default: 1024)")
    parser.add_argument("--form", action="store_true", help="send forms instead of raw bodies")
    parser.add_argument("--lone", type=int, default=60, help="requests of the lone client (default: 60)")
    parser.add_argument("--flags", default="", help="more flags for the service, in one string")
    parser.add_argument("--out", type=Path, default=RESULTS / "service.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        paths = write_jpegs(Path(directory), options.pictures, options.size)
        report = measure(options, paths)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(report)))
    print(f"written to {options.out}")


def measure(options: argparse.Namespace, paths: list[Path]) -> dict[str, Any]:
    with service(*service_flags(options)) as running:
        say(f"ready after {running.ready_s:.1f} s")
        info = running.info()
        lone = lone_requests(running, paths[: options.lone])
        say(f"one client alone: p50 {lone['p50_ms']:.1f} ms")
        load = under_load(running, options, paths[0].parent)
        say(f"{options.clients} clients: {load['pictures_per_s']:.1f} pictures/s")
    files = [path.read_bytes() for path in paths]
    decoded = asyncio.run(decode_speed(options.model, files))
    say(f"decoder alone: {decoded['pictures_per_s']:.0f} pictures/s")
    tower = tower_alone(options, load["batches"]["sizes"], segments_of(options.model, files))
    say(f"tower alone: {tower['patches_per_s']:.0f} patches/s")
    body_bytes = load["answer_bytes"]
    loopback = {
        "one event loop": ceiling(options, paths[0].parent, body_bytes),
        "threads": ceiling(options, paths[0].parent, body_bytes, "--threads"),
    }
    parts_ms = {"forward": tower["forward_one_ms"], "decode": decoded["one_ms"], "allowance": LONE_ALLOWANCE_MS}
    return {
        "what": "the service over loopback, its store off, every picture in flight a different one",
        **describe("torch", "triton", "flashinfer-python", "pillow", "uvicorn", "uvloop"),
        "model": options.model,
        "flags": options.flags,
        "device": info["device"],
        "dtype": info["dtype"],
        "attention": info["attention"]["selected"],
        "picture": {
            "side_px": options.size,
            "mean_bytes": round(statistics.mean(path.stat().st_size for path in paths)),
            "different": len(paths),
            "sent_as": "form" if options.form else "raw body",
        },
        "ready_s": round(running.ready_s, 2),
        "lone": {**lone, "parts_ms": parts_ms, "parts_sum_ms": round(sum(parts_ms.values()), 2)},
        "load": load,
        "tower_alone": tower,
        "share_of_tower": round(load["patches_per_s"] / tower["patches_per_s"], 3),
        "share_of_tower_with_copies": round(load["patches_per_s"] / tower["with_copies_patches_per_s"], 3),
        "decode": decoded,
        "loopback": loopback,
    }


# ---- the service


def service_flags(options: argparse.Namespace) -> list[str]:
    flags = ["--model", options.model, "--device", options.device, "--store-bytes", "0", "--max-requests", "4096"]
    return [*flags, "--log-level", "warning", *options.flags.split()]


def lone_requests(running: Running, paths: Sequence[Path]) -> dict[str, Any]:
    """One client, one request after the other; the first few are not counted."""
    connection = Connection(running.port)
    requests = [request_bytes(path.read_bytes(), running.port) for path in paths]
    for request in requests[:5]:
        connection.ask(request)
    before = running.metrics()
    taken, first_bytes = [], []
    for request in requests:
        begun = time.monotonic()
        status, _, first_byte_s = connection.ask(request)
        taken.append(1e3 * (time.monotonic() - begun))
        first_bytes.append(1e3 * (first_byte_s - begun))
        assert status == 200, status
    connection.close()
    return {
        "requests": len(requests),
        "p50_ms": round(percentile(taken, 50), 2),
        "p95_ms": round(percentile(taken, 95), 2),
        "first_byte_p50_ms": round(percentile(first_bytes, 50), 2),
        "stages_ms": stages(difference(before, running.metrics())),
    }


def under_load(running: Running, options: argparse.Namespace, pictures: Path) -> dict[str, Any]:
    warm_up_s = options.seconds / 3 if options.warm_up is None else options.warm_up
    start = time.monotonic() + SETTLE_S
    begin, end = start + warm_up_s, start + warm_up_s + options.seconds
    with clients(options, pictures, running.port, start, end) as results:
        time.sleep(begin - time.monotonic())
        before, cpu_before = running.metrics(), running.cpu_s()
        begin = time.monotonic()
        time.sleep(end - time.monotonic())
        after, cpu_after = running.metrics(), running.cpu_s()
        end = time.monotonic()
        resident = running.resident_bytes()
        found = results()
    gained, seconds = difference(before, after), end - begin
    counted = found.within(begin, end)
    if not counted:
        raise RuntimeError(f"no answer in {seconds:.0f} s; {dict(found.failures)}\n{running.log_text()[-2000:]}")
    latencies = [1e3 * taken for _, taken, _ in counted]
    pictures_per_s = len(counted) / seconds
    budget = running.info()["batching"]["max_batch_patches"]
    patches = gained["moonvit_patches_total"] / max(gained["moonvit_batch_segments_sum"], 1)
    return {
        "clients": options.clients,
        "seconds": round(seconds, 2),
        "warm_up_s": round(warm_up_s, 2),
        "pictures": len(counted),
        "failures": dict(found.failures),
        "pictures_per_s": round(pictures_per_s, 2),
        "patches_per_s": round(gained["moonvit_patches_total"] / seconds, 1),
        "answer_bytes": found.answer_bytes,
        "answer_mb_per_s": round(pictures_per_s * found.answer_bytes / 1e6, 1),
        "latency_ms": {f"p{share}": round(percentile(latencies, share), 1) for share in (50, 95, 99)},
        "stages_ms": stages(gained),
        "event_loop_lag_ms": round(1e3 * (mean(gained, "moonvit_event_loop_lag_seconds") or 0.0), 3),
        "batches": {
            "count": round(gained["moonvit_batch_segments_count"]),
            "mean_segments": round(mean(gained, "moonvit_batch_segments") or 0.0, 2),
            "sizes": {str(size): n for size, n in batch_sizes(gained, int(budget // patches)).items()},
            "device_busy_share": round(gained["moonvit_device_busy_seconds_total"] / seconds, 3),
        },
        "service_cores": {name: round((cpu_after[name] - cpu_before[name]) / seconds, 2) for name in cpu_after},
        "service_cpu_ms_per_picture": round(1e3 * (cpu_after["process"] - cpu_before["process"]) / len(counted), 2),
        "client_cores": round(found.cpu_s / (seconds + warm_up_s), 2),
        "service_resident_mb": round(resident / 1e6),
    }


def stages(gained: Samples) -> dict[str, float]:
    """Mean milliseconds of each stage that happened."""
    means = {name: mean(gained, "moonvit_stage_duration_seconds", f'{{stage="{name}"}}') for name in STAGES}
    return {name: round(1e3 * value, 2) for name, value in means.items() if value is not None}


def batch_sizes(gained: Samples, largest: int) -> dict[int, int]:
    """Segments of a batch -> how many batches, from a histogram whose buckets only bound them.

    Every bucket's batches are put at the same share of the way from its least to its greatest size, the share at which
    all of them together have as many segments as there were.
    """
    buckets: list[tuple[int, int, int]] = []  # least, greatest size, batches
    below = counted = 0
    while counted < round(gained["moonvit_batch_segments_count"]):
        bound = max(1, 2 * below)
        cumulative = round(gained[f'moonvit_batch_segments_bucket{{le="{float(bound)}"}}'])
        if cumulative > counted:
            buckets.append((below + 1, max(below + 1, min(bound, largest)), cumulative - counted))
        below, counted = bound, cumulative
    least = sum(count * low for low, _, count in buckets)
    span = sum(count * (high - low) for low, high, count in buckets)
    share = min(max((gained["moonvit_batch_segments_sum"] - least) / span, 0.0), 1.0) if span else 0.0
    sizes: Counter[int] = Counter()
    for low, high, count in buckets:
        sizes[round(low + share * (high - low))] += count
    return dict(sorted(sizes.items()))


# ---- the clients


class Found:
    """What all client processes report together."""

    def __init__(self, reports: Sequence[dict[str, Any]]) -> None:
        self.finished = [tuple(each) for report in reports for each in report["finished"]]
        self.failures = sum((Counter(report["failures"]) for report in reports), Counter[str]())
        self.answer_bytes = max(report["answer_bytes"] for report in reports)
        self.cpu_s = sum(report["cpu_s"] for report in reports)

    def within(self, begin: float, end: float) -> list[tuple[Any, ...]]:
        return [each for each in self.finished if begin <= each[0] < end]


@contextmanager
def clients(
    options: argparse.Namespace, pictures: Path, port: int, start: float, stop: float
) -> Iterator[Callable[[], Found]]:
    """Client processes that work from `start` to `stop`; the call that comes back waits for what they found."""
    num_processes = min(options.processes, options.clients)
    shares = [options.clients // num_processes + (n < options.clients % num_processes) for n in range(num_processes)]
    processes, first = [], 0
    for share in shares:
        command = [sys.executable, "-m", "benchmarks.clients", "--port", str(port), "--pictures", str(pictures)]
        command += ["--connections", str(share), "--first", str(first), "--step", str(options.clients)]
        command += ["--start", str(start), "--stop", str(stop), *(["--form"] if options.form else [])]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        first += share
    try:
        yield lambda: Found([json.loads(process.communicate()[0]) for process in processes])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ceiling(options: argparse.Namespace, pictures: Path, body_bytes: int, *flags: str) -> dict[str, float]:
    """The same clients against a server that only sends as many bytes."""
    port, seconds = free_port(), max(2.0, options.seconds / 6)
    command = [sys.executable, "-m", "benchmarks.plain_server", "--port", str(port), "--body-bytes", str(body_bytes)]
    server = subprocess.Popen([*command, *flags])
    try:
        wait_until_listening(port)
        start = time.monotonic() + SETTLE_S
        begin, end = start + seconds / 3, start + seconds
        with clients(options, pictures, port, start, end) as results:
            found = results()
    finally:
        server.kill()
        server.wait()
    rate = len(found.within(begin, end)) / (end - begin)
    return {"answers_per_s": round(rate, 1), "answer_mb_per_s": round(rate * body_bytes / 1e6, 1)}


# ---- the parts alone


def tower_alone(options: argparse.Namespace, sizes: dict[str, int], segments: Sequence[Segment]) -> dict[str, Any]:
    """The tower on batches of those sizes: pixels on the device already, and from host to host, copies beside it."""
    engine = engine_of(service_flags(options))
    engine.warm_up()
    source = cycle(segments)
    batches = {int(size): pack(list(islice(source, int(size))), engine.config) for size in sizes}
    order = [batches[size] for size in in_turns({int(size): count for size, count in sizes.items()})]
    on_device = {id(batch): to_device(batch, engine.device) for batch in batches.values()}
    one = to_device(pack(segments[:1], engine.config), engine.device)
    seconds = max(2.0, options.seconds / 6)
    alone = speed(cycle([on_device[id(batch)] for batch in order]), engine.forward, engine.device, seconds)
    waiting: list[Callable[[], torch.Tensor]] = []

    def host_to_host(batch: PackedBatch) -> None:
        waiting.append(engine.submit(batch))
        if len(waiting) > 1:
            waiting.pop(0)()

    with_copies = speed(cycle(order), host_to_host, engine.device, seconds)
    return {
        "attention": engine.attention.name,
        "patches_per_s": round(alone, 1),
        "with_copies_patches_per_s": round(with_copies, 1),
        "forward_one_ms": round(median_ms(lambda: wait(engine.forward(one))), 2),
    }


def engine_of(flags: Sequence[str]) -> Engine:
    """The engine that a service with these flags has."""
    settings = load_settings(given_settings(build_parser().parse_args(["serve", *flags])))
    device = resolve_device(settings.device)
    return Engine.load(
        settings.model,
        device=device,
        dtype=compute_dtype(settings.dtype, device),
        attention_backend=settings.attention_backend,
        rms_norm_eps=settings.rms_norm_eps,
        quantization=None if settings.quantization == "none" else settings.quantization,
    )


def in_turns(counts: dict[int, int], turns: int = 60) -> list[int]:
    """About `turns` sizes, each as often as its count says and spread evenly."""
    total = sum(counts.values())
    places = [
        ((n + 0.5) / times, size)
        for size, count in counts.items()
        for times in [max(1, round(turns * count / total))]
        for n in range(times)
    ]
    return [size for _, size in sorted(places)]


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    return PackedBatch(batch.pixel_values.to(device), batch.grids, batch.num_tokens)


def speed(
    batches: Iterator[PackedBatch], run: Callable[[PackedBatch], object], device: torch.device, seconds: float
) -> float:
    """Patches a second, after a third of the time to warm up and to come to the card's sustained clock."""
    for share in (1 / 3, 2 / 3):
        synchronize(device)
        begun, patches = time.perf_counter(), 0
        while time.perf_counter() - begun < share * seconds:
            for _ in range(4):  # the host may run ahead, but not without end
                batch = next(batches)
                run(batch)
                patches += sum(batch.lengths)
            synchronize(device)
        taken = time.perf_counter() - begun
    return patches / taken


def median_ms(call: Callable[[], object], calls: int = 20) -> float:
    for _ in range(3):
        call()
    taken = []
    for _ in range(calls):
        begun = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def wait(tensor: torch.Tensor) -> None:
    synchronize(tensor.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the table


def lines(report: dict[str, Any]) -> Iterator[str]:
    load, lone, tower, decode = report["load"], report["lone"], report["tower_alone"], report["decode"]
    picture, latency, batches, cores = report["picture"], load["latency_ms"], load["batches"], load["service_cores"]
    side_px, kilobytes = picture["side_px"], picture["mean_bytes"] / 1e3
    yield f"\n{report['model']} on {report['device']}, {report['dtype']}, attention {report['attention']}; " + (
        f"JPEGs of {side_px} x {side_px}, {kilobytes:.0f} kB, {picture['sent_as']}"
    )
    speeds = f"{load['pictures_per_s']:.1f} pictures/s, {load['patches_per_s']:,.0f} patches/s, "
    rows = {
        f"{load['clients']} clients, {load['seconds']:.0f} s": speeds
        + f"{load['answer_mb_per_s']:,.0f} MB/s of answers",
        "latency p50, p95, p99": f"{latency['p50']:.0f}, {latency['p95']:.0f}, {latency['p99']:.0f} ms",
        "failures": str(load["failures"] or "none"),
        "tower alone": f"{tower['patches_per_s']:,.0f} patches/s; {tower['with_copies_patches_per_s']:,.0f} copied",
        "service / tower": f"{report['share_of_tower']:.3f}; {report['share_of_tower_with_copies']:.3f} copied",
        "batches": f"{batches['mean_segments']} segments, device busy {batches['device_busy_share']:.0%}",
        "stages, mean ms": ", ".join(f"{name} {ms:.1f}" for name, ms in load["stages_ms"].items()),
        "cores, service": f"{cores['process']}, of them the event loop {cores['event_loop']}",
        "cores, clients": str(load["client_cores"]),
        "one client alone": f"p50 {lone['p50_ms']:.1f} ms, p95 {lone['p95_ms']:.1f}",
        "its parts, ms": " + ".join(f"{name} {ms:.1f}" for name, ms in lone["parts_ms"].items())
        + f" = {lone['parts_sum_ms']:.1f}",
        "decoder alone": f"{decode['pictures_per_s']:.0f} pictures/s by {decode['workers']} workers",
        **{f"loopback, {name}": f"{found['answer_mb_per_s']:,.0f} MB/s" for name, found in report["loopback"].items()},
    }
    for name, value in rows.items():
        yield f"  {name:26s}{value}"


if __name__ == "__main__":
    main()
