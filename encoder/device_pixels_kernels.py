# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The Triton kernels of `encoder.device_pixels`: two launches for a batch, whatever the number of its pictures.

A program works on `tile` neighbouring pixels, each channel counted, of one frame; what it must know of the frame it
reads from the row of `Fact` numbers that `tiles` names. All sums are int32, as Pillow's.
"""

import triton
import triton.language as tl

from encoder.device_pixels_staging import Fact
from encoder.resample import PRECISION_BITS

NUM_FACTS = tl.constexpr(len(Fact))
PRECISION = tl.constexpr(PRECISION_BITS)
HALF = tl.constexpr(1 << (PRECISION_BITS - 1))
SOURCE = tl.constexpr(int(Fact.SOURCE))
CHANNELS = tl.constexpr(int(Fact.CHANNELS))
ROW = tl.constexpr(int(Fact.ROW))
VERTICAL_FIRST = tl.constexpr(int(Fact.VERTICAL_FIRST))
PREMULTIPLY = tl.constexpr(int(Fact.PREMULTIPLY))
MIDDLE = tl.constexpr(int(Fact.MIDDLE))
MIDDLE_BYTES = tl.constexpr(int(Fact.MIDDLE_BYTES))
MIDDLE_WIDTH = tl.constexpr(int(Fact.MIDDLE_WIDTH))
WEIGHTS_1 = tl.constexpr(int(Fact.WEIGHTS_1))
NUM_OUT_1 = tl.constexpr(int(Fact.NUM_OUT_1))
NUM_TAPS_1 = tl.constexpr(int(Fact.NUM_TAPS_1))
LAST_1 = tl.constexpr(int(Fact.LAST_1))
FIRST_TILE_1 = tl.constexpr(int(Fact.FIRST_TILE_1))
WEIGHTS_2 = tl.constexpr(int(Fact.WEIGHTS_2))
NUM_OUT_2 = tl.constexpr(int(Fact.NUM_OUT_2))
NUM_TAPS_2 = tl.constexpr(int(Fact.NUM_TAPS_2))
LAST_2 = tl.constexpr(int(Fact.LAST_2))
FIRST_TILE_2 = tl.constexpr(int(Fact.FIRST_TILE_2))
WIDTH = tl.constexpr(int(Fact.WIDTH))
HEIGHT = tl.constexpr(int(Fact.HEIGHT))
PATCH_COLUMNS = tl.constexpr(int(Fact.PATCH_COLUMNS))
OUT = tl.constexpr(int(Fact.OUT))
OUT_BYTES = tl.constexpr(int(Fact.OUT_BYTES))
MIXING = tl.constexpr(int(Fact.MIXING))


@triton.jit
def _fact(facts_ptr, column: tl.constexpr):
    """One number of a frame that fits int32."""
    return tl.load(facts_ptr + column).to(tl.int32)


@triton.jit
def _level(total):
    return tl.minimum(tl.maximum(total >> PRECISION, 0), 255)


@triton.jit
def resample_first(pixels_ptr, facts_ptr, tiles_ptr, weights_ptr, middle_ptr, tile: tl.constexpr):
    """Source pixels -> the middle: the first axis resampled; levels multiplied by alpha before where a frame asks."""
    program = tl.program_id(0)
    facts_ptr += tl.load(tiles_ptr + program) * NUM_FACTS
    offset = (program - _fact(facts_ptr, FIRST_TILE_1)) * tile + tl.arange(0, tile)
    inside = offset < _fact(facts_ptr, MIDDLE_BYTES)
    channels = _fact(facts_ptr, CHANNELS)
    pixel = offset // channels
    channel = offset - pixel * channels
    middle_width = _fact(facts_ptr, MIDDLE_WIDTH)
    y = pixel // middle_width
    x = pixel - y * middle_width
    row = _fact(facts_ptr, ROW)
    is_vertical = _fact(facts_ptr, VERTICAL_FIRST) > 0
    position = tl.where(is_vertical, y, x)
    step = tl.where(is_vertical, row, channels)
    rest = tl.where(is_vertical, x * channels, y * row) + channel
    source_ptr = pixels_ptr + tl.load(facts_ptr + SOURCE)
    num_out = _fact(facts_ptr, NUM_OUT_1)
    last = _fact(facts_ptr, LAST_1)
    taps_ptr = weights_ptr + tl.load(facts_ptr + WEIGHTS_1)
    first = tl.load(taps_ptr + position, mask=inside, other=0)
    to_alpha = channels - 1 - channel
    multiplied = inside & (to_alpha * _fact(facts_ptr, PREMULTIPLY) > 0)
    total = tl.full((tile,), HALF, tl.int32)
    for tap in range(_fact(facts_ptr, NUM_TAPS_1)):
        weight = tl.load(taps_ptr + (tap + 1) * num_out + position, mask=inside, other=0)
        at = tl.minimum(first + tap, last) * step + rest  # beyond the last pixel weights are zero
        level = tl.load(source_ptr + at, mask=inside, other=0).to(tl.int32)
        alpha = tl.load(source_ptr + at + to_alpha, mask=multiplied, other=255).to(tl.int32)
        product = level * alpha + 128  # with alpha 255 the level comes out as it was
        total += weight * (((product >> 8) + product) >> 8)
    tl.store(middle_ptr + tl.load(facts_ptr + MIDDLE) + offset, _level(total).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["square_px", "is_white_on_top_left"])
def resample_second(
    middle_ptr,
    facts_ptr,
    tiles_ptr,
    weights_ptr,
    mixing_ptr,
    out_ptr,
    square_px,
    is_white_on_top_left,
    patch: tl.constexpr,
    tile: tl.constexpr,
):
    """The middle -> patches: the other axis resampled, channels mixed to RGB.

    Where a frame is padded nothing is loaded, so the sum stays at its one half, which is level 0.
    """
    program = tl.program_id(0)
    facts_ptr += tl.load(tiles_ptr + program) * NUM_FACTS
    offset = (program - _fact(facts_ptr, FIRST_TILE_2)) * tile + tl.arange(0, tile)
    is_out = offset < _fact(facts_ptr, OUT_BYTES)
    number = offset // (3 * patch * patch)
    patch_columns = _fact(facts_ptr, PATCH_COLUMNS)
    patch_y = number // patch_columns
    y = patch_y * patch + offset // patch % patch
    x = (number - patch_y * patch_columns) * patch + offset % patch
    channel = offset // (patch * patch) % 3
    inside = is_out & (y < _fact(facts_ptr, HEIGHT)) & (x < _fact(facts_ptr, WIDTH))

    channels = _fact(facts_ptr, CHANNELS)
    row = _fact(facts_ptr, MIDDLE_WIDTH) * channels
    is_vertical = _fact(facts_ptr, VERTICAL_FIRST) == 0
    position = tl.where(is_vertical, y, x)
    step = tl.where(is_vertical, row, channels)
    rest = tl.where(is_vertical, x * channels, y * row)
    own = rest + tl.where(channels < 3, 0, channel)
    fourth = rest + channels - 1
    source_ptr = middle_ptr + tl.load(facts_ptr + MIDDLE)
    num_out = _fact(facts_ptr, NUM_OUT_2)
    last = _fact(facts_ptr, LAST_2)
    taps_ptr = weights_ptr + tl.load(facts_ptr + WEIGHTS_2)
    first = tl.load(taps_ptr + position, mask=inside, other=0)
    mixing = _fact(facts_ptr, MIXING)
    is_mixed = tl.where(inside, mixing, 0) > 0
    total = tl.full((tile,), HALF, tl.int32)
    total_fourth = total
    for tap in range(_fact(facts_ptr, NUM_TAPS_2)):
        weight = tl.load(taps_ptr + (tap + 1) * num_out + position, mask=inside, other=0)
        at = tl.minimum(first + tap, last) * step
        total += weight * tl.load(source_ptr + at + own, mask=inside, other=0).to(tl.int32)
        total_fourth += weight * tl.load(source_ptr + at + fourth, mask=is_mixed, other=0).to(tl.int32)
    level = _level(total)
    is_odd = (y // square_px + x // square_px) % 2
    is_white = tl.where(is_odd == is_white_on_top_left, 0, 1)
    entry = (((mixing - 1) * 2 + is_white) * 256 + _level(total_fourth)) * 256 + level
    level = tl.where(is_mixed, tl.load(mixing_ptr + entry, mask=is_mixed, other=0).to(tl.int32), level)
    tl.store(out_ptr + tl.load(facts_ptr + OUT) + offset, level.to(tl.uint8), mask=is_out)
