"""Pictures to measure with: JPEGs that look like photographs to a codec, each one different, the same in every run."""

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

QUALITY = 85  # 250 to 350 KB at 1024x1024, as from a camera
NUM_SHAPES = 60


def write_jpegs(directory: Path, count: int, side_px: int) -> list[Path]:
    """`count` square JPEGs as `00000.jpg` and so on; the n-th is the same in every run."""

    def write(number: int) -> Path:
        path = directory / f"{number:05d}.jpg"
        path.write_bytes(jpeg(number, side_px, side_px))
        return path

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(write, range(count)))


def jpeg(number: int, width: int, height: int) -> bytes:
    """Baseline JPEG, 4:2:0, of the n-th picture."""
    buffer = io.BytesIO()
    picture(number, width, height).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def picture(number: int, width: int, height: int) -> Image.Image:
    """A soft background with shapes on it, under the grain of a sensor."""
    random = np.random.default_rng(number)
    coarse = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(NUM_SHAPES):
        x, y = int(random.integers(0, width)), int(random.integers(0, height))
        size = int(random.integers(4, max(5, min(width, height) // 4)))
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        shape = draw.ellipse if random.integers(0, 2) else draw.rectangle
        shape((x, y, x + size, y + size), fill=colour)
    grain = random.normal(0, 9, (height, width, 1))
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
