"""Towers in worker processes against the engine in this one, and N of them against one: patches per second, as JSON.

    python -m benchmarks.replicas [--towers 1,2,4] [--device cuda] [--model demo:k3] [--seconds 10] [--out FILE]

Every tower has two batches in flight, and whoever reads the rows copies them, as the service does. For each number of
towers also: what handing a batch over takes the caller, and how long one that is killed is missing. `contexts` lists
the GPUs that this process has opened before it loads an engine of its own: there must be none.
"""

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from app.device import compute_dtype, resolve_device
from app.replicas import EngineTower, ReportingTower, TowerSpec, WorkerTower
from app.replicas.devices import cpu_threads
from benchmarks.machine import RESULTS, describe
from encoder import EncoderConfig, Grid, PackedBatch, Segment, load_config, pack

IN_FLIGHT = 2
GPU_BATCHES = {"8 x 1024": [(1, 74, 74)] * 8, "64 x 224": [(1, 16, 16)] * 64}
CPU_BATCHES = {"16 x 112": [(1, 8, 8)] * 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", help="comma-separated numbers of towers (default: 1, 2, 4 ... as GPUs are there)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--model", help="default: demo:k3 on a GPU, demo:k3-tiny on a CPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--out", type=Path, default=RESULTS / "replicas.json")
    options = parser.parse_args()
    device = resolve_device(options.device)
    on_gpu = device.type == "cuda"
    model = options.model or ("demo:k3" if on_gpu else "demo:k3-tiny")
    config = load_config(model)
    numbers = [int(n) for n in options.towers.split(",")] if options.towers else default_numbers(on_gpu)
    batches = {name: random_batch(grids, config) for name, grids in (GPU_BATCHES if on_gpu else CPU_BATCHES).items()}
    report: dict[str, Any] = {"model": model, "device": str(device), **describe("torch"), "workers": {}}
    for number in numbers:
        report["workers"][number] = measure_workers(number, model, device, config, batches, options.seconds)
        print(json.dumps({number: report["workers"][number]}), flush=True)
    report["contexts"] = open_gpus()
    engine = TowerSpec(model, str(device), compute_dtype("auto", device), threads=cpu_threads(1)).load()
    report["inline"] = {name: pace([EngineTower(engine)], batch, options.seconds) for name, batch in batches.items()}
    print(json.dumps({"inline": report["inline"], "contexts": report["contexts"]}), flush=True)
    report["ratios"] = {
        name: {
            number: measured["batches"][name]["patches_per_s"] / report["inline"][name]["patches_per_s"]
            for number, measured in report["workers"].items()
        }
        for name in batches
    }
    print(json.dumps({"patches per second, inline = 1": report["ratios"]}))
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def default_numbers(on_gpu: bool) -> list[int]:
    there = torch.cuda.device_count() if on_gpu else 2
    return [number for number in (1, 2, 4, 8) if number <= there]


def random_batch(grids: Sequence[tuple[int, int, int]], config: EncoderConfig) -> PackedBatch:
    noise, patch = torch.Generator().manual_seed(0), config.vision.patch_size
    shapes = [(t * h * w, 3, patch, patch) for t, h, w in grids]
    pixels = [torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise) for shape in shapes]
    return pack([Segment(own, Grid(*grid)) for own, grid in zip(pixels, grids, strict=True)], config)


def measure_workers(
    number: int,
    model: str,
    device: torch.device,
    config: EncoderConfig,
    batches: dict[str, PackedBatch],
    seconds: float,
) -> dict[str, Any]:
    specs = [
        TowerSpec(
            model,
            f"cuda:{i}" if device.type == "cuda" else "cpu",
            compute_dtype("auto", device),
            threads=cpu_threads(number),
            log_level="warning",
        )
        for i in range(number)
    ]
    towers = [WorkerTower(spec, config.vision.text_hidden_size) for spec in specs]
    try:
        start = time.perf_counter()
        for tower in towers:
            tower.start()
        fingerprints = {tower.wait_until_loaded().fingerprint for tower in towers}
        load_s = time.perf_counter() - start
        if len(fingerprints) > 1:
            raise SystemExit("the towers loaded different weights")
        paces = {name: pace(towers, batch, seconds) for name, batch in batches.items()}
        return {"load_s": load_s, "batches": paces, "missing_after_a_kill_s": missing_s(towers[-1])}
    finally:
        for tower in towers:
            tower.close()


def pace(towers: Sequence[ReportingTower], batch: PackedBatch, seconds: float) -> dict[str, float]:
    """Patches per second of all towers together, and milliseconds of one call of `submit` and of one batch."""
    for tower in towers:  # kernels, memory
        for _ in range(3):
            tower.submit(batch)()
    counts: list[int] = []
    hand_over_s: list[float] = []
    batch_s: list[float] = []
    begin = time.perf_counter()

    def work(tower: ReportingTower) -> None:
        pendings, done = [], 0
        while time.perf_counter() - begin < seconds:
            while len(pendings) < IN_FLIGHT:
                start = time.perf_counter()
                pendings.append((start, tower.submit(batch)))
                hand_over_s.append(time.perf_counter() - start)
            start, pending = pendings.pop(0)
            pending().clone()
            batch_s.append(time.perf_counter() - start)
            done += 1
        for _, pending in pendings:
            pending()
        counts.append(done + len(pendings))

    threads = [threading.Thread(target=work, args=(tower,)) for tower in towers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begin
    return {
        "patches_per_s": sum(counts) * sum(batch.lengths) / took,
        "submit_ms": statistics.median(hand_over_s) * 1000,
        "two_batches_ms": statistics.median(batch_s) * 1000,
        "patches": sum(batch.lengths),
    }


def missing_s(tower: WorkerTower) -> float:
    """From a kill until the next process is up."""
    pid = tower.status.pid
    assert pid is not None
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while tower.is_up:
        time.sleep(0.001)
    tower.wait_until_up()
    return time.perf_counter() - start


def open_gpus() -> list[int]:
    """GPUs that this process has a context on."""
    if not torch.cuda.is_available():
        return []
    return [i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i)]


if __name__ == "__main__":
    main()
