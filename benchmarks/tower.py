"""Tower and projector of `demo:k3` in bfloat16 on one GPU: eleven workloads, as a table and as JSON.

    python -m benchmarks.tower [--attention auto] [--only "1 x 224,64 x 224"] [--out FILE]

The steps between the products take turns, plain and fused, and for small batches as CUDA graphs, within one run. Pixels
are random bytes that lie on the device already. Each time is the median over device events around whole calls, which
follow each other without a wait; where the host is slower than the device, that is the host's time. TFLOP/s counts
what `encoder.flops` counts. The last column is the share of what a square bfloat16 product of 8192 keeps up for 3 s.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import RESULTS, describe
from encoder import Engine, Grid, PackedBatch, flops, num_tokens, split
from encoder.attention.reference import ReferenceAttention
from encoder.fusion import names
from encoder.ops import PLAIN

MODEL = "demo:k3"
MIXED = [(1, n, n) for n in (16, 24, 32, 32, 48, 64, 64, 40, 30, 20, 12)] + [(4, 26, 46)]
# Milliseconds of SGLang 0.5.23's own K3 tower with its defaults, measured on another H200 of this kind on 2026-11-30.
WORKLOADS: dict[str, tuple[list[tuple[int, int, int]], float]] = {
    "1 x 224": ([(1, 16, 16)], 17.8),
    "1 x 448": ([(1, 32, 32)], 7.51),
    "1 x 1024": ([(1, 74, 74)], 18.7),
    "1 x 1080p": ([(1, 78, 138)], 52.8),
    "64 x 224": ([(1, 16, 16)] * 64, 76.3),
    "16 x 640x480": ([(1, 36, 46)] * 16, 70.1),
    "8 x 1024": ([(1, 74, 74)] * 8, 146.6),
    "4 x 1080p": ([(1, 78, 138)] * 4, 212.2),
    "8 chunks 4 x 640x360": ([(4, 26, 46)] * 8, 124.2),
    "12 mixed": (MIXED, 60.3),
    "1 x 3584": ([(1, 256, 256)], 1261.0),
}
ROUNDS, SECONDS = 4, 4.0  # turns of each version, and about how long they take together
LONG_MS = 400.0  # a call that takes longer is made four times only
BROKEN_DOWN = "4 x 1080p", "64 x 224"
KERNELS = {  # part of a kernel's name -> what it does; the first that fits counts
    "add_norm_row": "residual + norm",
    "rotate_rows": "rotation",
    "look_up_levels": "normalise",
    "merge_rows": "merge",
    "attend_tile": "attention",
    "flash": "attention",
    "fmha": "attention",
    "sdpa": "attention",
    "Prefill": "attention",
    "nvjet": "products",
    "gemm": "products",
    "cutlass": "products",
    "Memcpy": "copies",
    "elementwise": "element-wise",
    "norm": "norm",
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--attention", default="auto", help="attention backend (default: auto)")
    arguments.add_argument("--only", help="comma-separated workloads (default: all)")
    arguments.add_argument("--out", type=Path, default=RESULTS / "tower.json")
    options = arguments.parse_args()
    engine = Engine.load(MODEL, device="cuda", attention_backend=options.attention)
    engine.warm_up()
    chosen = options.only.split(",") if options.only else list(WORKLOADS)
    report = {
        "model": MODEL,
        **describe("torch", "triton", "flashinfer-python", "nvidia-cudnn-frontend"),
        "attention": {"configured": engine.attention.configured, "self_test": engine.attention.self_test},
        "steps": names(engine.model.ops),
        "graphs": engine.graphs.buckets if engine.graphs else [],
        "product_tflops": {"before": round(sustained_product(), 1)},
        "workloads": {},
    }
    print(f"{report['gpu']}, steps {report['steps']}, product {report['product_tflops']} TFLOP/s")
    for name in chosen:
        report["workloads"][name] = measure(name, engine, report["product_tflops"]["before"])
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if not options.only:
        report["product_tflops"]["after"] = round(sustained_product(), 1)
        report["error"] = errors(engine)
        report["breakdown_ms"] = {name: breakdown(engine, make_batch(WORKLOADS[name][0])) for name in BROKEN_DOWN}
        print(f"product {report['product_tflops']}\nerror {report['error']}\nbreakdown {report['breakdown_ms']}")
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


def make_batch(shapes: list[tuple[int, int, int]]) -> PackedBatch:
    """Random bytes on the device."""
    grids = [Grid(*shape) for shape in shapes]
    generator = torch.Generator("cuda").manual_seed(0)
    size = (sum(grid.num_patches for grid in grids), 3, 14, 14)
    pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8, device="cuda")
    return PackedBatch(pixels, grids, [grid.h * grid.w // 4 for grid in grids])


def measure(name: str, engine: Engine, product_tflops: float) -> dict[str, Any]:
    shapes, peer_ms = WORKLOADS[name]
    batch = make_batch(shapes)
    tflop = sum(flops(grid, engine.config) for grid in batch.grids) / 1e12
    eager, fused = replace(engine, graphs=None), engine.model.ops
    versions = {"plain": call(eager, PLAIN, batch), "fused": call(eager, fused, batch)}
    if engine.graphs is not None and engine.graphs.fits(batch.lengths):
        versions["graph"] = call(engine, fused, batch)
    times = alternate(versions)
    engine.model.ops = fused
    best = min((title for title in times if title != "plain"), key=lambda title: statistics.median(times[title]))
    median_ms = {title: round(statistics.median(values), 3) for title, values in times.items()}
    tflops = 1e3 * tflop / median_ms[best]
    result = {
        "patches": sum(batch.lengths),
        "tokens": sum(num_tokens(grid, engine.config) for grid in batch.grids),
        "tflop": round(tflop, 3),
        "attention": engine.attention_for(batch.lengths) if best == "graph" else engine.attention.choose(batch.lengths),
        "median_ms": median_ms,
        "least_ms": {title: round(min(values), 3) for title, values in times.items()},
        "calls": {title: len(values) for title, values in times.items()},
        "best": best,
        "tflops": round(tflops, 1),
        "share_of_product": round(tflops / product_tflops, 3),
        "peer_ms": peer_ms,
        "peer_per_ours": round(peer_ms / median_ms[best], 2),
    }
    print(
        f"{name:22s} {result['attention']:16s} {median_ms} {result['tflops']:.0f} TFLOP/s, "
        f"{100 * result['share_of_product']:.0f} % of the product, peer / ours {result['peer_per_ours']:.2f}",
        flush=True,
    )
    return result


def call(engine: Engine, ops: Any, batch: PackedBatch) -> Callable[[], Tensor]:
    def run() -> Tensor:
        engine.model.ops = ops
        return engine.forward(batch)

    return run


def alternate(versions: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Milliseconds of every call; the versions take turns of a few calls each, in changing order."""
    for run in versions.values():
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    once = min(timed(run, 1)[0] for run in versions.values())
    calls = 2 if once > LONG_MS else min(25, max(5, round(1e3 * SECONDS / once / ROUNDS / len(versions))))
    times: dict[str, list[float]] = {title: [] for title in versions}
    for turn in range(2 if once > LONG_MS else ROUNDS):
        for title in sorted(versions, reverse=turn % 2 == 1):
            times[title] += timed(versions[title], calls)
    return times


