"""Pictures a second and the price of a process: in threads of one interpreter, and in sandboxed workers.

The same 1024x1024 JPEGs go through Pillow and through simplejpeg, each to patches, in as many threads, and in as many
worker processes, as there are cores. The workers also decode only, as where the device makes the patches. Round trip:
what a picture takes beyond its decoding, with one worker, for a picture of 28x28 pixels and for one of 1024x1024.
Run `python -m benchmarks.decode`; other work on the machine shows, so compare within one run.
"""

import argparse
import asyncio
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image

from app.decode import DecodeLimits, Decoder, MediaOptions, jpeg_turbo
from app.decode.picture import prepare_picture
from benchmarks.machine import RESULTS, describe
from benchmarks.pictures import jpeg
from encoder import load_config, preprocess_image

CONFIG = load_config("demo:k3-tiny")
LIMITS = DecodeLimits()
PLAIN = MediaOptions()
SIDE_PX = 1024
NUM_DIFFERENT = 8
ROUND_TRIPS = 200


@contextmanager
def without_simplejpeg() -> Iterator[None]:
    real = jpeg_turbo.agrees_with_pillow
    jpeg_turbo.agrees_with_pillow = lambda: False  # type: ignore[assignment]
    try:
        yield
    finally:
        jpeg_turbo.agrees_with_pillow = real


def one_thread_ms(data: bytes, repeats: int = 30) -> dict[str, float]:
    """Medians on an otherwise idle interpreter: decode alone, and all the way to patches."""

    def median_ms(work: Callable[[], Any]) -> float:
        work()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times)

    def pillow() -> Image.Image:
        image = Image.open(io.BytesIO(data))
        image.load()
        return image

    image = Image.open(io.BytesIO(data))
    pixels = jpeg_turbo.decode_rgb(data, image)
    if pixels is None:
        raise RuntimeError("simplejpeg and Pillow differ here")
    loaded = pillow()
    return {
        "decode_pillow": median_ms(pillow),
        "decode_simplejpeg": median_ms(lambda: jpeg_turbo.decode_rgb(data, image)),
        "patches_from_pillow": median_ms(lambda: preprocess_image(loaded, CONFIG)),
        "patches_from_simplejpeg": median_ms(lambda: preprocess_image(pixels, CONFIG)),
    }


def threads_per_s(files: list[bytes], num_threads: int) -> float:
    def prepare(data: bytes) -> None:
        prepare_picture(data, "JPEG", PLAIN, LIMITS, CONFIG)

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(prepare, files[:num_threads]))
        start = time.perf_counter()
        list(threads.map(prepare, files))
        return len(files) / (time.perf_counter() - start)


async def workers_per_s(made: Decoder, files: list[bytes]) -> float:
    async def prepare(data: bytes) -> None:
        await made.prepare(data, None, PLAIN)  # the result goes at once, as into a batch

    await asyncio.gather(*(prepare(data) for data in files[: 2 * len(made.pids("image"))]))
    start = time.perf_counter()
    await asyncio.gather(*(prepare(data) for data in files))
    return len(files) / (time.perf_counter() - start)


async def round_trip_ms(made: Decoder, data: bytes) -> float:
    beyond = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        prepared = await made.prepare(data, None, PLAIN)
        beyond.append(time.perf_counter() - start - prepared.decode_s - prepared.preprocess_s)
        del prepared
    return 1000 * statistics.median(beyond)


async def measure_workers(files: list[bytes], num_workers: int) -> dict[str, Any]:
    start = time.perf_counter()
    made = Decoder(CONFIG, LIMITS, picture_workers=num_workers, film_workers=1)
    await made.start()
    started_s = time.perf_counter() - start
    pool = made._workers["image"]
    start = time.perf_counter()
    await pool._end(pool._workers[-1])
    await pool._started()
    replaced_s = time.perf_counter() - start
    try:
        small = io.BytesIO()
        Image.new("RGB", (28, 28)).save(small, "PNG")
        result = {
            "start_all_s": started_s,
            "replace_one_ms": 1000 * replaced_s,
            "round_trip_28_px_ms": await round_trip_ms(made, small.getvalue()),
            "round_trip_1024_px_ms": await round_trip_ms(made, files[0]),
            "patches_per_s": await workers_per_s(made, files),
        }
        made.defers_preprocessing = True
        result["decode_only_per_s"] = await workers_per_s(made, files)
        result["sandbox"] = made.sandbox["image"]
    finally:
        await made.close()
    return result


def table(result: dict[str, Any]) -> dict[str, list[Any]]:
    one, processes, number = result["one_thread_ms"], result["processes"], result["workers"]
    by_pillow, by_both = one["decode_pillow"] + one["patches_from_pillow"], sum(list(one.values())[1::2])
    return {
        "columns": ["how", "pictures/s"],
        "rows": [
            ["one thread, Pillow", f"{1000 / by_pillow:.0f}"],
            ["one thread, simplejpeg", f"{1000 / by_both:.0f}"],
            [f"{number} threads, Pillow", f"{result['threads_pillow_per_s']:.0f}"],
            [f"{number} threads, simplejpeg", f"{result['threads_simplejpeg_per_s']:.0f}"],
            [f"{number} sandboxed processes, simplejpeg", f"{processes['patches_per_s']:.0f}"],
            [f"{number} sandboxed processes, decoded only", f"{processes['decode_only_per_s']:.0f}"],
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=400, help="pictures of each measurement [400]")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads or processes [all cores]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    different = [jpeg(number, SIDE_PX, SIDE_PX) for number in range(NUM_DIFFERENT)]
    files = [different[i % NUM_DIFFERENT] for i in range(arguments.pictures)]
    result = describe("pillow", "simplejpeg", "torch") | {
        "side_px": SIDE_PX,
        "mean_bytes": round(statistics.mean(map(len, different))),
        "pictures": arguments.pictures,
        "workers": arguments.workers,
        "one_thread_ms": one_thread_ms(different[0]),
    }
    with without_simplejpeg():
        result["threads_pillow_per_s"] = threads_per_s(files, arguments.workers)
    result["threads_simplejpeg_per_s"] = threads_per_s(files, arguments.workers)
    result["processes"] = asyncio.run(measure_workers(files, arguments.workers))
    result |= {"what": "1024x1024 JPEGs decoded", "table": table(result)}
    text = json.dumps(result, indent=2)
    print(text)
    (RESULTS / "decode.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
