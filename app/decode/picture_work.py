"""Bounds on the work that a picture's size does not tell: a small file may ask for the same pixels thousands of times.

A worker that takes too long is ended, but only after seconds that others could have used. What is known to take that
long is refused before.
"""

import io
from typing import Final

from app.decode.jpeg_segments import read_scans
from app.errors import LimitExceeded

_MAX_SCANS: Final = 100  # encoders write about 10, optimisers up to 20
MAX_SCANNED_PIXELS: Final = 2_000_000_000  # a scan without news costs 1.3 ns a pixel
_MAX_PNG_CHUNKS: Final = 1000  # each may unpack to 1 MB, in 1 ms
_PNG_PIXEL_CHUNKS: Final = frozenset({b"IDAT", b"fdAT", b"fcTL"})
_MAX_READS: Final = 200_000
# A run-length coded BMP is decoded by a loop in Python: 1 us a run, and up to 0.1 us a pixel.
_MAX_RUNS: Final = 2_000_000
_MAX_RUN_PIXELS: Final = 16_000_000
_RUN_LENGTH_CODED: Final = frozenset({1, 2})  # BI_RLE8, BI_RLE4
_CORE_HEADER_BYTES: Final = 12  # too short to name a compression


class BoundedFile(io.BytesIO):
    """Bytes as a file that may be read a limited number of times, since Python reads headers piece by piece."""

    def __init__(self, data: bytes, picture_format: str) -> None:
        super().__init__(data)
        self._format = picture_format
        self._reads_left = self._max_reads = 2 * _MAX_RUNS if picture_format == "BMP" else _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise LimitExceeded(f"{self._format} picture in more than {self._max_reads} pieces")
        return super().read(size)


def check_scans(data: bytes, num_pixels: int) -> None:
    """Refuse a JPEG of too many scans for its size. Raises `LimitExceeded`."""
    num_scans = len(read_scans(data))
    limit = min(_MAX_SCANS, max(MAX_SCANNED_PIXELS // num_pixels, 1))
    if num_scans > limit:
        raise LimitExceeded(f"JPEG of {num_scans} scans, limit {limit} at {num_pixels} pixels")


def check_runs(data: bytes, num_pixels: int) -> None:
    """Refuse a large BMP that is run-length coded. Raises `LimitExceeded`."""
    compression = int.from_bytes(data[30:34], "little")
    has_compression = int.from_bytes(data[14:18], "little") > _CORE_HEADER_BYTES
    if has_compression and compression in _RUN_LENGTH_CODED and num_pixels > _MAX_RUN_PIXELS:
        raise LimitExceeded(f"run-length coded BMP of {num_pixels} pixels, limit {_MAX_RUN_PIXELS}")


def check_chunks(data: bytes) -> None:
    """Refuse a PNG of too many chunks, before Pillow unpacks the first. Raises `LimitExceeded`."""
    at = 8
    num_others = 0
    for _ in range(_MAX_READS):
        name = data[at + 4 : at + 8]
        if name in (b"IEND", b""):
            return
        num_others += name not in _PNG_PIXEL_CHUNKS
        if num_others > _MAX_PNG_CHUNKS:
            raise LimitExceeded(f"PNG of more than {_MAX_PNG_CHUNKS} chunks besides its pixels")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    raise LimitExceeded(f"PNG of more than {_MAX_READS} chunks")
