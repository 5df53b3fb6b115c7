"""Full-size K2.5 tower and projector on a CPU: ours against the transformers library's own port.

Same demo weights in float32, same normalised pixels, same threads. Each side gets the whole batch in one call with its
best CPU attention (both call PyTorch's SDPA segment by segment). The two take turns, in changing order, and the first
round is dropped. The ratio is the median over the rounds of theirs / ours within one round, so that a neighbour's load
that comes and goes does not decide it; the ratio of the fastest calls stands beside it. Run `python -m
benchmarks.tower_cpu`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import RESULTS, describe
from benchmarks.transformers_k25 import TransformersK25
from encoder import Engine, Grid, PackedBatch, Segment, pack
from encoder.segments import normalize

MODEL = "demo:k25"
BATCHES = {
    "two 224x224, one 448x448": [Grid(1, 16, 16), Grid(1, 16, 16), Grid(1, 32, 32)],
    "mixed: 224x224, 320x240, chunk of 4 frames 224x126, 112x448": [
        Grid(1, 16, 16),
        Grid(1, 18, 24),
        Grid(4, 10, 16),
        Grid(1, 32, 8),
    ],
}


def make_batch(grids: list[Grid], engine: Engine) -> PackedBatch:
    """Random bytes, normalised beforehand so that both sides start from the same float32 pixels."""
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.randint(0, 256, (g.num_patches, 3, 14, 14), generator=generator, dtype=torch.uint8) for g in grids]
    return pack([Segment(normalize(p, engine.config), g) for p, g in zip(pixels, grids, strict=True)], engine.config)


def alternate(sides: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, the sides taking turns in changing order; the first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in sorted(sides, reverse=turn % 2 == 1):
            start = time.perf_counter()
            sides[name]()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(engine: Engine, theirs: TransformersK25, grids: list[Grid], rounds: int) -> dict[str, Any]:
    batch = make_batch(grids, engine)
    sides = {"ours": lambda: engine.run(batch), "transformers": lambda: theirs(batch.pixel_values, batch.grids)}
    difference = (sides["ours"]() - sides["transformers"]()).abs().max().item()
    seconds = alternate(sides, rounds)
    rounds_ratio = [other / ours for ours, other in zip(seconds["ours"], seconds["transformers"], strict=True)]
    return {
        "grids_thw": [list(grid) for grid in grids],
        "patches": sum(batch.lengths),
        "tokens": sum(batch.num_tokens),
        "max_abs_difference": difference,
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "fastest_s": {name: min(values) for name, values in seconds.items()},
        "ratio": statistics.median(rounds_ratio),
        "ratio_of_fastest": min(seconds["transformers"]) / min(seconds["ours"]),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds of each batch [7]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides [PyTorch's own]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engine = Engine.load(MODEL)
    theirs = TransformersK25(engine.config, engine.model.state_dict())
    with torch.inference_mode():
        batches = {name: measure(engine, theirs, grids, arguments.rounds) for name, grids in BATCHES.items()}
    print(f"{'batch (seconds are the fastest)':<62}{'patches':>8}{'ours':>9}{'theirs':>9}{'ratio':>7}{'fastest':>9}")
    for name, result in batches.items():
        ours, other = result["fastest_s"]["ours"], result["fastest_s"]["transformers"]
        print(
            f"{name:<62}{result['patches']:>8}{ours:>8.2f}s{other:>8.2f}s"
            f"{result['ratio']:>7.2f}{result['ratio_of_fastest']:>9.2f}"
        )
    report = {
        "what": "seconds per batch, float32; ratio above 1: ours is faster",
        "model": MODEL,
        "attention": {"ours": engine.attention.name, "transformers": "sdpa, one call a segment"},
        **describe("torch", "transformers", "numpy"),
        "batches": batches,
    }
    (RESULTS / "tower_cpu.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
