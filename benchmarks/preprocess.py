"""Pictures to patches: the CPU path beside the GPU's, as a table and as JSON.

    python -m benchmarks.preprocess [--only "12 MP,1080p"] [--out FILE]

Both roads begin at decoded pictures and end with uint8 patches on the device, everything done. Needs torch, triton,
numpy, pillow and safetensors; no weights. Milliseconds are medians; the CPU path runs on one core, as one decoder does.

    cpu       preprocess_image of every picture, pack, copy
    defer     what a decoder still does: pixels out of Pillow's memory
    pack      pixels of the batch into one buffer
    copy      that buffer to the device, through pinned memory
    kernels   resize, mixing, padding and patches
    gpu       the last four together, as they follow each other
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.machine import RESULTS, describe
from encoder import (
    EncoderConfig,
    PackedBatch,
    defer_frames,
    defer_image,
    load_config,
    pack,
    preprocess_frames,
    preprocess_image,
)
from encoder.device_pixels import DevicePixels, choose
from encoder.transfers import Transfers

MODELS = {"k3": "demo:k3", "k25": "demo:k25"}  # K3 shrinks beyond 12.8 MP and mixes alpha, K2.5 beyond 3.2 MP
CASES: dict[str, tuple[int, str, int, int]] = {  # pictures, mode, width, height
    "12 MP": (1, "RGB", 4000, 3000),
    "12 MP transparent": (1, "RGBA", 4000, 3000),
    "4K": (1, "RGB", 3840, 2160),
    "1080p": (1, "RGB", 1920, 1080),
    "1024": (1, "RGB", 1024, 1024),
    "48 MP": (1, "RGB", 8000, 6000),
    "8 x 4K": (8, "RGB", 3840, 2160),
    "64 x 640x480": (64, "RGB", 640, 480),
    "64 x 224": (64, "RGB", 224, 224),
    "4 frames 4K": (4, "film", 3840, 2160),
}
ROUNDS, SECONDS = 30, 2.0  # at most so many, and about so long for each number
COLUMNS = ("cpu", "defer", "pack", "copy", "kernels", "gpu")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", help="comma-separated cases (default: all)")
    arguments.add_argument("--out", type=Path, default=RESULTS / "preprocess.json")
    options = arguments.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(1)
    report: dict[str, Any] = {**describe("torch", "triton", "numpy", "pillow"), "cases": {}}
    print(f"{report['gpu']}, {report['processor']}; ms")
    print(f"{'':22}" + "".join(f"{name:>9}" for name in COLUMNS) + "   MB copied: cpu, gpu")
    for model, spec in MODELS.items():
        config = load_config(spec)
        pixels = choose("cuda", config, device)
        assert pixels is not None  # or `choose` has raised
        for case in options.only.split(",") if options.only else CASES:
            name = f"{model} {case}"
            report["cases"][name] = found = measure(CASES[case], config, pixels, Transfers(device))
            moved = " ".join(f"{found['bytes'][road] / 1e6:9.2f}" for road in ("cpu", "gpu"))
            print(f"{name:22}" + "".join(f"{found['ms'][column]:9.3f}" for column in COLUMNS) + f"   {moved}")
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


def measure(
    case: tuple[int, str, int, int], config: EncoderConfig, pixels: DevicePixels, transfers: Transfers
) -> dict[str, Any]:
    """Times in ms and bytes copied; the two roads' patches are compared first."""
    prepare, defer = roads(case, config)

    def on_cpu() -> torch.Tensor:
        return transfers.upload(prepare().pixel_values)

    def on_gpu() -> torch.Tensor:
        return expand(defer())

    def expand(batch: PackedBatch) -> torch.Tensor:
        assert batch.staged is not None
        return pixels.expand(batch.staged, transfers.upload(batch.staged.buffer))

    assert torch.equal(on_cpu(), on_gpu())
    ready, batch = prepare(), defer()
    staged = batch.staged
    assert staged is not None
    buffer = transfers.upload(staged.buffer)
    _, deferred = segments_of(case, config)
    waiting = deferred()
    return {
        "pictures": case[0],
        "patches": staged.num_patches,
        "bytes": {"cpu": ready.pixel_values.nbytes, "gpu": staged.buffer.nbytes},
        "ms": {
            "cpu": median_ms(on_cpu),
            "defer": median_ms(deferred),
            "pack": median_ms(lambda: pack(waiting, config)),
            "copy": median_ms(lambda: transfers.upload(staged.buffer)),
            "kernels": kernels_ms(lambda: pixels.expand(staged, buffer)),
            "gpu": median_ms(on_gpu),
        },
    }


def segments_of(case: tuple[int, str, int, int], config: EncoderConfig) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two calls that make the segments of a case: prepared and deferred."""
    number, mode, width, height = case
    bands = {"RGBA": 4}.get(mode, 3)
    noise = np.random.default_rng(0).integers(0, 256, (number, height, width, bands), dtype=np.uint8)
    if mode == "film":
        return lambda: [preprocess_frames(noise, config)], lambda: [defer_frames(noise, config)]
    images = [Image.fromarray(pixels) for pixels in noise]
    return (
        lambda: [preprocess_image(image, config) for image in images],
        lambda: [defer_image(image, config) for image in images],
    )


def roads(
    case: tuple[int, str, int, int], config: EncoderConfig
) -> tuple[Callable[[], PackedBatch], Callable[[], PackedBatch]]:
    """Two calls that make the batch of a case."""
    ready, deferred = segments_of(case, config)
    return lambda: pack(ready(), config), lambda: pack(deferred(), config)


def median_ms(call: Callable[[], object]) -> float:
    """Of whole calls, each waited for."""
    times: list[float] = []
    stop = time.perf_counter() + SECONDS
    while len(times) < ROUNDS and (len(times) < 3 or time.perf_counter() < stop):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def kernels_ms(call: Callable[[], object]) -> float:
    """Of the device alone: events around ten calls that follow each other."""
    call()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 10)
    return statistics.median(times)


if __name__ == "__main__":
    main()
