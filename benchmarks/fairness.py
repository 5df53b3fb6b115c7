"""How long single pictures wait for the device while another caller encodes a film: taking turns, and in plain order of
arrival. Writes benchmarks/results/fairness.json.

The batcher is the service's own. The device is not: it sleeps for as long as so many patches take at a fixed pace; and
patches have a single pixel, so that packing takes next to nothing. The numbers depend on the machine by milliseconds.

    python -m benchmarks.fairness
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import replace
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from app.batcher import Batcher
from app.logs import configure_logging
from app.ticket import Caller
from app.tower import InlineTower
from benchmarks.machine import RESULTS, describe
from encoder import EncoderConfig, Grid, PackedBatch, Segment, load_config

PATCHES_PER_S = 100_000  # a sixth of what an H200 does: the host's own milliseconds count for less
CHUNKS, CHUNK = 300, Grid(4, 16, 16)  # 1024 patches each: four frames of 224 x 224
PICTURE = Grid(1, 16, 16)
PICTURES_PER_S = 40.0  # a tenth of the device
BATCH_PATCHES = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the pictures' arrivals [1]")
    seed = parser.parse_args().seed
    config = load_config("demo:k3-tiny")
    config = replace(config, vision=replace(config.vision, patch_size=1))
    configure_logging("warning", "console")
    found = {
        "turns": asyncio.run(measure(config, seed, in_turns=True)),
        "arrival_order": asyncio.run(measure(config, seed, in_turns=False)),
    }
    result = describe("torch") | {
        "device": f"simulated, {PATCHES_PER_S} patches/s",
        "batch_patches": BATCH_PATCHES,
        "film": {"chunks": CHUNKS, "patches": CHUNKS * CHUNK.num_patches},
        "picture_patches": PICTURE.num_patches,
        "pictures_per_s": PICTURES_PER_S,
        "waits_ms": found,
    }
    path = RESULTS / "fairness.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, waits in found.items():
        print(f"{name:14s} " + "  ".join(f"{key} {value}" for key, value in waits.items()))


async def measure(config: EncoderConfig, seed: int, *, in_turns: bool) -> dict[str, Any]:
    """Waits in ms of the pictures that came while the film was being encoded, and how long the film took."""
    tower = InlineTower(simulated(config))
    batcher = Batcher([tower], config, max_batch_patches=BATCH_PATCHES, max_queued_patches=10**9)
    everybody = Caller()  # one caller's segments stay in the order they came in

    def caller() -> Caller:
        return Caller() if in_turns else everybody

    async def picture() -> float:
        return (await batcher.encode([blank(PICTURE, config)], caller())).queue_s

    arrivals = random.Random(seed)  # noqa: S311 - to have the same twice
    start = time.monotonic()
    film = asyncio.create_task(batcher.encode([blank(CHUNK, config)] * CHUNKS, caller()))
    pictures = []
    while not film.done():
        await asyncio.sleep(arrivals.expovariate(PICTURES_PER_S))
        pictures.append(asyncio.create_task(picture()))
    await film
    film_s = time.monotonic() - start
    waits = [1000 * wait for wait in await asyncio.gather(*pictures)]
    await asyncio.to_thread(batcher.close)
    cuts = quantiles(waits, n=100)
    return {
        "pictures": len(waits),
        "p50": round(cuts[49], 1),
        "p95": round(cuts[94], 1),
        "p99": round(cuts[98], 1),
        "max": round(max(waits), 1),
        "film_s": round(film_s, 2),
    }


def simulated(config: EncoderConfig) -> Any:
    def run(batch: PackedBatch) -> Tensor:
        time.sleep(sum(batch.lengths) / PATCHES_PER_S)
        return torch.zeros((sum(batch.num_tokens), 1))

    return run


def blank(grid: Grid, config: EncoderConfig) -> Segment:
    side = config.vision.patch_size
    return Segment(torch.zeros((1, 3, side, side), dtype=torch.uint8).expand(grid.num_patches, -1, -1, -1), grid)


if __name__ == "__main__":
    main()