def timed(run: Callable[[], Tensor], calls: int) -> list[float]:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def sustained_product(size: int = 8192, seconds: float = 3.0) -> float:
    """TFLOP/s of a square bfloat16 product over the last third of the time, when the card has come to its power."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    tflop = 2 * size**3 / 1e12
    calls = round(seconds / (tflop / 650))
    times = timed(lambda: a @ b, calls)
    return 1e3 * tflop / statistics.mean(times[-calls // 3 :])


def errors(engine: Engine) -> dict[str, Any]:
    """Relative L2 error of each item of the mixed workload against float32 with the oracle's attention."""
    batch = make_batch(MIXED)
    exact = copy.deepcopy(engine.model).float()
    exact.ops = PLAIN
    with torch.inference_mode():
        cu_seqlens = torch.tensor(batch.cu_seqlens, dtype=torch.int32, device="cuda")
        attend = ReferenceAttention().plan(batch.lengths, cu_seqlens)
        want = split(exact(batch.pixel_values, batch.grids, attend), batch)
    fused = engine.model.ops
    found = {}
    for title, ops in (("plain", PLAIN), ("fused", fused)):
        got = split(call(engine, ops, batch)(), batch)
        found[title] = [float((g.float() - w).norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    engine.model.ops = fused
    return {title: {"items": [round(v, 5) for v in values], "largest": max(values)} for title, values in found.items()}


def breakdown(engine: Engine, batch: PackedBatch) -> dict[str, float]:
    """Milliseconds of device time by kind of kernel, in one call under the profiler."""
    engine.forward(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.forward(batch)
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profile.key_averages():
        kind = next((title for part, title in KERNELS.items() if part in event.key), "other")
        spent[kind] = spent.get(kind, 0.0) + event.self_device_time_total / 1e3
    return {kind: round(ms, 3) for kind, ms in sorted(spent.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    main()
