"""Pillow's bicubic resize of 8-bit pixels in numbers: weights, order of the passes, and what its conversions make of a
level beside alpha or black ink. Everything that is not a plain sum of products is a table here.

Source: Pillow 13, `libImaging/Resample.c` and `Convert.c`.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from encoder.config import Chessboard

PRECISION_BITS = 22  # of a weight: 32 bits of a sum less 8 of a pixel and 2 for sums beyond 0 to 255
SUPPORT_PX = 2.0  # of the bicubic kernel on either side, at scale 1
CACHED_WEIGHTS = 64  # about 16 bytes for each pixel of the longer side: 0.6 MB at most with `picture.MAX_SIDE_PX`


def is_vertical_first(width: int, height: int, new_width: int, new_height: int) -> bool:
    """Pillow's rule: the rows are summed first where the height loses more than twice the pixels that the width does.

    Each pass rounds, so the order shows in the result: for pictures more than twice as high as wide, for example.
    """
    return height - new_height > max(0, 2 * (width - new_width))


@lru_cache(maxsize=CACHED_WEIGHTS)
def weights(size: int, new_size: int) -> NDArray[np.int32]:
    """How one axis is resampled from `size` to `new_size` pixels.

    Returns:
        (1 + taps, new_size): the first source pixel of each new one, then the weights of that pixel and the next ones,
        in units of 2**-22. Weights of pixels beyond the last one are zero. An unchanged axis has one tap.
    """
    if size == new_size:
        table = np.stack([np.arange(size), np.full(size, 1 << PRECISION_BITS)]).astype(np.int32)
        return _frozen(table)
    # In double and in Pillow's order of operations: the last bit of a weight can decide the last bit of a pixel.
    scale = size / new_size
    filter_scale = max(scale, 1.0)
    support = SUPPORT_PX * filter_scale
    center = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    number = np.minimum((center + support + 0.5).astype(np.int64), size) - first
    tap = np.arange(number.max())[:, None]
    weight = np.where(tap < number, _bicubic((tap + first - center + 0.5) * (1.0 / filter_scale)), 0.0)
    total = np.cumsum(weight, axis=0)[-1]  # one after the other, where `sum` would add in pairs
    scaled = weight / total * (1 << PRECISION_BITS)
    rounded = np.trunc(np.where(scaled < 0, scaled - 0.5, scaled + 0.5))
    return _frozen(np.concatenate([first[None], rounded]).astype(np.int32))


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, inner, np.where(x < SUPPORT_PX, outer, 0.0))


def _frozen(table: NDArray[np.int32]) -> NDArray[np.int32]:
    table.setflags(write=False)  # handed out to every caller
    return table


# First index of `mixing_tables`, and what a picture's description names. 0 there means no table: RGB and gray.
ALPHA, PREMULTIPLIED, INKS = 1, 2, 3


@lru_cache(maxsize=4)
def mixing_tables(board: Chessboard) -> NDArray[np.uint8]:
    """(3, 2, 256, 256): [kind - 1, is white, fourth channel, level] -> level in RGB.

    Kinds: a level beside its alpha, on a gray or white square; the same where the level is premultiplied; an ink beside
    black, where the square does not matter. Pillow itself converts, so its formulas are not repeated here.
    """
    level, fourth = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))

    def converted(mode: str, to: str) -> NDArray[np.uint8]:
        pixels = np.stack([level, level, level, fourth], axis=-1)
        picture = Image.frombytes(mode, (256, 256), pixels.tobytes())
        return np.asarray(picture.convert(to))[..., 0]

    grounds = np.array([board.gray, board.white])[:, None, None]
    inks = converted("CMYK", "RGB")
    tables = [
        mix(level, fourth, grounds),
        mix(converted("RGBa", "RGBA"), fourth, grounds),
        np.stack([inks, inks]),
    ]
    return np.stack(tables)


def mix(level: NDArray[np.uint8], alpha: NDArray[np.uint8], ground: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Lay levels on a background, in float32 and truncated as the reference does it. Shapes broadcast."""
    share = alpha.astype(np.float32) / np.float32(255)
    mixed = share * level.astype(np.float32) + (np.float32(1) - share) * ground.astype(np.float32)
    return mixed.astype(np.uint8)


def white_squares(rows: NDArray[np.intp], columns: NDArray[np.intp], board: Chessboard) -> NDArray[np.bool_]:
    """(len(rows), len(columns)): whether a pixel of the resized picture lies on a white square."""
    odd = (rows[:, None] // board.square_px + columns // board.square_px) % 2 == 1
    white: NDArray[np.bool_] = odd != board.white_on_top_left
    return white
