"""The service's decoder alone, as fast as it goes; and the segments of pictures, made by the library instead of it."""

import asyncio
import io
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

from PIL import Image

from app.decode import DecodeLimits, Decoder, MediaOptions
from encoder import Segment, load_config, preprocess_image

MEASURED_ALONE = 20


def segments_of(model: str, files: Sequence[bytes]) -> list[Segment]:
    """The segment of each picture."""
    config = load_config(model)
    return [preprocess_image(Image.open(io.BytesIO(data)), config) for data in files]


async def decode_speed(model: str, files: Sequence[bytes], at_least: int = 256) -> dict[str, Any]:
    """Milliseconds of one picture at a time; pictures a second with as many at a time as there are cores."""
    cores = os.cpu_count() or 1
    decoder, taken = Decoder(load_config(model), DecodeLimits(), picture_workers=cores, film_workers=1), []
    await decoder.start()
    try:
        for data in files[:MEASURED_ALONE]:
            begun = time.perf_counter()
            await decoder.prepare(data, "image", MediaOptions())
            taken.append(1e3 * (time.perf_counter() - begun))
        rounds = -(-at_least // len(files))
        begun = time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(decoder.prepare(data, "image", MediaOptions()) for data in files))
        seconds = time.perf_counter() - begun
    finally:
        await decoder.close()
    return {
        "one_ms": round(statistics.median(taken), 2),
        "workers": cores,
        "pictures_per_s": round(rounds * len(files) / seconds, 1),
    }
