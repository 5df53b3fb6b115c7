"""JPEGs through simplejpeg, which hands out the rows as they are wanted; Pillow holds four bytes a pixel and copies.

Both are libjpeg-turbo, so that pixels are the same bits. Only what it decodes without a single warning is taken: all
else, and all but 8-bit RGB, stays with Pillow and its rules on damaged files.
"""

import io
from functools import cache

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

_PROBE_SIZE_PX = (67, 45)  # no multiple of a block


def decode_rgb(data: bytes, image: Image.Image) -> NDArray[np.uint8] | None:
    """(H, W, 3), the same as of `image`, or None if Pillow must decode it.

    Args:
        image: the same file as Pillow opened it, not yet loaded.
    """
    if image.mode != "RGB" or not agrees_with_pillow():
        return None
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except ValueError:  # damaged, or of a rare form
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


@cache
def agrees_with_pillow() -> bool:
    """Whether the two installed libraries give the same pixels: each brings its own build of libjpeg-turbo."""
    width, height = _PROBE_SIZE_PX
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    for subsampling in (0, 1, 2):
        for progressive in (False, True):
            file = io.BytesIO()
            Image.fromarray(noise).save(file, "JPEG", quality=85, subsampling=subsampling, progressive=progressive)
            ours = simplejpeg.decode_jpeg(file.getvalue(), "RGB", strict=True)
            if not np.array_equal(ours, np.asarray(Image.open(file))):
                return False
    return True
