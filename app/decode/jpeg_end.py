"""Whether a JPEG that stops before its end marker lost anything but that marker.

libjpeg does not tell: without the marker it waits for more input before it hands out the last rows, and with a marker
put behind a cut file it invents them. What it cannot do is invent the same rows from differing input.
"""

import io
import re
from collections.abc import Iterator
from itertools import islice

from PIL import Image, JpegImagePlugin

_END_MARKER = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")  # of those that have a length; image data holds none
_MAX_SEGMENTS = 10_000
_SCAN_START = 0xDA
_NUM_COEFFICIENTS = 64
_BAND_PX = 64  # rows compared at a time
# Skipped behind complete image data. Behind cut data they are decoded, and since they begin with every pair of bits
# they cannot all complete it to the same picture.
_FILLERS = tuple(bytes([byte]) * 64 for byte in (0x00, 0x5A, 0xA5, 0xFE))


def load_without_end(data: bytes) -> Image.Image | None:
    """The picture, loaded, or None if more than the end marker is missing.

    Raises:
        Exception: whatever Pillow raises on broken bytes.
    """
    body = data.removesuffix(b"\xff")
    if not _all_scans_present(body):
        return None
    first, *others = (body + filler + _END_MARKER for filler in _FILLERS)
    image = _loaded(first)
    return image if all(_same_pixels(image, _loaded(other)) for other in others) else None


def _loaded(data: bytes) -> Image.Image:
    image = JpegImagePlugin.jpeg_factory(io.BytesIO(data))
    image.load()
    return image


def _same_pixels(one: Image.Image, other: Image.Image) -> bool:
    width, height = one.size
    bands = ((0, top, width, min(top + _BAND_PX, height)) for top in range(0, height, _BAND_PX))
    return all(one.crop(band).tobytes() == other.crop(band).tobytes() for band in bands)


def _all_scans_present(data: bytes) -> bool:
    """Whether the scans bring every coefficient of every component to its last bit; a cut progressive file does not."""
    missing_bits: dict[int, list[int | None]] = {}
    for marker, payload in islice(_segments(data), _MAX_SEGMENTS):
        if 0xC0 <= marker <= 0xC2:
            missing_bits = {component: [None] * _NUM_COEFFICIENTS for component in payload[6::3]}
        elif marker == _SCAN_START:
            if not payload or len(payload) != 4 + 2 * payload[0]:
                return False
            first, last, bits = payload[-3:]
            for component in payload[1:-3:2]:
                for at in range(first, min(last + 1, _NUM_COEFFICIENTS)):
                    missing_bits.setdefault(component, [None] * _NUM_COEFFICIENTS)[at] = bits & 0x0F
    return bool(missing_bits) and all(bit == 0 for bits in missing_bits.values() for bit in bits)


def _segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(marker, payload) of each marker segment; image data between them is skipped."""
    at = 2
    while found := _MARKER.search(data, at):
        at = found.end()
        length = max(int.from_bytes(data[at : at + 2], "big"), 2)
        yield found[0][1], data[at + 2 : at + length]
        at += length
