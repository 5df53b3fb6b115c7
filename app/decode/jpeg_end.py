"""Whether a JPEG that stops before its end marker lost anything but that marker.

libjpeg does not tell: without the marker it waits for more input before it hands out the last rows, and with a marker
put behind a cut file it invents them. What it cannot do is invent the same coefficients from differing input; so
fillers are put behind the file, and its coefficients made visible. It takes no input, though, behind a complete restart
interval, so that all of those must have begun.
"""

import io
import re
from collections.abc import Iterator
from math import floor
from typing import Final

from PIL import Image, JpegImagePlugin

from app.decode.jpeg_segments import FRAME_STARTS, QUANTIZATION, Scan, read_scans, segments
from app.decode.picture_work import MAX_SCANNED_PIXELS

_END_MARKER: Final = b"\xff\xd9"
_RESTART: Final = re.compile(rb"\xff[\xd0-\xd7]")
_NUM_COEFFICIENTS: Final = 64
_MAX_SIDE_PX: Final = 65_535
_BAND_PX: Final = 64  # rows compared at a time
_STEP_BYTES: Final = 4 << 20  # copied in 1 ms
# Skipped behind complete image data. Behind cut data they are decoded, and since they begin with every pair of bits
# they cannot all complete it to the same coefficients.
_FILLERS: Final = tuple(bytes([byte]) * 64 for byte in (0x00, 0x5A, 0xA5, 0xFE))
# A coefficient's last bit changes samples by 1 with this factor. Coefficients are looked at in groups, as positions in
# zigzag order, since all of a block together would drive its samples beyond black and white, where no change shows.
_VISIBLE: Final = 4
_GROUPS: Final = (range(1, 10), range(10, 25), range(25, 45), range(45, 64))


def load_without_end(data: bytes) -> Image.Image | None:
    """The picture, loaded, or None if more than the end marker is or may be missing, or if trying would take too long.

    Raises:
        Exception: whatever Pillow raises on broken bytes.
    """
    end = len(data) - data.endswith(b"\xff")
    scans = read_scans(data)
    if not _all_bits_present(scans) or not _all_restarts_present(data, end, scans[-1]):
        return None
    if scans[-1].is_without_ac:  # what it would have said cannot be made visible
        return None
    image = _opened(data, end, [], _FILLERS[0])
    if len(scans) * image.width * image.height * len(_FILLERS) * len(_GROUPS) > MAX_SCANNED_PIXELS:
        return None
    for group in _GROUPS:
        edits = list(_edits(data, scans, group))
        first = _opened(data, end, edits, _FILLERS[0])
        if not all(_same_samples(first, _opened(data, end, edits, filler)) for filler in _FILLERS[1:]):
            return None
    image.load()
    return image


def _opened(data: bytes, end: int, edits: list[tuple[int, bytes]], filler: bytes) -> Image.Image:
    """The picture of an edited file with a filler and an end marker behind it; copied in steps, for the GIL's sake."""
    file = io.BytesIO()
    view = memoryview(data)[:end]
    for at in range(0, end, _STEP_BYTES):
        file.write(view[at : at + _STEP_BYTES])
    file.write(filler + _END_MARKER)
    for at, replacement in edits:
        file.seek(at)
        file.write(replacement)
    file.seek(0)
    return JpegImagePlugin.jpeg_factory(file)


def _edits(data: bytes, scans: list[Scan], group: range) -> Iterator[tuple[int, bytes]]:
    """(offset, new bytes) that make the coefficients of a group visible in every block, and no others."""
    for marker, end, payload in segments(data):
        start = end - len(payload)
        if marker == QUANTIZATION:
            yield start, _visible_tables(payload, group)
        elif marker in FRAME_STARTS:
            width, height = _uncropped_size(scans)
            yield start + 1, height.to_bytes(2, "big") + width.to_bytes(2, "big")


def _visible_tables(payload: bytes, group: range) -> bytes:
    """The same quantization tables with other factors."""
    factors = [_VISIBLE if at in group else 0 for at in range(_NUM_COEFFICIENTS)]
    tables = b""
    while len(tables) < len(payload):
        kind = payload[len(tables)]
        num_bytes = 2 if kind >> 4 else 1
        tables += bytes([kind]) + b"".join(factor.to_bytes(num_bytes, "big") for factor in factors)
    return tables[: len(payload)]


def _uncropped_size(scans: list[Scan]) -> tuple[int, int]:
    """The largest (width, height) with which every scan has the same units: of them, nothing is cut off."""
    widths, heights = zip(
        *(
            (units_wide * unit_width, units_high * unit_height)
            for (units_wide, units_high), (unit_width, unit_height) in (
                (scan.num_units, scan.unit_px) for scan in scans
            )
        ),
        strict=True,
    )
    return floor(min(*widths, _MAX_SIDE_PX)), floor(min(*heights, _MAX_SIDE_PX))


def _same_samples(one: Image.Image, other: Image.Image) -> bool:
    """Compared before the conversion to RGB, which rounds and clips."""
    for image in (one, other):
        image.draft("YCbCr", image.size)
        image.load()
    width, height = one.size
    bands = ((0, top, width, min(top + _BAND_PX, height)) for top in range(0, height, _BAND_PX))
    return all(one.crop(band).tobytes() == other.crop(band).tobytes() for band in bands)


def _all_bits_present(scans: list[Scan]) -> bool:
    """Whether the scans bring every coefficient of every component to its last bit; a cut progressive file does not."""
    if not scans or not all(scan.is_whole for scan in scans):
        return False
    missing_bits: dict[int, list[int | None]] = {
        component: [None] * _NUM_COEFFICIENTS for component in scans[-1].frame[6::3]
    }
    for scan in scans:
        first, last, bits = scan.header[-3:]
        for component in scan.components:
            for at in range(first, min(last + 1, _NUM_COEFFICIENTS)):
                missing_bits.setdefault(component, [None] * _NUM_COEFFICIENTS)[at] = bits & 0x0F
    return bool(missing_bits) and all(bit == 0 for bits in missing_bits.values() for bit in bits)


def _all_restarts_present(data: bytes, end: int, scan: Scan) -> bool:
    """Whether the last scan has as many restart markers as its size asks for: one between two intervals."""
    if not scan.restart_interval:
        return True
    num_found = sum(1 for _ in _RESTART.finditer(data, scan.data_at, end))
    units_wide, units_high = scan.num_units
    return num_found == -(-units_wide * units_high // scan.restart_interval) - 1
